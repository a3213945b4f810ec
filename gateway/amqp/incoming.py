"""A link on which the peer sends: messages become records, Kafka's answers become outcomes and new credit.

Credit is the only brake: it comes back when Kafka has the record, and while the process or topic budget is shut none
is granted. What was granted is honoured, and dispositions flow all the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowcontrol.window import Window
from gateway.amqp.answers import delivery_state
from mapping.amqp import Destination, Unmappable, to_record
from mapping.outcomes import Outcome
from protocols.amqp.links import Link
from protocols.amqp.outcomes import rejected

if TYPE_CHECKING:
    from gateway.amqp.session import AmqpSession

Allowed = Callable[[str, bytes | None], bool]


class IncomingLink:
    """One link of a sending peer.

    Attributes:
        link: the engine's.
        window: counts what is unanswered.
        touched: has arrivals or settlements since its credit was looked at.
    """

    __slots__ = ("_allowed", "_session", "_submit", "destination", "link", "touched", "window")

    def __init__(
        self, session: AmqpSession, link: Link, destination: Destination | None, limit: int, allowed: Allowed | None
    ) -> None:
        """Take an accepted link.

        Args:
            session: the connection's.
            link: the engine's.
            destination: where its messages go; None while that is not known (`gateway.amqp.relay`).
            limit: the largest window, in messages.
            allowed: asked for each record's key; None when every key is allowed.
        """
        self._session = session
        self._submit = session.services.publisher.submit
        self._allowed = allowed
        self.link = link
        self.destination = destination
        self.window = Window(limit)
        self.touched = False

    def receive(self, delivery: Any, data: bytes, now_ms: int) -> None:
        """Take one message."""
        self.window.arrive(len(data))
        assert self.destination is not None
        try:
            record = to_record(data, self.destination, now_ms)
        except Unmappable as unmappable:
            self.refuse(delivery, unmappable.outcome, unmappable.reason)
            return
        if self._allowed is not None and not self._allowed(record.topic, record.key):
            self.refuse(delivery, Outcome.DENIED, f"no right to publish to {record.topic} with this key")
            return
        self._submit(record, self._session, (self, delivery))

    def oversized(self, delivery: Any, size: int) -> None:
        """Refuse a message above max-message-size; the link lives on."""
        self.window.arrive(size)
        self.refuse(delivery, Outcome.TOO_LARGE, f"{size} bytes, the limit is {self.link.limit}")

    def refuse(self, delivery: Any, outcome: Outcome, reason: str, condition: str | None = None) -> None:
        """Settle a message that does not reach Kafka; rejected with `condition` where the outcome's is too general."""
        self.window.settle()
        self._session.services.counts.incoming[outcome] += 1
        if delivery is not None:
            state = rejected(condition, reason) if condition else delivery_state(self.link, outcome, reason)
            self._session.engine.settle_delivery(self.link, delivery, state)

    def top_up(self) -> None:
        """Grant credit if there is room and it is worth a frame."""
        self.touched = False
        link = self.link
        if not link.attached:
            return
        services = self._session.services
        destination = self.destination
        shut = services.shut_gate(destination.topic if destination is not None else None)
        if shut is not None:
            services.wait_for(shut, self)
            return
        if self._session.quiet:
            return
        grant = self.window.top_up(link.credit, self._room())
        if grant:
            self._session.engine.grant(link, grant)

    def gate_opened(self) -> None:
        """The budget that had shut has room again."""
        self.top_up()
        self._session.flush_soon()

    def _room(self) -> int:
        """How many bytes may wait for Kafka because of this link (flow control, part 1)."""
        services = self._session.services
        budget = services.publisher.budget
        own = self._session.budget
        return max(
            0,
            min(
                services.config.link_bytes,
                (budget.bytes_limit - budget.bytes) // max(1, services.senders),
                own.bytes_limit - own.bytes,
            ),
        )
