"""What the readers of this process step over, because nothing can read it or it has too many headers."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import msgspec
import structlog

from gateway.runtime.failures import Repeats
from kafka_records.fetched_records import Unreadable
from telemetry.statistics import counter

log = structlog.get_logger(__name__)

LOG_INTERVAL_S: Final = 60.0
PARTITIONS_KEPT: Final = 1000


class UnreadableStatistics(msgspec.Struct, frozen=True):
    """The counters of what was stepped over."""

    batches_total: Annotated[int, counter("batches and records that a reader stepped over: nothing can read them")]
    offsets_total: Annotated[int, counter("offsets of these, summed over all readers")]


class UnreadableCounter:
    """Counts each step; logs a partition once a minute, however many readers step over the same place."""

    def __init__(self) -> None:
        self.most_headers = sys.maxsize  # readers step over a record with more
        self._batches = self._offsets = 0
        self._repeats = Repeats(LOG_INTERVAL_S, PARTITIONS_KEPT)

    def note(self, what: Unreadable) -> None:
        """Note that a reader steps over these offsets."""
        self._batches += 1
        self._offsets += what.behind - what.first
        held = self._repeats.suppressed(what.partition)
        if held is not None:
            more = {"more_in_this_partition": held} if held else {}
            log.error("nothing can read a batch or record; readers step over it", what=str(what), **more)

    def statistics(self) -> UnreadableStatistics:
        """Return the counts so far."""
        return UnreadableStatistics(self._batches, self._offsets)


unreadable: Final = UnreadableCounter()
"""The one of this process."""
