"""Log that Kafka does not answer: once a minute for the whole process, however many clients notice it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from gateway.runtime.failures import Repeats

log = structlog.get_logger(__name__)

LOG_INTERVAL_S: Final = 60.0
LASTS_S: Final = 120.0
"""How long Kafka counts as away after the last failed attempt, unless it answers. A frozen Kafka lets each attempt run
into two timeouts, of the connection and of the answer, 30 s each."""


class Outage:
    """Whether Kafka is away, judging by failed attempts to reach it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._noticed = float("-inf")
        self._logged = Repeats(LOG_INTERVAL_S, clock=clock)
        self._since = 0.0
        self._is_logged = False  # of this outage
        self._parts: set[str] = set()

    def notice(self, part: str, reason: str) -> None:
        """Note that `part` failed to reach Kafka and will retry. Logs at most once a minute."""
        now = self._clock()
        if not self.lasts:
            self._since = now
            self._is_logged = False
        self._noticed = now
        self._parts.add(part)
        if self._logged.suppressed() is not None:
            self._is_logged = True
            parts = ", ".join(sorted(self._parts))
            log.warning("Kafka does not answer", for_s=round(now - self._since), parts=parts, reason=reason)
            self._parts.clear()

    def end(self) -> None:
        """Note that Kafka answers; called by a part that asks it regularly."""
        if self._is_logged:
            log.info("Kafka answers again", after_s=round(self._clock() - self._since))
        self._noticed, self._is_logged = float("-inf"), False

    @property
    def lasts(self) -> bool:
        """Whether Kafka is away now. Then the libraries' log lines about it are suppressed."""
        return self._clock() - self._noticed <= LASTS_S


outage: Final = Outage()
"""The one of this process."""
