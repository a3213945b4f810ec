"""The anonymous relay: a link without a target address, whose messages say themselves where they go (`to`).

What is wrong with one message's address is told by its outcome, as an attach to that address would have been refused;
the link lives on. A topic that has not been heard of is looked up; its messages wait for that and keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gateway.amqp.links.incoming import Allowed, IncomingLink, Ingress, OpenTransaction
from gateway.amqp.links.peer import Peer
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.contracts import Refused
from mapping.amqp.addresses import AddressError, TargetAddress
from mapping.amqp.incoming import Unmappable, recipient
from mapping.amqp.mapper import Mapper
from mapping.outcomes import Outcome
from protocols.amqp.links import Link
from protocols.amqp.outcomes import NOT_FOUND, PRECONDITION_FAILED, UNAUTHORIZED_ACCESS

KNOWN_ADDRESSES: Final = 256  # of one link; a peer that uses more pays for the look-up
_OUTCOMES: Final = {NOT_FOUND: Outcome.UNKNOWN_TOPIC, UNAUTHORIZED_ACCESS: Outcome.DENIED}


class _Message(NamedTuple):
    to: str
    address: TargetAddress
    delivery: Any
    data: bytes
    transaction: OpenTransaction | None


class _Fault(NamedTuple):
    outcome: Outcome
    reason: str
    condition: str | None = None


class RelayLink(IncomingLink):
    """One link of a peer that sends to anywhere.

    `mapper` is that of the last message: while its topic's budget is shut, the link gets no credit.
    """

    __slots__ = ("_known", "_waiting")

    def __init__(self, ingress: Ingress, peer: Peer, link: Link, *, allowed: Allowed) -> None:
        """Take an accepted link; `allowed` is asked for each message."""
        super().__init__(ingress, peer, link, None, allowed=allowed)
        self._known: dict[str, tuple[TopicInfo, Mapper]] = {}
        self._waiting: dict[str, list[_Message]] = {}  # by topic

    def receive(self, deliveries: Sequence[Any], messages: Sequence[bytes], size: int, now_ms: int) -> None:
        """Take messages; each says itself where it goes."""
        for delivery, data in zip(deliveries, messages, strict=True):
            self._route(delivery, data, now_ms, None)

    def _post(self, transaction: OpenTransaction, delivery: Any, data: bytes, now_ms: int) -> None:
        self._route(delivery, data, now_ms, transaction)

    def _route(self, delivery: Any, data: bytes, now_ms: int, transaction: OpenTransaction | None) -> None:
        """Find out where a message goes. With a transaction it is counted as arrived already."""
        try:
            to = recipient(data)
            if not to:
                raise AddressError(PRECONDITION_FAILED, "a message to an anonymous target needs the property `to`")
            address = self._peer.target(to)
        except AddressError as error:
            condition, description = error.error.condition, error.error.description
            fault = _Fault(_OUTCOMES.get(condition, Outcome.UNFIT), description, condition)
            self._fail(transaction, delivery, data, fault)
            return
        except Unmappable as unmappable:
            self._fail(transaction, delivery, data, _Fault(unmappable.outcome, unmappable.reason))
            return
        message = _Message(to, address, delivery, data, transaction)
        waiting = self._waiting.get(address.topic)
        info = self._ingress.publisher.known_topic(address.topic)
        if waiting is None and info is not None:
            self._store(message, info, now_ms)
            return
        if transaction is None:
            self.window.arrive(len(data))
        else:
            transaction.hold()
        if waiting is None:
            waiting = self._waiting[address.topic] = []
            self._peer.pump.spawn(self._look_up(address.topic))  # it outlives the connection: what came is stored
        waiting.append(message)

    def _store(self, message: _Message, info: TopicInfo, now_ms: int) -> None:
        to, address, delivery, data, transaction = message
        known, mapper = self._known.get(to, (None, None))
        if mapper is None or known is not info:
            mapper = Mapper(self._peer.destination(to, address, info))
            if len(self._known) >= KNOWN_ADDRESSES:
                self._known.clear()
            self._known[to] = (info, mapper)
        self.mapper = mapper
        if address.partition is not None and address.partition >= info.partitions:
            fault = _Fault(Outcome.UNKNOWN_TOPIC, f"{address.topic} has {info.partitions} partitions")
            self._fail(transaction, delivery, data, fault)
        elif transaction is not None:
            super()._post(transaction, delivery, data, now_ms)
        else:
            super().receive((delivery,), (data,), len(data), now_ms)

    def _fail(self, transaction: OpenTransaction | None, delivery: Any, data: bytes, fault: _Fault) -> None:
        if transaction is not None:
            transaction.refuse(self, delivery, *fault)
        else:
            self.window.arrive(len(data))
            self.refuse(delivery, *fault)

    async def _look_up(self, topic: str) -> None:
        """Learn of a topic, and go on with what waits for it."""
        peer = self._peer
        refused: Refused | None = None
        try:
            info = await self._ingress.publisher.topic(topic, principal=peer.principal)
        except Refused as error:
            refused = error
        now_ms = peer.now_ms()
        for message in self._waiting.pop(topic):
            if message.transaction is None:
                self.window.settle()  # it arrives once more
            if refused is not None:
                fault = _Fault(refused.outcome, refused.reason)
                self._fail(message.transaction, message.delivery, message.data, fault)
            else:
                self._store(message, info, now_ms)
            if message.transaction is not None:
                message.transaction.unhold()
        self.top_up()
        peer.flush_soon()
