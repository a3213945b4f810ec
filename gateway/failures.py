"""Failures that nobody foresaw: contained where they belong, told with a traceback, counted by place.

A *place* is the smallest part that has to do without what failed: `delivery`, `session`, `connection`, `partition`,
`topic`, `group`, `listener`, or a part of the process that is tried again (`live reader`, `state`, ...). Whoever
contains a failure calls `failures.tell`; what no one contains arrives at the door of tasks (`gateway.spawn`) or at the
loop's exception handler, and is counted there under the name of its coroutine or as `callback`.

There is one `failures` for the process, as there is one log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, Any, Final

import msgspec

from gateway.statistics import counter, gauge

log = logging.getLogger(__name__)

TRACEBACK_S: Final = 60.0
"""The same failure at the same line is told once in it, with the number of those that were not."""
KINDS_KEPT: Final = 256


class ForeseenError(Exception):
    """How a callback says no to a library that knows no other way: the loop's exception handler says nothing of it."""


class FailureStatistics(msgspec.Struct, frozen=True):
    """Counts for the metrics."""

    contained_total: Annotated[dict[str, int], counter("failures that nobody foresaw, by the part they ended", "place")]
    retrying: Annotated[dict[str, int], gauge("parts that wait for their next attempt", "place")]


class Failures:
    """Tells and counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds; for the limit of the log."""
        self._clock = clock
        self._contained: Counter[str] = Counter()
        self._retrying: Counter[str] = Counter()
        self._told: dict[tuple[str, type[BaseException], str, int], tuple[float, int]] = {}

    def tell(self, place: str, error: BaseException, what: str = "") -> None:
        """Count a failure that was contained at `place`, and log it, unless the same was logged just now.

        `place`: see the module; few different ones, since each is a label of a metric. `what`: which of them, by a
        partition's name or a peer's address.
        """
        self._contained[place] += 1
        file, line = _origin(error.__traceback__)
        kind = (place, type(error), file, line)
        now = self._clock()
        told, held = self._told.get(kind, (float("-inf"), 0))
        if now - told < TRACEBACK_S:
            self._told[kind] = (told, held + 1)
            return
        if len(self._told) >= KINDS_KEPT:
            self._told.clear()
        self._told[kind] = (now, 0)
        more = f" ({held} more like this)" if held else ""
        subject = f"{place} {what}" if what else place
        log.error("an unexpected failure was contained: %s%s", subject, more, exc_info=error)

    def guard(self, place: str, callback: Callable[..., None], *facts: Any) -> None:
        """Tell one of several listeners; when it fails, the others still learn of it."""
        try:
            callback(*facts)
        except Exception as error:  # our bug, in one listener
            self.tell(place, error)

    def begin_retry(self, place: str) -> None:
        """A part of `place` waits for its next attempt."""
        self._retrying[place] += 1

    def end_retry(self, place: str) -> None:
        """The wait is over."""
        self._retrying[place] -= 1
        if self._retrying[place] <= 0:
            del self._retrying[place]

    @property
    def retrying(self) -> tuple[str, ...]:
        """The places that wait for their next attempt now."""
        return tuple(sorted(self._retrying))

    def statistics(self) -> FailureStatistics:
        """See `FailureStatistics`."""
        return FailureStatistics(dict(self._contained), dict(self._retrying))


def _origin(trace: TracebackType | None) -> tuple[str, int]:
    """Where an error was raised: the innermost frame of its traceback."""
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


failures: Final = Failures()
"""The process's."""
