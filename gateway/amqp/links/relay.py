"""The anonymous relay: a link without a target address, whose messages each have an address in the property `to`.

A message with an invalid address is rejected with the error that an attach to this address would get; the link stays
attached. If a topic is not known yet, its messages wait for the look-up and keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gateway.amqp.links.incoming import Allowed, IncomingLink, Ingress, OpenTransaction
from gateway.amqp.links.peer import Peer
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.contracts import Refused
from mapping.amqp.addresses import AddressError, TargetAddress
from mapping.amqp.incoming import AmqpDestination, Unmappable, recipient
from mapping.outcomes import Outcome
from protocols.amqp.links import Link
from protocols.amqp.outcomes import NOT_FOUND, PRECONDITION_FAILED, UNAUTHORIZED_ACCESS

KNOWN_ADDRESSES: Final = 256  # cached destinations of one link; more addresses make it build them again
KNOWN_CHARACTERS: Final = 256  # the destination for a longer address, which may have a key of any length, is not cached
_OUTCOMES: Final = {NOT_FOUND: Outcome.UNKNOWN_TOPIC, UNAUTHORIZED_ACCESS: Outcome.DENIED}


class _RelayedMessage(NamedTuple):
    to: str
    address: TargetAddress
    delivery: Any
    data: bytes
    transaction: OpenTransaction | None


class RelayLink(IncomingLink):
    """One anonymous relay link.

    `destination` is that of the last message: while the gate of its topic's budget is shut, the link gets no credit.
    """

    __slots__ = ("_known", "_waiting")

    def __init__(self, ingress: Ingress, peer: Peer, link: Link, *, allowed: Allowed) -> None:
        """Prepare a link that is accepted next; `allowed` checks each message's topic and key."""
        super().__init__(ingress, peer, link, None, allowed=allowed)
        self._known: dict[str, tuple[TopicInfo, AmqpDestination]] = {}
        self._waiting: dict[str, list[_RelayedMessage]] = {}  # by topic

    def _common_destination(self, size: int) -> None:
        """Return None: each message has a destination of its own."""

    def _take(
        self, deliveries: Sequence[Any], messages: Sequence[bytes], now_ms: int, transaction: OpenTransaction | None
    ) -> None:
        """Submit messages, each to its own address; see `IncomingLink._take`."""
        for delivery, data in zip(deliveries, messages, strict=True):
            self._route(delivery, data, now_ms, transaction)

    def _route(self, delivery: Any, data: bytes, now_ms: int, transaction: OpenTransaction | None) -> None:
        """Store a message, or queue it until its topic is known."""
        try:
            to = recipient(data)
            if not to:
                raise AddressError(PRECONDITION_FAILED, "a message to an anonymous target needs the property `to`")
            address = self._peer.target(to)
        except AddressError as error:
            condition, description = error.error.condition, error.error.description
            outcome = _OUTCOMES.get(condition, Outcome.UNFIT)
            self.refuse(delivery, outcome, description, condition, transaction=transaction)
            return
        except Unmappable as unmappable:
            self.refuse(delivery, unmappable.outcome, unmappable.reason, transaction=transaction)
            return
        message = _RelayedMessage(to, address, delivery, data, transaction)
        waiting = self._waiting.get(address.topic)
        info = self._ingress.publisher.known_topic(address.topic)
        if waiting is None and info is not None:
            self._store(message, info, now_ms)
            return
        if not self._peer.grant.publish.some(address.topic):  # the look-up could create the topic
            reason = f"no right to publish to {address.topic}"
            self.refuse(delivery, Outcome.DENIED, reason, transaction=transaction)
            return
        if transaction is not None:
            transaction.hold()
        if waiting is None:
            waiting = self._waiting[address.topic] = []
            self._peer.pump.spawn(self._look_up(address.topic))  # outlives the connection, so that messages are stored
        waiting.append(message)

    def _store(self, message: _RelayedMessage, info: TopicInfo, now_ms: int) -> None:
        to, address, delivery, data, transaction = message
        known, destination = self._known.get(to, (None, None))
        if destination is None or known is not info:
            destination = self._peer.destination(to, address, info)
            if len(to) <= KNOWN_CHARACTERS:
                if len(self._known) >= KNOWN_ADDRESSES:
                    self._known.clear()
                self._known[to] = (info, destination)
        self.destination = destination
        super()._take((delivery,), (data,), now_ms, transaction)

    async def _look_up(self, topic: str) -> None:
        """Look up a topic, then store or refuse the messages that wait for it."""
        peer = self._peer
        refusal: tuple[Outcome, str] | None = None
        try:
            info = await self._ingress.publisher.topic(topic, principal=peer.principal)
        except Refused as refused:
            refusal = refused.outcome, refused.reason
        now_ms = peer.now_ms()
        for message in self._waiting.pop(topic):
            if refusal is not None:
                self.refuse(message.delivery, *refusal, transaction=message.transaction)
            else:
                self._store(message, info, now_ms)
            if message.transaction is not None:
                message.transaction.unhold()
        self.top_up()
        peer.flush_soon()
