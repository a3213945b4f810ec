"""A link on which the peer sends: messages become records, Kafka's answers become dispositions and new credit.

Credit is the flow control: it is granted again when Kafka has stored the records, and not while the gate of the
process's or the topic's budget is shut. Messages within the granted credit are accepted, and dispositions sent, always.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from flowcontrol.window import LinkShare, Window
from gateway.amqp.answers import delivery_state
from gateway.amqp.counters import Counts
from gateway.amqp.links.credit import CreditGates
from gateway.amqp.links.peer import Peer
from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.views.flow import FlowWindow, shown
from mapping.amqp._native import to_record, to_records
from mapping.amqp.incoming import AmqpDestination, Unmappable
from mapping.outcomes import Outcome
from mapping.record import Record
from protocols.amqp.links import Link
from protocols.amqp.outcomes import NOT_IMPLEMENTED, STATE_ACCEPTED, DeliveryState, Error, rejected
from protocols.amqp.transactions import UNKNOWN_ID

Allowed = Callable[[str, bytes | None], bool]
_LINK_OF: Final = operator.itemgetter(0)  # of a token


class OpenTransaction(Protocol):
    """A transaction that messages are posted to; a protocol, because `gateway.amqp.transactions` imports the links."""

    id: bytes
    error: Error | None  # why it must be rolled back; None while it can be committed

    def use(self) -> None:
        """Start its timer with its first message."""

    def post(self, incoming: IncomingLink, delivery: Any, record: Record) -> None:
        """Store a record; the delivery is settled when every in-sync replica has it."""

    def spoil(self, reason: str) -> None:
        """Make a later discharge a rollback."""

    def hold(self) -> None:
        """Delay the discharge until `unhold`, because the topic of a message is being looked up."""

    def unhold(self) -> None:
        """End one `hold`: the message was posted or refused."""


class Ingress(msgspec.Struct, frozen=True):
    """The services and settings that all incoming links of the process share."""

    publisher: Publisher
    gates: CreditGates
    counts: Counts
    windows: tuple[int, int]  # the smallest and the largest window of a link, in messages
    link_bytes: int  # how many bytes of one link may be in flight to Kafka
    largest_body: int  # in bytes; a message with a larger body is refused


class IncomingLink(Owner):
    """One link on which a peer sends.

    It is the `contracts.Owner` of the records of a run of messages, with deliveries as tokens. The connection owns
    records that are submitted one by one, with links and deliveries as tokens, so that links that take turns share a
    disposition.
    """

    __slots__ = (
        "_ingress",
        "_peer",
        "allowed",
        "budget",
        "destination",
        "link",
        "principal",
        "sender",
        "share",
        "window",
    )

    def __init__(
        self,
        ingress: Ingress,
        peer: Peer,
        link: Link,
        destination: AmqpDestination | None,
        *,
        allowed: Allowed | None,
    ) -> None:
        """Prepare a link that is accepted next.

        `destination` is None if each message has its own (`gateway.amqp.links.relay`). `allowed` checks each record's
        topic and key; None allows every key.
        """
        self._ingress = ingress
        self._peer = peer
        self.allowed = allowed
        self.link = link  # the engine's
        self.destination = destination  # of a relay, that of the last message, or None before the first
        self.budget, self.principal = peer.budget, peer.principal  # the connection's
        self.sender = peer.sender(link)  # keeps the order of its messages in Kafka
        self.share = LinkShare(peer.budget, ingress.link_bytes)  # how many bytes may be unsettled, by the free budget
        least, limit = ingress.windows
        self.window = Window(limit, least)  # counts unsettled messages and adapts their limit

    @property
    def topic(self) -> str | None:
        """The Kafka topic of its destination."""
        return None if self.destination is None else self.destination.topic

    def receive(self, deliveries: list[Any], messages: list[bytes], size: int, now_ms: int) -> None:
        """Submit received messages, of `size` bytes together, to the publisher, or refuse them."""
        self.window.arrive(size, len(messages))
        if len(messages) > 1 and (destination := self._common_destination(size)) is not None:
            self._take_run(deliveries, messages, destination, now_ms)
        else:
            self._take(deliveries, messages, now_ms, None)

    def _common_destination(self, size: int) -> AmqpDestination | None:
        """Return the destination of all messages, of `size` bytes together; None if each needs a check of its own."""
        to = self.destination
        if to is None or to.partition is not None or self.allowed is not None or size > self._ingress.largest_body:
            return None
        return to

    def _take_run(
        self, deliveries: list[Any], messages: list[bytes], destination: AmqpDestination, now_ms: int
    ) -> None:
        """Submit messages that need no check of their own, or refuse those that cannot be mapped."""
        submit_run, sender = self._ingress.publisher.submit_run, self.sender
        first = 0
        while first < len(messages):
            records: list[Record] = []
            refusal: tuple[Outcome, str] | None = None
            try:
                to_records(messages, first, destination, now_ms, records)
            except Unmappable as error:
                refusal = error.outcome, error.reason
            behind = first + len(records)
            if records:
                submit_run(records, self, deliveries[first:behind], sender)
            if refusal is not None:
                self.refuse(deliveries[behind], *refusal)
                behind += 1
            first = behind

    def _take(
        self, deliveries: Sequence[Any], messages: Sequence[bytes], now_ms: int, transaction: OpenTransaction | None
    ) -> None:
        """Submit messages whose arrival is counted to the publisher or to their transaction, or refuse them."""
        destination, largest, allowed = self.destination, self._ingress.largest_body, self.allowed
        assert destination is not None
        submit, peer, sender = self._ingress.publisher.submit, self._peer, self.sender
        for delivery, data in zip(deliveries, messages, strict=True):
            try:
                record = to_record(data, destination, now_ms)
            except Unmappable as unmappable:
                self.refuse(delivery, unmappable.outcome, unmappable.reason, transaction=transaction)
                continue
            if len(data) > largest and (size := len(record.value or b"")) > largest:
                reason = f"a body of {size} bytes, the limit is {largest}"
                self.refuse(delivery, Outcome.TOO_LARGE, reason, transaction=transaction)
            elif allowed is not None and not allowed(record.topic, record.key):
                reason = f"no right to publish to {record.topic} with this key"
                self.refuse(delivery, Outcome.DENIED, reason, transaction=transaction)
            elif transaction is None:
                submit(record, peer, (self, delivery), sender)
            elif (error := transaction.error) is not None:
                self.refuse(delivery, Outcome.BUSY, error.description, error.condition, transaction=transaction)
            else:
                transaction.post(self, delivery, record)

    def post(self, transaction: OpenTransaction | None, delivery: Any, data: bytes, now_ms: int) -> None:
        """Post one received message in a transaction; None is an unknown one, so that it is refused."""
        self.window.arrive(len(data))
        if transaction is None:
            self.refuse(delivery, Outcome.BUSY, "no transaction has this txn-id", UNKNOWN_ID)
        else:
            transaction.use()
            self._take((delivery,), (data,), now_ms, transaction)

    def unfit(self, delivery: Any, size: int, format_: int, transaction: OpenTransaction | None) -> None:
        """Refuse a message above max-message-size, or of a foreign format (part 2.7.5).

        The link stays attached, but its transaction cannot be committed.
        """
        self.window.arrive(size)
        if format_:
            reason = f"the message-format 0x{format_:08X} is not supported"
            self.refuse(delivery, Outcome.UNFIT, reason, NOT_IMPLEMENTED, transaction=transaction)
            return
        reason = f"{size} bytes, the limit is {self.link.limit}"
        self.refuse(delivery, Outcome.TOO_LARGE, reason, transaction=transaction)

    def refuse(
        self,
        delivery: Any,
        outcome: Outcome,
        reason: str,
        condition: str | None = None,
        *,
        transaction: OpenTransaction | None = None,
    ) -> None:
        """Settle a message that is not stored; its transaction, if it has one, can no longer be committed.

        `condition` replaces the outcome's more general error condition.
        """
        self.window.settle()
        self._ingress.counts.incoming[outcome] += 1
        if outcome is Outcome.DENIED:
            self._peer.audit_denied("publish", self.topic or "", reason)
        if transaction is not None:
            transaction.spoil(f"a message was refused: {reason}")
        if not self._peer.left:
            state = rejected(condition, reason) if condition else delivery_state(self.link, outcome, reason)
            self.answer((delivery,), state, transaction)

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Settle a run of deliveries after Kafka's answer, and grant credit for more; see `contracts.Owner`."""
        if self.settled(tokens, result, None):
            self.top_up()
            self._peer.flush_soon()

    def broken(self, error: Exception, tokens: Sequence[Any]) -> None:
        """End the connection after a bug in `settle`."""
        self._peer.broken(error, tokens)

    def settled(self, deliveries: Sequence[Any], result: Result, transaction: OpenTransaction | None) -> bool:
        """Settle and count deliveries by Kafka's answer; return whether the peer can still be told."""
        self._ingress.counts.incoming[result.outcome] += len(deliveries)
        self.window.settle(len(deliveries), crowded=result.crowded)
        if not self._peer.left:
            self.answer(deliveries, delivery_state(self.link, result.outcome, result.reason), transaction)
        return not self._peer.left

    def answer(self, deliveries: Sequence[Any], state: DeliveryState, transaction: OpenTransaction | None) -> None:
        """Settle deliveries with their outcome; None stands for one that the peer sent settled."""
        engine = self._peer.engine
        if state is STATE_ACCEPTED and transaction is None:
            engine.accept_deliveries(self.link, deliveries)
            return
        for delivery in deliveries:
            if delivery is None:
                continue
            if transaction is None:
                engine.settle_delivery(self.link, delivery, state)
            else:
                engine.settle_posted(self.link, delivery, transaction.id, state)

    def top_up(self) -> None:
        """Grant credit if there is capacity and it is worth a frame."""
        link = self.link
        if not link.attached:
            return
        gates = self._ingress.gates
        topic = self.topic
        shut = gates.shut_gate(topic)
        if shut is not None:
            gates.wait_for(shut, self.gate_opened)
            return
        if self._peer.quiescing:
            return
        window, credit = self.window, link.credit
        held = int(window.unsettled * window.mean)
        capacity = self.share.capacity(gates.budget(topic), held, links=gates.senders)
        grant = window.top_up(credit, capacity)
        if grant and self._peer.crediting is not None:
            grant = self._peer.crediting.grant(grant, window.mean, self.gate_opened, credit)
        self.share.promise(int((credit + grant) * window.mean))
        if grant:
            self._peer.engine.grant(link, grant)

    def gate_opened(self) -> None:
        """Grant credit again after the gate has opened."""
        self.top_up()
        self._peer.flush_soon()

    def leave(self) -> None:
        """Release the link's shares; the link has ended."""
        self._ingress.gates.forget(self.gate_opened)
        self.share.end()
        self._peer.sender_ended(self.sender)
        if self._peer.crediting is not None:
            self._peer.crediting.forget(self.gate_opened, self.link.credit)

    def flow(self) -> FlowWindow:
        """Return the link's credit and its number of unsettled messages."""
        topic = self.topic
        credit, unsettled = self.link.credit, self.window.unsettled
        paused = self._ingress.gates.paused(topic)
        return FlowWindow(
            shown(self.link.name), True, topic or "", credit + unsettled, credit, unsettled, paused, self.window.most
        )


def settle_each(peer: Peer, tokens: Sequence[Any], result: Result, transaction: OpenTransaction | None = None) -> None:
    """Settle messages of a peer after Kafka's answer, and grant credit for more; a token has the link and delivery."""
    touched: dict[IncomingLink, None] = {}
    for incoming, run in itertools.groupby(tokens, key=_LINK_OF):
        if incoming.settled([token[1] for token in run], result, transaction):
            touched[incoming] = None
    for incoming in touched:
        incoming.top_up()
    peer.flush_soon()
