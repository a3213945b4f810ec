"""Pauses: who is not read, gets no credit or is not written to; why, since when, and for how long it was so.

A pause costs a look at the clock and an entry where it begins and where it ends; a message costs nothing. A budget that
many share is one pause, however many wait for it. Pauses of one kind that follow each other closely are one *episode*,
so that the last thousand reach back far, also while somebody is paused many times a second.

There is one `pauses` for the process, as there is one `failures`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from gateway.statistics import counter, gauge

PROCESS_BUDGET: Final = "process budget"
TOPIC_BUDGET: Final = "topic budget"
CONNECTION_BUDGET: Final = "connection budget"
SHARE: Final = "share of a budget"  # a connection has more on the way than is free in the topic's or the process's
# Limits (`gateway.limits`): it owes for what it has published, or was sent.
RATES: Final = ("rate of the connection", "rate of the principal", "rate of the tenant", "rate of the listener")
OUTGOING_RATES: Final = tuple(f"outgoing {rate}" for rate in RATES)
OUTGOING_BUDGET: Final = "outgoing budget"  # a receiver holds more than is free in the budget of all
SLOW_READER: Final = "slow reader"  # the write buffer is over its mark
RECEIVE_MAXIMUM: Final = "Receive Maximum"  # of an MQTT client: used up
NO_CREDIT: Final = "no credit"  # of an AMQP receiver, or a WebSocket's
UNSETTLED: Final = "too much unsettled"
UNANSWERED: Final = "too much unanswered"
KAFKA_SILENT: Final = "Kafka silent"  # acknowledgements wait
KAFKA_UNREACHABLE: Final = "Kafka unreachable"
NO_CAPACITY: Final = (RECEIVE_MAXIMUM, NO_CREDIT, UNSETTLED)
"""What somebody who is behind may lack, beside capacity in the write buffer, of which its socket tells."""
REASONS: Final = (
    PROCESS_BUDGET, TOPIC_BUDGET, CONNECTION_BUDGET, SHARE, *RATES, *OUTGOING_RATES, OUTGOING_BUDGET, SLOW_READER,
    RECEIVE_MAXIMUM, NO_CREDIT, UNSETTLED, UNANSWERED, KAFKA_SILENT, KAFKA_UNREACHABLE,
)  # fmt: skip

PROCESS: Final = "process"  # the subject of its budget's pauses

KEPT: Final = 1000  # episodes
SHORTEST_S: Final = 0.01  # what is over sooner is counted, and no episode
APART_S: Final = 1.0  # between two episodes of a kind


class PauseStatistics(msgspec.Struct, frozen=True):
    """Pauses since the start, and those that go on."""

    pauses_total: Annotated[dict[str, int], counter("pauses that are over", "reason")]
    paused_s_total: Annotated[dict[str, float], counter("how long they have lasted, in sum", "reason")]
    paused: Annotated[dict[str, int], gauge("pauses that go on", "reason")]


class Pause(msgspec.Struct, frozen=True):
    """A pause that goes on."""

    reason: str  # one of the module's
    since: float | None = None  # epoch seconds; None: not known


class Episode(msgspec.Struct):
    """Pauses of one subject for one reason, less than `APART_S` apart."""

    subject: str  # a budget, a connection, Kafka
    reason: str  # one of the module's
    began: float  # the first of them; epoch seconds
    ended: float  # the last of them; epoch seconds
    paused_s: float  # how long they have lasted, in sum
    times: int  # how many


class Pauses:
    """Those that go on, by what is paused, and the last episodes that are over."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`clock`: seconds; `wall_clock`: epoch seconds."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._open: dict[tuple[object, str], tuple[float, str]] = {}
        self._episodes: deque[Episode] = deque()
        self._last: dict[tuple[str, str], Episode] = {}  # of the episodes
        self._count: Counter[str] = Counter()
        self._lasted: dict[str, float] = {}

    def begin(self, reason: str, what: object, subject: str) -> None:
        """`what` is paused, which is called `subject`; without effect while it is so already."""
        if (what, reason) not in self._open:
            self._open[what, reason] = (self._clock(), subject)

    def end(self, reason: str, what: object) -> None:
        """It goes on; without effect when it was not paused."""
        found = self._open.pop((what, reason), None)
        if found is None:
            return
        since, subject = found
        lasted = self._clock() - since
        self._count[reason] += 1
        self._lasted[reason] = self._lasted.get(reason, 0.0) + lasted
        if lasted >= SHORTEST_S:
            self._remember(subject, reason, lasted)

    def end_all(self, what: object, *reasons: str) -> None:
        """It is gone."""
        for reason in reasons:
            self.end(reason, what)

    def turned(self, reason: str, subject: str, is_open: bool) -> None:
        """A gate that many share has opened or shut (`flowcontrol.gate.Callback`)."""
        if is_open:
            self.end(reason, subject)
        else:
            self.begin(reason, subject, subject)

    def since(self, reason: str, what: object) -> Pause | None:
        """The pause of `what` that goes on for this reason."""
        found = self._open.get((what, reason))
        return None if found is None else Pause(reason, self._wall_clock() - (self._clock() - found[0]))

    def open(self) -> dict[str, list[Pause]]:
        """What is paused now, by subject."""
        ahead = self._wall_clock() - self._clock()
        found: dict[str, list[Pause]] = {}
        for (_, reason), (since, subject) in self._open.items():
            found.setdefault(subject, []).append(Pause(reason, since + ahead))
        return found

    def episodes(self) -> list[Episode]:
        """What is over, the oldest first."""
        return list(self._episodes)

    def statistics(self) -> PauseStatistics:
        """See `PauseStatistics`."""
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
"""The process's."""
