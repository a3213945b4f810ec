"""A link on which the peer sends: messages become records, Kafka's answers become outcomes and new credit.

Credit is what slows a sender down: it comes back when Kafka has the record, and none is granted while the gate of the
process's or the topic's budget is shut. What was granted is honoured, and dispositions flow all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from flowcontrol.window import LinkShare
from flowcontrol.window import Window as CreditWindow
from gateway.amqp.answers import delivery_state
from gateway.amqp.counters import Counts
from gateway.amqp.links.credit import CreditGates
from gateway.amqp.links.peer import Peer
from gateway.flow import Window, shown
from gateway.kafka.publish.publisher import Publisher
from mapping.amqp.incoming import Destination, Unmappable
from mapping.amqp.mapper import Mapper
from mapping.outcomes import Outcome
from mapping.record import Record
from protocols.amqp.links import Link
from protocols.amqp.outcomes import rejected
from protocols.amqp.transactions import UNKNOWN_ID

Allowed = Callable[[str, bytes | None], bool]


class OpenTransaction(Protocol):
    """A transaction that messages are posted to: `gateway.amqp.transactions` imports the links, not they it."""

    def admits(self, incoming: IncomingLink, delivery: Any, size: int) -> bool:
        """Count a message's arrival on its link, and refuse it when there is no use in storing it."""

    def post(self, incoming: IncomingLink, delivery: Any, record: Record) -> None:
        """Store a record; the delivery is settled when every in-sync replica has it."""

    def refuse(
        self, incoming: IncomingLink, delivery: Any, outcome: Outcome, reason: str, condition: str | None = None
    ) -> None:
        """Settle a message that cannot be stored; the transaction cannot be committed any more."""

    def hold(self) -> None:
        """Somebody has yet to find out where a message goes: the discharge waits for `unhold`."""

    def unhold(self) -> None:
        """It was posted or refused."""


class Ingress(msgspec.Struct, frozen=True):
    """What all incoming links of the process share."""

    publisher: Publisher  # the way into Kafka
    gates: CreditGates  # what their credit depends on
    counts: Counts  # what became of the messages
    windows: tuple[int, int]  # the smallest and the largest window of a link, in messages
    link_bytes: int  # how much may wait for Kafka because of one link
    largest_body: int  # in bytes; a message with a larger one is refused


class IncomingLink:
    """One link of a sending peer."""

    __slots__ = (
        "_allowed", "_ingress", "_largest", "_peer", "_submit", "link", "mapper", "sender", "share", "touched",
        "window",
    )  # fmt: skip

    def __init__(
        self,
        ingress: Ingress,
        peer: Peer,
        link: Link,
        destination: Destination | None,
        *,
        allowed: Allowed | None,
    ) -> None:
        """Take an accepted link.

        The destination is None while it is not known (`gateway.amqp.links.relay`); `allowed` is asked for each record's
        key, None when every key is allowed.
        """
        self._ingress = ingress
        self._peer = peer
        self._largest = ingress.largest_body
        self._submit = ingress.publisher.submit
        self._allowed = allowed
        self.link = link  # the engine's
        self.mapper = None if destination is None else Mapper(destination)  # of its messages
        self.sender = peer.sender(link)  # keeps its messages in order
        self.share = LinkShare(peer.budget, ingress.link_bytes)  # how much may be unanswered, by what is free
        least, limit = ingress.windows
        self.window = CreditWindow(limit, least)  # counts what is unanswered, and finds how much may be
        self.touched = False  # has arrivals or settlements since its credit was looked at

    def judge_by(self, allowed: Allowed | None) -> None:
        """Ask this for each record's key from now on, as of `__init__`."""
        self._allowed = allowed

    @property
    def destination(self) -> Destination | None:
        """Where its messages go."""
        return None if self.mapper is None else self.mapper.destination

    def receive(self, deliveries: Sequence[Any], messages: Sequence[bytes], size: int, now_ms: int) -> None:
        """Take messages, of `size` bytes together."""
        assert self.mapper is not None
        self.window.arrive_run(len(messages), size)
        map_message, largest, allowed = self.mapper.record, self._largest, self._allowed
        submit, peer, sender = self._submit, self._peer, self.sender
        for delivery, data in zip(deliveries, messages, strict=True):
            try:
                record = map_message(data, now_ms)
            except Unmappable as unmappable:
                self.refuse(delivery, unmappable.outcome, unmappable.reason)
                continue
            if len(data) > largest and (excess := self._excess(record)):
                self.refuse(delivery, Outcome.TOO_LARGE, excess)
            elif allowed is not None and not allowed(record.topic, record.key):
                self.refuse(delivery, Outcome.DENIED, f"no right to publish to {record.topic} with this key")
            else:
                submit(record, peer, (self, delivery), sender)

    def _excess(self, record: Record) -> str:
        """What is wrong with a body's size; empty: nothing."""
        size = len(record.value or b"")
        return f"a body of {size} bytes, the limit is {self._largest}" if size > self._largest else ""

    def post(self, transaction: OpenTransaction, delivery: Any, data: bytes, now_ms: int) -> None:
        """Take one message within a transaction."""
        if transaction.admits(self, delivery, len(data)):
            self._post(transaction, delivery, data, now_ms)

    def _post(self, transaction: OpenTransaction, delivery: Any, data: bytes, now_ms: int) -> None:
        assert self.mapper is not None
        try:
            record = self.mapper.record(data, now_ms)
        except Unmappable as unmappable:
            transaction.refuse(self, delivery, unmappable.outcome, unmappable.reason)
            return
        if len(data) > self._largest and (excess := self._excess(record)):
            transaction.refuse(self, delivery, Outcome.TOO_LARGE, excess)
            return
        if self._allowed is not None and not self._allowed(record.topic, record.key):
            reason = f"no right to publish to {record.topic} with this key"
            transaction.refuse(self, delivery, Outcome.DENIED, reason)
            return
        transaction.post(self, delivery, record)

    def stray(self, delivery: Any, size: int) -> None:
        """Refuse a message for a transaction that does not exist."""
        self.window.arrive(size)
        self.refuse(delivery, Outcome.BUSY, "no transaction has this txn-id", UNKNOWN_ID)

    def oversized(self, delivery: Any, size: int, transaction: OpenTransaction | None = None) -> None:
        """Refuse a message above max-message-size; the link lives on, but not the transaction that it was for."""
        reason = f"{size} bytes, the limit is {self.link.limit}"
        self.window.arrive(size)
        if transaction is not None:
            transaction.refuse(self, delivery, Outcome.TOO_LARGE, reason)
        else:
            self.refuse(delivery, Outcome.TOO_LARGE, reason)

    def refuse(self, delivery: Any, outcome: Outcome, reason: str, condition: str | None = None) -> None:
        """Settle a message that does not reach Kafka; rejected with `condition` where the outcome's is too general."""
        self.window.settle()
        self._ingress.counts.incoming[outcome] += 1
        self.audit(outcome, reason)
        if delivery is not None:
            state = rejected(condition, reason) if condition else delivery_state(self.link, outcome, reason)
            self._peer.engine.settle_delivery(self.link, delivery, state)

    def audit(self, outcome: Outcome, reason: str) -> None:
        """A message was refused: that is told when its sender may not send it."""
        if outcome is Outcome.DENIED:
            topic = "" if self.destination is None else self.destination.topic
            self._peer.audit_denied("publish", topic, reason)

    def top_up(self) -> None:
        """Grant credit if there is capacity and it is worth a frame."""
        self.touched = False
        link = self.link
        if not link.attached:
            return
        gates = self._ingress.gates
        destination = self.destination
        topic = destination.topic if destination is not None else None
        shut = gates.shut_gate(topic)
        if shut is not None:
            gates.wait_for(shut, self)
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
        """The gate that had shut is open again."""
        self.top_up()
        self._peer.flush_soon()

    def leave(self) -> None:
        """The link is gone."""
        self.share.end()
        self.sender.leave()
        if self._peer.crediting is not None:
            self._peer.crediting.forget(self.gate_opened, self.link.credit)

    def flow(self) -> Window:
        """Its credit, and what is unanswered."""
        topic = self.destination.topic if self.destination is not None else None
        credit, unsettled = self.link.credit, self.window.unsettled
        paused = self._ingress.gates.paused(topic)
        return Window(
            shown(self.link.name), True, topic or "", credit + unsettled, credit, unsettled, paused, self.window.most
        )
