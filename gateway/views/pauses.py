"""Pauses: which connections are not read, get no credit or are not written to; why, since when and for how long.

A pause costs a clock reading and an entry at its start and end; a message costs nothing. A shared budget is one pause,
however many connections wait for it. Pauses of the same subject and reason in quick succession are one *episode*, so
that the last thousand episodes reach far back even if a connection is paused many times a second.

The process has one `pauses`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from telemetry.statistics import counter, gauge

PROCESS_BUDGET: Final = "process budget"
TOPIC_BUDGET: Final = "topic budget"
CONNECTION_BUDGET: Final = "connection budget"
SHARE: Final = "share of a budget"  # a connection has more in flight than is free for the topic or the process
# Limits (`gateway.limits`): the client is in debt for what it has published or received.
RATES: Final = ("rate of the connection", "rate of the principal", "rate of the tenant", "rate of the listener")
OUTGOING_RATES: Final = tuple(f"outgoing {rate}" for rate in RATES)
OUTGOING_BUDGET: Final = "outgoing budget"  # a receiver holds more than is free in the shared budget
SLOW_READER: Final = "slow reader"  # the write buffer is above its high-water mark
RECEIVE_MAXIMUM: Final = "Receive Maximum"  # the MQTT client's Receive Maximum is used up
NO_CREDIT: Final = "no credit"  # from an AMQP receiver or a WebSocket
UNSETTLED: Final = "too much unsettled"
UNANSWERED: Final = "too much unanswered"
KAFKA_SILENT: Final = "Kafka silent"  # acknowledgements are outstanding
KAFKA_UNREACHABLE: Final = "Kafka unreachable"
NO_CAPACITY: Final = (RECEIVE_MAXIMUM, NO_CREDIT, UNSETTLED)
"""Reasons why a subscriber falls behind, apart from a full write buffer, which its socket reports."""
REASONS: Final = (
    PROCESS_BUDGET, TOPIC_BUDGET, CONNECTION_BUDGET, SHARE, *RATES, *OUTGOING_RATES, OUTGOING_BUDGET, SLOW_READER,
    RECEIVE_MAXIMUM, NO_CREDIT, UNSETTLED, UNANSWERED, KAFKA_SILENT, KAFKA_UNREACHABLE,
)  # fmt: skip

PROCESS: Final = "process"  # the subject of the process budget's pauses

KEPT: Final = 1000  # episodes
SHORTEST_S: Final = 0.01  # shorter pauses are counted but make no episode
APART_S: Final = 1.0  # minimum gap between two episodes of the same kind


class PauseStatistics(msgspec.Struct, frozen=True):
    """Pauses since the start, and current ones."""

    pauses_total: Annotated[dict[str, int], counter("finished pauses", "reason")]
    paused_s_total: Annotated[dict[str, float], counter("total duration of finished pauses", "reason")]
    paused: Annotated[dict[str, int], gauge("current pauses", "reason")]


class Pause(msgspec.Struct, frozen=True):
    """A current pause (wire format)."""

    reason: str  # one of the module's reasons
    since: float | None = None  # epoch seconds; None: unknown


class Episode(msgspec.Struct):
    """Pauses of one subject for one reason, less than `APART_S` apart."""

    subject: str  # a budget, a connection, Kafka
    reason: str  # one of the module's reasons
    began: float  # start of the first pause, epoch seconds
    ended: float  # end of the last pause, epoch seconds
    paused_s: float  # total duration
    times: int  # number of pauses


class Pauses:
    """The current pauses and the last episodes."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` returns monotonic seconds, `wall_clock` epoch seconds."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._open: dict[tuple[object, str], tuple[float, str]] = {}
        self._episodes: deque[Episode] = deque()
        self._last: dict[tuple[str, str], Episode] = {}  # last episode by subject and reason
        self._count: Counter[str] = Counter()
        self._lasted: dict[str, float] = {}

    def begin(self, reason: str, what: object, subject: str) -> None:
        """Start a pause of `what`, which is shown as `subject`. No effect if it is already paused for this reason."""
        if (what, reason) not in self._open:
            self._open[what, reason] = (self._clock(), subject)

    def end(self, reason: str, what: object) -> None:
        """End the pause of `what`. No effect if it was not paused for this reason."""
        pause = self._open.pop((what, reason), None)
        if pause is None:
            return
        since, subject = pause
        lasted = self._clock() - since
        self._count[reason] += 1
        self._lasted[reason] = self._lasted.get(reason, 0.0) + lasted
        if lasted >= SHORTEST_S:
            self._remember(subject, reason, lasted)

    def end_all(self, what: object, *reasons: str) -> None:
        """End the pauses of `what`, which is closed, for these reasons."""
        for reason in reasons:
            self.end(reason, what)

    def gate_changed(self, reason: str, subject: str, is_open: bool) -> None:
        """Record that a shared gate has opened or shut (`flowcontrol.gate.Callback`)."""
        if is_open:
            self.end(reason, subject)
        else:
            self.begin(reason, subject, subject)

    def since(self, reason: str, what: object) -> Pause | None:
        """Return the current pause of `what` for this reason, or None."""
        pause = self._open.get((what, reason))
        return None if pause is None else Pause(reason, self._wall_clock() - (self._clock() - pause[0]))

    def open(self) -> dict[str, list[Pause]]:
        """Return the current pauses by subject."""
        ahead = self._wall_clock() - self._clock()
        by_subject: dict[str, list[Pause]] = {}
        for (_, reason), (since, subject) in self._open.items():
            by_subject.setdefault(subject, []).append(Pause(reason, since + ahead))
        return by_subject

    def episodes(self) -> list[Episode]:
        """Return the past episodes, the oldest first."""
        return list(self._episodes)

    def statistics(self) -> PauseStatistics:
        """Return the current counts."""
        now = Counter(reason for _, reason in self._open)
        return PauseStatistics(dict(self._count), dict(self._lasted), dict.fromkeys(REASONS, 0) | now)

    def _remember(self, subject: str, reason: str, lasted: float) -> None:
        ended = self._wall_clock()
        last = self._last.get((subject, reason))
        if last is not None and ended - lasted - last.ended < APART_S:
            last.ended = ended
            last.paused_s += lasted
            last.times += 1
            return
        if len(self._episodes) >= KEPT:
            first = self._episodes.popleft()
            if self._last.get((first.subject, first.reason)) is first:
                del self._last[first.subject, first.reason]
        episode = Episode(subject, reason, ended - lasted, ended, lasted, 1)
        self._episodes.append(episode)
        self._last[subject, reason] = episode


pauses: Final = Pauses()
"""The process's pauses."""
