"""SUBSCRIBE and UNSUBSCRIBE: what is granted, and when that may be said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.kafka.contracts import Refused
from gateway.mqtt.records import Owed, Wish
from gateway.mqtt.router import Since
from mapping.outcomes import Outcome
from protocols.mqtt import events
from protocols.mqtt.connection import Connection
from protocols.mqtt.packets import Subscription
from protocols.mqtt.properties import Properties
from protocols.mqtt.reasons import ReasonCode
from protocols.mqtt.topics import is_shared, parse_share

if TYPE_CHECKING:
    from gateway.mqtt.client import Client
    from gateway.mqtt.services import Services
    from gateway.mqtt.session import Session

AT_EACH, IF_NEW, NEVER = 0, 1, 2  # Retain Handling (section 3.8.3.1)
_NAMES: Final = {
    Outcome.DENIED: ReasonCode.NOT_AUTHORIZED,
    Outcome.UNFIT: ReasonCode.TOPIC_FILTER_INVALID,
}
_GOODBYES: Final = {Outcome.TOO_LARGE: ReasonCode.QUOTA_EXCEEDED}


class _Answer:
    """What SUBACK will say: a code for each filter, and one reason string for all."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.reason: str | None = None
        self.retained: list[tuple[Wish, Owed | None]] = []
        self.new: list[str] = []

    def refuse(self, code: ReasonCode, reason: str) -> None:
        self.codes.append(code)
        self.reason = reason


async def subscribe(
    client: Client, connection: Connection, services: Services, event: events.SubscribeReceived
) -> None:
    """Grant each filter that may be granted; SUBACK follows when what comes now will be delivered.

    What a kept session subscribes to is stored before SUBACK. The retained messages follow it.
    """
    session = client.session
    if session is None:
        return
    identifiers = event.properties.subscription_identifiers if event.properties is not None else ()
    identifier = identifiers[0] if identifiers else 0
    answer = _Answer()
    for options in event.subscriptions:
        await _subscribe_one(client, session, services, Wish(options, identifier), answer)
    if client.session is not session:
        return  # it left meanwhile
    if session.kept:
        try:
            await services.sessions.save(session)
        except Refused as refused:
            if refused.outcome is Outcome.TOO_LARGE:
                for topic_filter in answer.new:
                    session.unsubscribed(topic_filter)
            client.say_goodbye(_GOODBYES.get(refused.outcome, ReasonCode.SERVER_BUSY), refused.reason)
            return
        if client.session is not session:
            return
    explained = Properties(reason_string=answer.reason) if answer.reason is not None else None
    connection.send_suback(event.packet_id, answer.codes, explained)
    for wish, owed in answer.retained:
        session.deliveries.send_retained(wish, owed)
    if answer.retained:
        session.feed()


async def _subscribe_one(client: Client, session: Session, services: Services, wish: Wish, answer: _Answer) -> None:
    options = wish.options
    topic_filter = options.topic_filter
    share = parse_share(topic_filter) if is_shared(topic_filter) else None
    if share is None and is_shared(topic_filter):
        answer.refuse(ReasonCode.TOPIC_FILTER_INVALID, "not a shared subscription")  # 3.1.1: 5.0 was disconnected
        return
    assert client.grant is not None
    if not client.grant.mqtt_subscribe.filter(share.topic_filter if share is not None else topic_filter):
        answer.refuse(ReasonCode.NOT_AUTHORIZED, "not allowed to subscribe to this filter")
        return
    known = topic_filter in session.filters or topic_filter in session.shares.wishes
    if not known and len(session.filters) + len(session.shares.wishes) >= services.config.max_subscriptions:
        answer.refuse(ReasonCode.QUOTA_EXCEEDED, "too many subscriptions")
        return
    granted = min(options.qos, services.config.maximum_qos)
    wish = Wish(_at(options, granted), wish.identifier)
    since: Since = {}
    try:
        if share is not None:
            await session.shares.join(wish)
        else:
            since = await services.router.hold(topic_filter)
    except Refused as refused:
        answer.refuse(_NAMES.get(refused.outcome, ReasonCode.UNSPECIFIED_ERROR), refused.reason)
        return
    if client.session is not session:
        if share is None:
            services.router.drop(topic_filter)
        return
    if share is None:
        if session.subscribed(wish, since):
            answer.new.append(topic_filter)
        if options.retain_handling == AT_EACH or (options.retain_handling == IF_NEW and not known):
            answer.retained.append((wish, session.deliveries.owe_retained(wish)))
    answer.codes.append(granted)


def _at(options: Subscription, qos: int) -> Subscription:
    if options.qos == qos:
        return options
    return Subscription(
        options.topic_filter, qos, options.no_local, options.retain_as_published, options.retain_handling
    )


async def unsubscribe(
    client: Client, connection: Connection, services: Services, event: events.UnsubscribeReceived
) -> None:
    """Take subscriptions out; nothing new is delivered for them [MQTT-3.10.4-2]."""
    session = client.session
    if session is None:
        return
    codes = []
    for topic_filter in event.topic_filters:
        if client.session is not session:
            return
        if topic_filter in session.shares.wishes:
            found = await session.shares.part(topic_filter)
        else:
            found = session.unsubscribed(topic_filter)
        codes.append(ReasonCode.SUCCESS if found else ReasonCode.NO_SUBSCRIPTION_EXISTED)
    if client.session is session and session.kept:
        try:
            await services.sessions.save(session)
        except Refused as refused:
            client.say_goodbye(_GOODBYES.get(refused.outcome, ReasonCode.SERVER_BUSY), refused.reason)
            return
    connection.send_unsuback(event.packet_id, codes)
