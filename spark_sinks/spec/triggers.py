"""Triggers of a query: micro-batches, real time, or bounded micro-batches up to the present end of the topics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_sinks.spec import parts

MICRO_BATCH: Final = parts.MICRO_BATCH
REAL_TIME: Final = parts.REAL_TIME
CATCHING_UP: Final = "catching-up"
MODES: Final = (MICRO_BATCH, REAL_TIME, CATCHING_UP)


@dataclass(frozen=True, slots=True)
class Trigger:
    """How a query runs.

    Attributes:
        mode: MICRO_BATCH, REAL_TIME or CATCHING_UP. CATCHING_UP reads, in micro-batches, the records that are in the
            topics when it starts, and then ends.
        interval_ms: of micro-batches (None: each starts when the last ends) or real-time checkpoints (None: 5 minutes).
        most: the most records of a micro-batch at present. None means the job's own limit.
    """

    mode: str = MICRO_BATCH
    interval_ms: int | None = None
    most: int | None = None

    def most_of(self, allowed: int) -> int | None:
        """Return the query's `maxOffsetsPerTrigger`; None in real time, which does not support it."""
        return None if self.mode == REAL_TIME else min(allowed, self.most or allowed)

    def start(self, writer: DataStreamWriter) -> StreamingQuery:
        """Start the query of this writer."""
        if self.mode == CATCHING_UP:
            return writer.trigger(availableNow=True).start()
        if self.mode == REAL_TIME:
            # The stub of `trigger` has no overload for real time yet.
            return writer.trigger(realTime=f"{self.interval_ms or 300_000} milliseconds").start()  # type: ignore[call-overload, no-any-return]
        return writer.trigger(processingTime=f"{self.interval_ms or 0} milliseconds").start()


CATCH_UP = Trigger(CATCHING_UP)
