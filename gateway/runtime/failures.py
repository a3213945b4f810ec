"""Unexpected failures: contained where they occur, logged with a traceback, and counted by place.

A *place* is the smallest part that a failure affects: `delivery`, `session`, `connection`, `partition`, `topic`,
`group`, `listener`, or a part of the process that is retried (`live reader`, `state`, ...). The code that contains a
failure calls `failures.report`. A failure that no code contains reaches `gateway.runtime.spawn` or the loop's exception
handler and is counted there under the name of its coroutine or as `callback`.

The process has one `failures`, like one log.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Annotated, Any, Final

import msgspec
import structlog

from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)

TRACEBACK_S: Final = 60.0
"""The same failure at the same line is logged once in this time, with the number of suppressed repetitions."""
KINDS_KEPT: Final = 256


class ExpectedError(Exception):
    """Raised by a callback to refuse something to a library that has no other way; the loop's handler ignores it."""


class _Seen:
    __slots__ = ("held", "interval_s", "passed", "since")

    def __init__(self, since: float, interval_s: float, passed: int) -> None:
        self.since = since
        self.interval_s = interval_s
        self.passed = passed  # in this interval
        self.held = 0


class Repeats:
    """Lets the same thing pass once per interval, and counts it meanwhile; used for log lines."""

    def __init__(
        self,
        interval_s: float,
        most: int = 1,
        clock: Callable[[], float] = time.monotonic,
        *,
        longest_s: float | None = None,
    ) -> None:
        """At most `most` things are remembered. `clock` returns monotonic seconds.

        While a thing goes on, its interval doubles up to `longest_s`, if that is given.
        """
        self._interval_s = interval_s
        self._longest_s = interval_s if longest_s is None else longest_s
        self._most = most
        self._clock = clock
        self._seen: dict[Hashable, _Seen] = {}

    def suppressed(self, thing: Hashable = None, first: int = 1) -> int | None:
        """Return how often `thing` was suppressed since it last passed; None if it is suppressed now too.

        `first` is how often it passes in the interval in which it begins.
        """
        now = self._clock()
        seen = self._seen.get(thing)
        if seen is not None and now - seen.since < seen.interval_s:
            if seen.passed < first:
                seen.passed += 1
                return 0
            seen.held += 1
            return None
        if len(self._seen) >= self._most:
            self._seen.clear()
        if seen is None or not seen.held:
            self._seen[thing] = _Seen(now, self._interval_s, 1)
            return 0
        self._seen[thing] = _Seen(now, min(2 * seen.interval_s, self._longest_s), first)
        return seen.held


class FailureStatistics(msgspec.Struct, frozen=True):
    """Counts of contained failures and current retries."""

    contained_total: Annotated[dict[str, int], counter("unexpected failures, by the part that they affected", "place")]
    retrying: Annotated[dict[str, int], gauge("parts waiting for their next attempt", "place")]


class Failures:
    """Logs and counts failures."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds, for the log's rate limit."""
        self._contained: Counter[str] = Counter()
        self._retrying: Counter[str] = Counter()
        self._repeats = Repeats(TRACEBACK_S, KINDS_KEPT, clock)

    def report(self, place: str, error: BaseException, what: str = "") -> None:
        """Count a failure that was contained at `place`, and log it unless the same one was logged recently.

        `place` is explained in the module; keep the number of places small, because each is a metric's label. `what`
        identifies the instance, such as a partition's name or a peer's address.
        """
        self._contained[place] += 1
        held = self._repeats.suppressed((place, type(error), *_origin(error.__traceback__)))
        if held is None:
            return
        facts = {"what": what} if what else {}
        if held:
            facts["more_like_this"] = str(held)
        log.error("an unexpected failure was contained", place=place, exc_info=error, **facts)

    def guard(self, place: str, callback: Callable[..., None], *facts: Any) -> None:
        """Call one of several callbacks and contain its failure, so that the others are still called."""
        try:
            callback(*facts)
        except Exception as error:  # a bug in one callback
            self.report(place, error)

    def begin_retry(self, place: str) -> None:
        """Count a part of `place` that waits for its next attempt."""
        self._retrying[place] += 1

    def end_retry(self, place: str) -> None:
        """End a wait that `begin_retry` counted."""
        self._retrying[place] -= 1
        if self._retrying[place] <= 0:
            del self._retrying[place]

    @property
    def retrying(self) -> tuple[str, ...]:
        """The places that are waiting for their next attempt."""
        return tuple(sorted(self._retrying))

    def statistics(self) -> FailureStatistics:
        """Return the current counts."""
        return FailureStatistics(dict(self._contained), dict(self._retrying))


def _origin(trace: TracebackType | None) -> tuple[str, int]:
    """Return file and line where an error was raised: the innermost frame of its traceback."""
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


failures: Final = Failures()
"""The process's failures."""
