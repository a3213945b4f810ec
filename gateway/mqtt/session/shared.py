"""The shared subscriptions of one session: its memberships in Kafka consumer groups."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import structlog

from gateway.kafka.contracts import Refused
from gateway.mqtt.routing.shared_groups import SharedSubscriber, ShareMember, Sharing
from gateway.mqtt.session.deliveries import Deliveries
from gateway.mqtt.state.records import SessionSubscription
from gateway.runtime.failures import failures
from gateway.runtime.spawn import Spawn
from gateway.security.rights.authorization import Grant
from gateway.security.rights.group_names import GroupNames
from mapping.outcomes import Outcome
from protocols.mqtt.topics import parse_share

log = structlog.get_logger(__name__)

RETRY_S: Final = 1.0  # while Kafka does not answer


class ShareParts(msgspec.Struct, frozen=True):
    """Shared by the subscriptions of all sessions; `names` authorizes groups."""

    sharing: Sharing
    names: GroupNames
    spawn: Spawn


def is_refused(grant: Grant, topic_filter: str) -> bool:
    """Whether the rights do not allow a subscription to a filter, or to share a group."""
    shared = parse_share(topic_filter)
    if shared is None:
        return not grant.mqtt_subscribe.filter(topic_filter)
    return not grant.mqtt_subscribe.filter(shared.topic_filter) or grant.group("read", shared.group) is False


class Shares:
    """A session's memberships in consumer groups, which deliver through `Deliveries.send_shared`."""

    __slots__ = ("_deliveries", "_joined", "_parts", "subscriptions")

    def __init__(self, deliveries: Deliveries, parts: ShareParts) -> None:
        self.subscriptions: dict[str, SessionSubscription] = {}  # by filter; joined or not
        self._joined: dict[str, ShareMember] = {}
        self._deliveries = deliveries
        self._parts = parts

    async def join(self, subscription: SessionSubscription) -> None:
        """Join the group of a shared subscription; raise Refused if that is not possible."""
        share = await self._enter(subscription)
        if share is not None:
            self._joined[subscription.options.topic_filter] = share
            self.subscriptions[subscription.options.topic_filter] = subscription

    async def _enter(self, subscription: SessionSubscription) -> ShareMember | None:
        """Join the group; return None if the connection has ended meanwhile."""
        shared = parse_share(subscription.options.topic_filter)
        assert shared is not None
        client = self._deliveries.client
        subscriber: SharedSubscriber = self._deliveries
        if client is None or client.grant is None:
            return None
        if not client.grant.mqtt_subscribe.filter(shared.topic_filter):
            raise Refused(Outcome.DENIED, "not allowed to subscribe to this filter")
        queue = self._parts.sharing.reads_only(shared.topic_filter, shared.group)
        await self._parts.names.admit(client.grant, shared.group, shared.group if queue else None)
        share = await self._parts.sharing.join(subscriber, shared, subscription, client.share)
        refused = is_refused(client.grant, subscription.options.topic_filter)  # the rights may have changed meanwhile
        if client is self._deliveries.client and not refused:
            return share
        await share.leave()
        if refused:
            raise Refused(Outcome.DENIED, "no longer allowed to subscribe to this filter")
        return None

    def resume(self) -> None:
        """Join all groups again after the session got a connection."""
        for subscription in self.subscriptions.values():
            self._parts.spawn(self._rejoin(subscription))

    async def _rejoin(self, subscription: SessionSubscription) -> None:
        """Join one group again; a refusal is logged, since no SUBACK can report it."""
        topic_filter, client = subscription.options.topic_filter, self._deliveries.client
        while self.subscriptions.get(topic_filter) is subscription and client is self._deliveries.client:
            try:
                share = await self._enter(subscription)
            except Refused as refused:
                if refused.outcome not in {Outcome.BUSY, Outcome.FULL}:
                    log.warning("a shared subscription is not resumed", filter=topic_filter, reason=refused.reason)
                    return
                await asyncio.sleep(RETRY_S)
                continue
            except Exception as error:
                failures.report("group", error, topic_filter)
                await asyncio.sleep(RETRY_S)
                continue
            if share is not None and topic_filter in self.subscriptions:
                self._joined[topic_filter] = share
            elif share is not None:
                await share.leave()  # unsubscribed meanwhile
            return

    async def leave_group(self, topic_filter: str) -> bool:
        """Leave the group of a shared subscription; return whether there was one."""
        left = self.subscriptions.pop(topic_filter, None) is not None
        share = self._joined.pop(topic_filter, None)
        if share is not None:
            self._deliveries.give_up(share)
            await share.leave()
        return left

    def leave_all(self) -> None:
        """Leave all groups after the connection has ended; the subscriptions stay."""
        joined, self._joined = self._joined, {}
        for share in joined.values():
            self._deliveries.give_up(share)
            self._parts.spawn(share.leave())

    def wake(self) -> None:
        """Have the groups deliver again: there is capacity."""
        for share in self._joined.values():
            share.wake()
