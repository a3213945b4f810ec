"""Flow: in-flight messages and paused connections with their reasons, now and in the recent past.

Nothing is counted for it per message. Connections are inspected on request, in slices over several turns of the event
loop; pauses are recorded when they start and end (`gateway.views.pauses`).
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.runtime.turns import Slices, sliced
from gateway.views.flow import BudgetFlow, ConnectionFlow, Flowing
from gateway.views.pauses import KAFKA_SILENT, KAFKA_UNREACHABLE, Episode, Pauses

if TYPE_CHECKING:  # the commands, which read snapshots, do without Kafka
    from gateway.kafka.publish.publisher import Publisher

CHECK_S: Final = 1.0  # between two checks of Kafka
CONNECTIONS: Final = 100  # default number of connections in a snapshot
MOST_CONNECTIONS: Final = 1_000
TOPICS: Final = 100  # topic budgets in a snapshot: the fullest ones
PAUSED: Final = 1_000  # current pauses in a snapshot: the longest ones
KAFKA: Final = "Kafka"


class PausedNow(msgspec.Struct, frozen=True):
    """A current pause; see `gateway.views.pauses.Pause`."""

    subject: str
    reason: str
    since: float | None


class Snapshot(msgspec.Struct, frozen=True):
    """The flow at one moment (wire format of `/flow`)."""

    at: float  # epoch seconds
    connections_total: int  # how many connections match the request
    connections: list[ConnectionFlow]  # paused ones first, then those with the most bytes in flight
    budgets: list[BudgetFlow]  # to Kafka, to clients, then the fullest topics
    paused: list[PausedNow]  # current pauses, the longest first
    episodes: list[Episode]  # past pauses, the newest first


class FlowSnapshots:
    """Collects snapshots from all connections."""

    def __init__(
        self,
        connections: Sequence[Callable[[], Iterable[Flowing]]],
        budgets: Callable[[int], list[BudgetFlow]],
        pauses: Pauses,
    ) -> None:
        """Each of `connections` returns those of one protocol; `budgets` the process's and those of `n` topics."""
        self._connections = connections
        self._budgets = budgets
        self._pauses = pauses

    async def snapshot(self, limit: int = CONNECTIONS, client: str = "") -> Snapshot:
        """Return the current flow of at most `limit` connections whose name or address contains `client`."""
        paused = self._pauses.open()
        total = 0
        chosen: list[tuple[bool, int, int, Flowing]] = []
        async for connection in sliced(self._connections):
            subject = connection.subject
            if client not in subject:
                continue
            total += 1
            entry = (subject in paused, connection.load, total, connection)
            if len(chosen) < limit:
                heapq.heappush(chosen, entry)
            else:
                heapq.heappushpop(chosen, entry)
        slices = Slices()
        selected: list[ConnectionFlow] = []
        for *_, connection in sorted(chosen, reverse=True, key=lambda entry: entry[:3]):
            await slices.rest()
            flow = connection.flow()
            if flow is not None:
                flow.paused = [*paused.get(flow.subject, ()), *flow.paused]
                selected.append(flow)
        now = [PausedNow(subject, each.reason, each.since) for subject, list_ in paused.items() for each in list_]
        return Snapshot(
            at=time.time(),
            connections_total=total,
            connections=selected,
            budgets=self._budgets(TOPICS),
            paused=heapq.nsmallest(PAUSED, now, key=lambda pause: pause.since or 0.0),
            episodes=self._pauses.episodes()[::-1],
        )


class KafkaWatch:
    """Records, with at most a second's delay, when Kafka was silent or unreachable."""

    def __init__(self, loop: asyncio.AbstractEventLoop, publisher: Publisher, pauses: Pauses) -> None:
        """The timer runs in `loop`; the pauses are recorded in `pauses`."""
        self._loop = loop
        self._publisher = publisher
        self._pauses = pauses
        self._timer: asyncio.TimerHandle | None = None
        self._last: float | None = None  # `answered` at the last check, if records were unanswered then

    def start(self) -> None:
        """Check now and every `CHECK_S`."""
        answers = self._publisher.answered if self._publisher.budget.records > 0 else None
        self._note(KAFKA_SILENT, answers is not None and answers == self._last)
        self._note(KAFKA_UNREACHABLE, not self._publisher.reachable)
        self._last = answers
        self._timer = self._loop.call_later(CHECK_S, self.start)

    def stop(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()

    def _note(self, reason: str, is_paused: bool) -> None:
        self._pauses.gate_changed(reason, KAFKA, not is_paused)
