"""The shared subscriptions of one session: its places in Kafka's consumer groups, and what the groups gave it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from gateway.failures import failures
from gateway.kafka.contracts import Refused
from gateway.mqtt.routing.shared_groups import Share, SharedSubscriber
from gateway.mqtt.state.records import Wish
from mapping.outcomes import Outcome
from mapping.record import Received
from protocols.mqtt.topics import parse_share

if TYPE_CHECKING:
    from gateway.mqtt.services import Services
    from gateway.mqtt.session.deliveries import Deliveries

log = structlog.get_logger(__name__)

AT_LEAST_ONCE: Final = 1
RETRY_S: Final = 1.0  # while Kafka does not answer


class Shares:
    """See the module.

    Attributes:
        wishes: as subscribed, by filter; with a place in the group or not.
    """

    __slots__ = ("_deliveries", "_given", "_names", "_places", "_sharing", "_spawn", "wishes")

    def __init__(self, deliveries: Deliveries, services: Services) -> None:
        """There are none."""
        self.wishes: dict[str, Wish] = {}
        self._places: dict[str, Share] = {}
        self._given: dict[int, tuple[Share, Received, int]] = {}  # by packet identifier
        self._deliveries = deliveries
        self._sharing = services.sharing
        self._names = services.names
        self._spawn = services.spawn

    async def join(self, wish: Wish) -> None:
        """Join the group of a shared subscription.

        Raises:
            Refused: the group cannot be joined.
        """
        share = await self._enter(wish)
        if share is not None:
            self._places[wish.options.topic_filter] = share
            self.wishes[wish.options.topic_filter] = wish

    async def _enter(self, wish: Wish) -> Share | None:
        """The place in the group; None when the connection has gone meanwhile."""
        shared = parse_share(wish.options.topic_filter)
        assert shared is not None
        client = self._deliveries.client
        subscriber: SharedSubscriber = self._deliveries
        if client is None or client.grant is None:
            return None
        await self._names.admit(client.grant, shared.group)
        share = await self._sharing.join(subscriber, shared, wish)
        if client is self._deliveries.client:
            return share
        await share.leave()
        return None

    def resume(self) -> None:
        """The session has a connection: take the places again."""
        for wish in self.wishes.values():
            self._spawn(self._rejoin(wish))

    async def _rejoin(self, wish: Wish) -> None:
        """Take one place again; what the group does not give is logged, since nobody asked."""
        topic_filter, client = wish.options.topic_filter, self._deliveries.client
        while self.wishes.get(topic_filter) is wish and client is self._deliveries.client:
            try:
                share = await self._enter(wish)
            except Refused as refused:
                if refused.outcome is not Outcome.BUSY:
                    log.warning("a shared subscription is not resumed", filter=topic_filter, reason=refused.reason)
                    return
                await asyncio.sleep(RETRY_S)
                continue
            except Exception as error:
                failures.tell("group", error, topic_filter)
                await asyncio.sleep(RETRY_S)
                continue
            if share is not None and topic_filter in self.wishes:
                self._places[topic_filter] = share
            elif share is not None:
                await share.leave()  # unsubscribed meanwhile
            return

    async def part(self, topic_filter: str) -> bool:
        """Leave the group of a shared subscription; whether there was one."""
        found = self.wishes.pop(topic_filter, None) is not None
        share = self._places.pop(topic_filter, None)
        if share is not None:
            self._give_up(share)
            await share.leave()
        return found

    def leave(self) -> None:
        """The session has no connection any more."""
        places, self._places = self._places, {}
        for share in places.values():
            self._give_up(share)
            self._spawn(share.leave())

    def wake(self) -> None:
        """There is room again."""
        for share in self._places.values():
            share.wake()

    # what the groups gave

    def __contains__(self, packet_id: int) -> bool:
        """Whether the delivery under an identifier is a group's."""
        return packet_id in self._given

    def gave(self, packet_id: int, share: Share, record: Received, qos: int) -> None:
        """A delivery is on the way."""
        self._given[packet_id] = (share, record, qos)

    def settle(self, packet_id: int) -> None:
        """The client has it, or has refused it; nothing for a delivery that is no group's."""
        given = self._given.pop(packet_id, None)
        if given is not None:
            share, record, _ = given
            share.done(record)

    def _give_up(self, share: Share) -> None:
        """What is on the way goes to another member; at QoS 2 nobody else gets it [MQTT-4.8.2-5]."""
        for packet_id, (other, record, qos) in list(self._given.items()):
            if other is share:
                del self._given[packet_id]
                if qos > AT_LEAST_ONCE:
                    share.done(record)
