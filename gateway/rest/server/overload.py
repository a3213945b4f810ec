"""Refuses produce requests before their bodies are read: 503 when a budget for Kafka is used up, 429 over a rate."""

from __future__ import annotations

from typing import Final, Self

from flowcontrol.admission import Admission, Refusal, client_share
from flowcontrol.budget import ConnectionBudget
from gateway.kafka.publish.publisher import Publisher
from gateway.limits.brakes import Pace
from gateway.limits.rate_pauses import TaskPause
from gateway.net.http.http_server import HttpConnection
from gateway.rest.server.client_limits import RequestLimits
from gateway.security.identity import Identity
from gateway.views.flow import ConnectionFlow, Flowing, FlowWindow, shown, subject
from protocols.rest.errors import busy, too_many

BODIES_LIMIT: Final = 64 * 1024 * 1024
"""Bytes of all request bodies that are being received. With the publisher's budget it bounds the memory."""

SMALL: Final = 64 * 1024
"""A body up to this size is accepted until the budget's gate shuts: the budget has a reserve for it."""


class OverloadGuard:
    """The limits that all produce requests share: budgets for Kafka, concurrent requests, bytes of bodies."""

    def __init__(
        self, publisher: Publisher, limits: RequestLimits, max_concurrent: int, per_client: int | None = None
    ) -> None:
        """Refuse requests when the publisher's budgets or the client's rate are used up, or over `max_concurrent`.

        `per_client` is the share of one client; see `client_share`.
        """
        self._slots: dict[ProduceSlot, None] = {}
        self.receiving = 0
        self.refused = 0
        self._publisher = publisher
        self._limits = limits
        self._places = Admission(max_concurrent, client_share(max_concurrent, per_client))

    @property
    def active(self) -> int:
        """The number of produce requests in progress."""
        return len(self._slots)

    def flowing(self) -> list[Flowing]:
        """Return the produce requests in progress, for /flow."""
        return list(self._slots)

    def enter(self, topic: str, connection: HttpConnection, size: int, identity: Identity) -> ProduceSlot:
        """Count a request until the end of the `with` block, or until `leave`.

        `size` is the announced length of its body in bytes, 0 if it is unknown.

        Raises:
            RestError: 429 or 503 with Retry-After.
        """
        slot = ProduceSlot(self, topic, connection, size, identity.name, self._limits)
        if connection.limits is not None:
            slot.pace = self._limits.check_publishing(connection, slot.subject)
        publisher = self._publisher
        if not publisher.gate.is_open:
            raise self._refuse("Kafka is slower than its senders; try again")
        budget = publisher.budgets.of(topic)
        if not budget.gate.is_open:
            raise self._refuse(f"Topic {topic} is slower than its senders; try again")
        # A body larger than the whole budget never fits: it is refused elsewhere (413), or published alone.
        if SMALL < size <= budget.bytes_limit and not budget.fits(size):
            raise self._refuse(f"Topic {topic} is slower than its senders, and {size} bytes are too many; try again")
        unacknowledged = connection.unacknowledged
        if unacknowledged is not None and not unacknowledged.gate.is_open:
            raise self._refuse("Too many of your records wait for Kafka; try again")
        refusal = self._places.enter(slot.client)
        if refusal is Refusal.FULL:
            raise self._refuse("Too many requests wait for Kafka; try again")
        if refusal is not None:
            self.refused += 1
            raise too_many(f"{self._places.limit_per_client} of your requests wait for Kafka; try again", close=True)
        self._slots[slot] = None
        return slot

    def leave(self, slot: ProduceSlot) -> None:
        """Stop counting a request."""
        del self._slots[slot]
        self._places.leave(slot.client)

    def receive_body(self, size: int) -> None:
        """Count bytes of a body that is being received; the caller releases them with `release_body`.

        Raises:
            RestError: 503; the bytes are not counted.
        """
        if self.receiving + size > BODIES_LIMIT:
            raise self._refuse("Too much is being uploaded; try again")
        self.receiving += size

    def release_body(self, size: int) -> None:
        """Release bytes that `receive_body` counted."""
        assert size <= self.receiving
        self.receiving -= size

    def _refuse(self, message: str) -> Exception:
        self.refused += 1
        return busy(message, close=True)


class ProduceSlot:
    """One produce request in progress, until the end of its `with` block or `leave`; a `gateway.views.flow.Flowing`."""

    __slots__ = (
        "_connection", "_guard", "_limits", "_pause", "_principal", "_size", "_topic", "budget", "client", "pace",
        "records",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917 - the parts of a request
        self,
        guard: OverloadGuard,
        topic: str,
        connection: HttpConnection,
        size: int,
        principal: str,
        limits: RequestLimits,
    ) -> None:
        self._limits = limits
        self._guard = guard
        self.client = connection.share
        self._topic = topic
        self._connection = connection
        self._size = size
        self._principal = principal
        self.records = 0  # that wait for Kafka, once the body is read
        self.budget: ConnectionBudget | None = None  # of an upload, whose records and bytes change
        self.pace: Pace | None = None  # the client's limits; None: no limits
        self._pause: TaskPause | None = None  # of an upload

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Stop counting the request."""
        self._guard.leave(self)
        if self._pause is not None:
            self._pause.end()

    def count_records(self, records: int, size: int) -> None:
        """Count records that were read from the body, and their `size` in bytes.

        Raises:
            RestError: 429 if another request of the client has used its rate up meanwhile; an upload waits instead.
        """
        self.records = records
        if self.pace is not None:
            if self.budget is None:
                self._limits.check_published(self.pace, self.subject)
            self.pace.spend(records, size)

    async def wait_for_rate(self) -> None:
        """Wait until the client is within its rate again."""
        if self.pace is not None:
            if self._pause is None:
                self._pause = TaskPause(self.pace, self.subject)
            if self._pause.must_wait():
                await self._pause.over()

    @property
    def subject(self) -> str:
        """The connection's name in `gateway.views.pauses`."""
        return subject("http", self._principal, self._connection.peer)

    @property
    def load(self) -> int:
        """Bytes in flight to Kafka."""
        return self._size if self.budget is None else self.budget.bytes

    def flow(self) -> ConnectionFlow:
        """Return its flow. A request has no window: all its records are in flight."""
        budget, transport = self.budget, self._connection.transport
        records = self.records if budget is None else budget.records
        return ConnectionFlow(
            protocol="http",
            peer=self._connection.peer,
            principal=shown(self._principal),
            subject=self.subject,
            bytes=self.load,
            bytes_limit=0 if budget is None else budget.bytes_limit,
            records=records,
            unwritten=0 if transport is None else transport.get_write_buffer_size(),
            windows=[FlowWindow("produce", True, self._topic, records, 0, records)],
            windows_total=1,
        )
