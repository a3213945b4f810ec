"""Who is on the way, who waits, and for what: the answer to "why is it slow", now and at 12:03.

Nothing is counted for it per message: connections are asked when an operator asks, in slices of the event loop's turns,
and pauses are noted where they begin and end (`gateway.pauses`).
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from gateway.flow import BudgetFlow, ConnectionFlow, Flowing
from gateway.pauses import KAFKA_SILENT, KAFKA_UNREACHABLE, Episode, Pauses
from gateway.turns import Slices

LOOK_S: Final = 1.0  # between two looks at Kafka
CONNECTIONS: Final = 100  # that are told, unless somebody asks for more
MOST_CONNECTIONS: Final = 1_000
TOPICS: Final = 100  # budgets of topics that are told: those with the most in them
PAUSED: Final = 1_000  # pauses that go on that are told: the longest
BETWEEN: Final = 64  # connections between two looks at the clock
KAFKA: Final = "Kafka"


class PausedNow(msgspec.Struct, frozen=True):
    """What is paused; see `gateway.pauses.Pause`."""

    subject: str
    reason: str
    since: float | None


class Snapshot(msgspec.Struct, frozen=True):
    """The flow of a moment."""

    at: float  # epoch seconds
    connections_total: int  # how many there are, of those that were asked for
    connections: list[ConnectionFlow]  # those that are paused first, then those with the most bytes on the way
    budgets: list[BudgetFlow]  # what goes to Kafka, what goes to clients, then the topics with the most in them
    paused: list[PausedNow]  # what is paused, the longest first
    episodes: list[Episode]  # the last pauses that are over, the newest first


class Flow:
    """Asks all connections."""

    def __init__(
        self,
        connections: Sequence[Callable[[], Iterable[Flowing]]],
        budgets: Callable[[int], list[BudgetFlow]],
        pauses: Pauses,
    ) -> None:
        """Each of `connections` gives those of one protocol; `budgets` the process's and those of so many topics."""
        self._connections = connections
        self._budgets = budgets
        self._pauses = pauses

    async def snapshot(self, limit: int = CONNECTIONS, client: str = "") -> Snapshot:
        """The flow now, of at most `limit` connections: those in whose name or address `client` stands."""
        paused = self._pauses.open()
        total = 0
        chosen: list[tuple[bool, int, int, Flowing]] = []
        slices = Slices()
        for connections in self._connections:
            for number, connection in enumerate(list(connections())):
                if not number % BETWEEN:
                    await slices.rest()
                subject = connection.subject
                if client not in subject:
                    continue
                total += 1
                entry = (subject in paused, connection.load, total, connection)
                if len(chosen) < limit:
                    heapq.heappush(chosen, entry)
                else:
                    heapq.heappushpop(chosen, entry)
        told: list[ConnectionFlow] = []
        for *_, connection in sorted(chosen, reverse=True, key=lambda entry: entry[:3]):
            await slices.rest()
            found = connection.flow()
            if found is not None:
                found.paused = [*paused.get(found.subject, ()), *found.paused]
                told.append(found)
        now = [PausedNow(subject, each.reason, each.since) for subject, list_ in paused.items() for each in list_]
        return Snapshot(
            at=time.time(),
            connections_total=total,
            connections=told,
            budgets=self._budgets(TOPICS),
            paused=heapq.nsmallest(PAUSED, now, key=lambda pause: pause.since or 0.0),
            episodes=self._pauses.episodes()[::-1],
        )


class KafkaWatch:
    """Notes, a second late at most, from when until when Kafka was silent or could not be reached."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,  # for its timer
        waiting: Callable[[], bool],  # whether Kafka has been given something and has not answered
        answers: Callable[[], float],  # changes with each of its answers
        reachable: Callable[[], bool],  # whether it has answered anything lately
        pauses: Pauses,  # where it is noted
    ) -> None:
        self._loop = loop
        self._waiting = waiting
        self._answers = answers
        self._reachable = reachable
        self._pauses = pauses
        self._timer: asyncio.TimerHandle | None = None
        self._last: float | None = None  # what `answers` was when something waited already

    def start(self) -> None:
        """Look, and go on doing so."""
        answers = self._answers() if self._waiting() else None
        self._note(KAFKA_SILENT, answers is not None and answers == self._last)
        self._note(KAFKA_UNREACHABLE, not self._reachable())
        self._last = answers
        self._timer = self._loop.call_later(LOOK_S, self.start)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _note(self, reason: str, is_paused: bool) -> None:
        self._pauses.turned(reason, KAFKA, not is_paused)
