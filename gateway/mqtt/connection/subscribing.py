"""SUBSCRIBE and UNSUBSCRIBE: authorizes filters, joins the readers, and then sends SUBACK or UNSUBACK."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from gateway.kafka.contracts import Refused, in_time
from gateway.mqtt.connection.services import MqttServices
from gateway.mqtt.session.client_port import ClientPort
from gateway.mqtt.session.session import Session
from gateway.mqtt.state.records import PendingRetained, SessionSubscription
from mapping.outcomes import Outcome
from protocols.mqtt import packets
from protocols.mqtt.connection import Connection
from protocols.mqtt.packets import Subscription
from protocols.mqtt.properties import Properties
from protocols.mqtt.reasons import ReasonCode
from protocols.mqtt.topics import is_shared, parse_share

ANSWER_S: Final = 8.0
"""Seconds until a client gets an error because Kafka does not answer. Most clients give up after ten or more."""

JOIN_S: Final = 15.0
"""The same for joining a group, which also depends on the group's other members."""

MOST_LEVELS: Final = 256
"""Maximum number of levels of a filter: each takes about 250 bytes in the router."""

AT_EACH, IF_NEW, NEVER = 0, 1, 2  # Retain Handling (section 3.8.3.1)
_NAMES: Final = {
    Outcome.DENIED: ReasonCode.NOT_AUTHORIZED,
    Outcome.UNFIT: ReasonCode.TOPIC_FILTER_INVALID,
    Outcome.FULL: ReasonCode.QUOTA_EXCEEDED,
}
_TOO_MUCH: Final = frozenset({Outcome.TOO_LARGE, Outcome.FULL})


class _SubscribeAnswer:
    """The contents of a SUBACK: a code for each filter, and one reason string for all."""

    def __init__(self, count: int) -> None:
        self.codes: list[int] = [ReasonCode.UNSPECIFIED_ERROR] * count
        self.reason: str | None = None
        self.retained: list[tuple[SessionSubscription, PendingRetained | None]] = []
        self.new: list[str] = []

    def refuse(self, index: int, code: ReasonCode, reason: str) -> None:
        self.codes[index] = code
        self.reason = reason

    def refuse_for(self, index: int, refused: Refused) -> None:
        self.refuse(index, _NAMES.get(refused.outcome, ReasonCode.UNSPECIFIED_ERROR), refused.reason)


async def subscribe(
    client: ClientPort, session: Session, connection: Connection, services: MqttServices, event: packets.Subscribe
) -> None:
    """Subscribe to each allowed filter; SUBACK is sent when messages stored from then on will be delivered.

    All filters are looked up together. Subscriptions of a kept session are stored before SUBACK. Retained messages
    follow SUBACK.
    """
    identifiers = event.properties.subscription_identifiers if event.properties is not None else ()
    identifier = identifiers[0] if identifiers else 0
    answer = _SubscribeAnswer(len(event.subscriptions))
    allowed = _authorize(client, session, services, _prefixed(client, event.subscriptions), identifier, answer)
    shared = {
        index: subscription for index, subscription in allowed.items() if is_shared(subscription.options.topic_filter)
    }
    own = {index: subscription for index, subscription in allowed.items() if index not in shared}
    await asyncio.gather(_hold(client, session, services, own, answer), _join(session, shared, answer))
    if not await _save(client, session, services, answer.new):
        return
    explained = None
    if answer.reason is not None and client.grant is not None:
        explained = Properties(reason_string=client.grant.names.text(answer.reason))
    connection.send_suback(event.packet_id, answer.codes, explained)
    if answer.retained:
        session.deliveries.send_retained(answer.retained)
        session.feed()


def _prefixed(client: ClientPort, subscriptions: Sequence[Subscription]) -> Sequence[Subscription]:
    """Return the subscriptions with their whole filters, tenant prefix included (`mapping.tenants`)."""
    assert client.grant is not None
    names = client.grant.names
    if not names.mount:
        return subscriptions
    return [
        msgspec.structs.replace(subscription, topic_filter=names.filter(subscription.topic_filter))
        for subscription in subscriptions
    ]


async def _save(client: ClientPort, session: Session, services: MqttServices, new: Sequence[str] = ()) -> bool:
    """Store the session, if it is kept; without its `new` subscriptions if they are too much for it, or in all.

    Returns:
        Whether the client is still connected; it is disconnected if the session is not stored, or perhaps not.
    """
    if session.kept and session.client is client:
        try:
            await in_time(services.sessions.save(session), ANSWER_S)
        except Refused as refused:
            if refused.outcome in _TOO_MUCH:
                for topic_filter in new:
                    await _remove(session, topic_filter)
            code = ReasonCode.QUOTA_EXCEEDED if refused.outcome in _TOO_MUCH else ReasonCode.SERVER_BUSY
            client.disconnect(code, refused.reason)
            return False  # after a freeze, the session is left later
    return session.client is client


def _authorize(  # noqa: PLR0917 - the client and its request
    client: ClientPort,
    session: Session,
    services: MqttServices,
    subscriptions: Sequence[Subscription],
    identifier: int,
    answer: _SubscribeAnswer,
) -> dict[int, SessionSubscription]:
    """Return the allowed subscriptions by their position in the SUBSCRIBE; refuse the others."""
    assert client.grant is not None
    known = session.subscriptions.by_filter.keys() | session.shares.subscriptions.keys()
    allowed: dict[int, SessionSubscription] = {}
    most = services.config.max_subscriptions
    for index, options in enumerate(subscriptions):
        topic_filter = options.topic_filter
        share = parse_share(topic_filter) if is_shared(topic_filter) else None
        if share is None and is_shared(topic_filter):  # 3.1.1 only: the parser disconnects 5.0
            answer.refuse(index, ReasonCode.TOPIC_FILTER_INVALID, "not a shared subscription")
        elif not client.grant.mqtt_subscribe.filter(share.topic_filter if share is not None else topic_filter):
            client.audit_denied("subscribe", topic_filter)
            answer.refuse(index, ReasonCode.NOT_AUTHORIZED, "not allowed to subscribe to this filter")
        elif topic_filter.count("/") >= MOST_LEVELS + (0 if share is None else 2):
            answer.refuse(index, ReasonCode.QUOTA_EXCEEDED, "the filter has too many levels")
        elif (topic_filter not in known and len(known) >= most) or len(allowed) >= most:
            answer.refuse(index, ReasonCode.QUOTA_EXCEEDED, "too many subscriptions")
        else:
            known.add(topic_filter)
            granted = msgspec.structs.replace(options, qos=min(options.qos, services.config.maximum_qos))
            allowed[index] = SessionSubscription(granted, identifier)
    return allowed


async def _hold(
    client: ClientPort,
    session: Session,
    services: MqttServices,
    subscriptions: Mapping[int, SessionSubscription],
    answer: _SubscribeAnswer,
) -> None:
    """Have the router deliver to the session everything stored from now on."""
    if not subscriptions:
        return
    router = services.router
    filters = dict.fromkeys(subscription.options.topic_filter for subscription in subscriptions.values())
    try:
        held = await in_time(router.hold(filters), ANSWER_S)
    except Refused as refused:
        for index in subscriptions:
            answer.refuse_for(index, refused)
        return
    if session.client is not client:
        for topic_filter, result in held.items():
            if not isinstance(result, Refused):
                router.drop(topic_filter)
        return
    taken: set[str] = set()
    for index, subscription in subscriptions.items():
        options = subscription.options
        since = held[options.topic_filter]
        if isinstance(since, Refused):
            answer.refuse_for(index, since)
            continue
        if options.topic_filter in taken:
            router.hold_again(options.topic_filter)
        taken.add(options.topic_filter)
        known = options.topic_filter in session.subscriptions.by_filter
        if session.subscribed(subscription, since):
            answer.new.append(options.topic_filter)
        if options.retain_handling == AT_EACH or (options.retain_handling == IF_NEW and not known):
            answer.retained.append((subscription, session.deliveries.expect_retained(subscription)))
        answer.codes[index] = options.qos


async def _join(session: Session, subscriptions: Mapping[int, SessionSubscription], answer: _SubscribeAnswer) -> None:
    """Join the shared subscriptions; a filter that occurs twice is joined in order."""
    indexes: dict[str, list[int]] = {}
    for index, subscription in subscriptions.items():
        indexes.setdefault(subscription.options.topic_filter, []).append(index)

    async def join(index: int) -> None:
        topic_filter = subscriptions[index].options.topic_filter
        new = topic_filter not in session.shares.subscriptions
        try:
            await in_time(session.shares.join(subscriptions[index]), JOIN_S)
            answer.codes[index] = subscriptions[index].options.qos
            if new:
                answer.new.append(topic_filter)
        except Refused as refused:
            if refused.outcome is Outcome.DENIED and session.client is not None:
                session.client.audit_denied("subscribe", topic_filter)
            answer.refuse_for(index, refused)

    async def join_in_order(several: Sequence[int]) -> None:
        for index in several:
            await join(index)

    await asyncio.gather(*(join_in_order(several) for several in indexes.values()))


async def _remove(session: Session, topic_filter: str) -> bool:
    """Remove a subscription and return whether it existed."""
    if topic_filter in session.shares.subscriptions:
        return await session.shares.leave_group(topic_filter)
    return session.unsubscribed(topic_filter)


async def unsubscribe(
    client: ClientPort, session: Session, connection: Connection, services: MqttServices, event: packets.Unsubscribe
) -> None:
    """Remove subscriptions; no new messages are delivered for them [MQTT-3.10.4-2]."""
    assert client.grant is not None
    codes = []
    for topic_filter in map(client.grant.names.filter, event.topic_filters):
        if session.client is not client:
            return
        removed = await _remove(session, topic_filter)
        codes.append(ReasonCode.SUCCESS if removed else ReasonCode.NO_SUBSCRIPTION_EXISTED)
    if await _save(client, session, services):
        connection.send_unsuback(event.packet_id, codes)
