"""A link on which the peer sends: messages become records, Kafka's answers become dispositions and new credit.

Credit is the flow control: it is granted again when Kafka has stored the records, and not while the gate of the
process's or the topic's budget is shut. Messages within the granted credit are accepted, and dispositions sent, always.
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
    """A transaction that messages are posted to; a protocol, because `gateway.amqp.transactions` imports the links."""

    def admit(self, incoming: IncomingLink, delivery: Any, size: int) -> bool:
        """Count a message's arrival on its link; refuse it and return False if the transaction must be rolled back."""

    def post(self, incoming: IncomingLink, delivery: Any, record: Record) -> None:
        """Store a record; the delivery is settled when every in-sync replica has it."""

    def refuse(
        self, incoming: IncomingLink, delivery: Any, outcome: Outcome, reason: str, condition: str | None = None
    ) -> None:
        """Settle a message that cannot be stored; the transaction can no longer be committed."""

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


class IncomingLink:
    """One link on which a peer sends."""

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
        """Prepare a link that is accepted next.

        `destination` is None if each message has its own (`gateway.amqp.links.relay`). `allowed` checks each record's
        topic and key; None allows every key.
        """
        self._ingress = ingress
        self._peer = peer
        self._largest = ingress.largest_body
        self._submit = ingress.publisher.submit
        self._allowed = allowed
        self.link = link  # the engine's
        self.mapper = None if destination is None else Mapper(destination)
        self.sender = peer.sender(link)  # keeps the order of its messages in Kafka
        self.share = LinkShare(peer.budget, ingress.link_bytes)  # how many bytes may be unsettled, by the free budget
        least, limit = ingress.windows
        self.window = CreditWindow(limit, least)  # counts unsettled messages and adapts their limit
        self.touched = False  # has received or settled messages since the last `top_up`

    def set_allowed(self, allowed: Allowed | None) -> None:
        """Check each record from now on with `allowed`; see `__init__`."""
        self._allowed = allowed

    @property
    def destination(self) -> Destination | None:
        """The destination of its messages; of a relay, that of the last one."""
        return None if self.mapper is None else self.mapper.destination

    def receive(self, deliveries: Sequence[Any], messages: Sequence[bytes], size: int, now_ms: int) -> None:
        """Submit received messages, of `size` bytes together, to the publisher, or refuse them."""
        assert self.mapper is not None
        self.window.arrive(size, len(messages))
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
        """Return why a body is too large, or "" if it is not."""
        size = len(record.value or b"")
        return f"a body of {size} bytes, the limit is {self._largest}" if size > self._largest else ""

    def post(self, transaction: OpenTransaction, delivery: Any, data: bytes, now_ms: int) -> None:
        """Post one received message in a transaction."""
        if transaction.admit(self, delivery, len(data)):
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

    def post_to_unknown(self, delivery: Any, size: int) -> None:
        """Refuse a message that is posted in an unknown transaction."""
        self.window.arrive(size)
        self.refuse(delivery, Outcome.BUSY, "no transaction has this txn-id", UNKNOWN_ID)

    def oversized(self, delivery: Any, size: int, transaction: OpenTransaction | None = None) -> None:
        """Refuse a message above max-message-size; the link stays attached, but its transaction cannot be committed."""
        reason = f"{size} bytes, the limit is {self.link.limit}"
        self.window.arrive(size)
        if transaction is not None:
            transaction.refuse(self, delivery, Outcome.TOO_LARGE, reason)
        else:
            self.refuse(delivery, Outcome.TOO_LARGE, reason)

    def refuse(self, delivery: Any, outcome: Outcome, reason: str, condition: str | None = None) -> None:
        """Settle a message that is not stored; `condition` replaces the outcome's more general error condition."""
        self.window.settle()
        self._ingress.counts.incoming[outcome] += 1
        self.audit(outcome, reason)
        if delivery is not None:
            state = rejected(condition, reason) if condition else delivery_state(self.link, outcome, reason)
            self._peer.engine.settle_delivery(self.link, delivery, state)

    def audit(self, outcome: Outcome, reason: str) -> None:
        """Write an audit line if a message was refused for a missing right."""
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
        """Grant credit again after the gate has opened."""
        self.top_up()
        self._peer.flush_soon()

    def leave(self) -> None:
        """Release the link's shares; the link has ended."""
        self.share.end()
        self.sender.leave()
        if self._peer.crediting is not None:
            self._peer.crediting.forget(self.gate_opened, self.link.credit)

    def flow(self) -> Window:
        """Return the link's credit and its number of unsettled messages."""
        topic = self.destination.topic if self.destination is not None else None
        credit, unsettled = self.link.credit, self.window.unsettled
        paused = self._ingress.gates.paused(topic)
        return Window(
            shown(self.link.name), True, topic or "", credit + unsettled, credit, unsettled, paused, self.window.most
        )
