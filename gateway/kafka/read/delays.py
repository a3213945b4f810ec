"""How old records are when they are delivered to clients: one histogram for each kind of reader, counted per fetch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec

from mapping.record import Received
from telemetry.statistics import Histogram, histogram

BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0, 300.0, 3600.0, 86_400.0)
LIVE: Final = "live"
GROUP: Final = "group"


class DelayStatistics(msgspec.Struct, frozen=True):
    """Delays by reader."""

    delay_s: Annotated[
        dict[str, Histogram],
        histogram(
            "age of records, by their Kafka timestamps, when they are offered to clients: `live` for subscribers of"
            " all, `group` for queues, shared and durable subscriptions; counted by the youngest of a fetch",
            "reader",
        ),
    ]


class Delays:
    """Counts the ages of delivered records."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock` returns seconds since the epoch."""
        self._wall_clock = wall_clock
        self._delay_s = {reader: Histogram(BOUNDS_S) for reader in (LIVE, GROUP)}

    def note(self, reader: str, records: Sequence[Received]) -> None:
        """Count the records that one fetch has brought from a partition. A clock ahead of ours counts as no delay."""
        if records:
            age_s = self._wall_clock() - records[-1].timestamp / 1000
            self._delay_s[reader].observe(max(age_s, 0.0), len(records))

    def statistics(self) -> DelayStatistics:
        """Return the counts."""
        return DelayStatistics(self._delay_s)


delays: Final = Delays()
"""The process's delays."""
