"""A query's progress reports, one compact JSON object per batch, and the totals of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from spark_sinks.spark.java import java_class

Offsets = dict[str, dict[str, int]]
"""Topic -> partition (decimal) -> offset, as Spark writes them."""

OBSERVED = "records"
"""The name of our own metrics in Spark's progress report."""
DEAD_LETTERS = "dead_letters"
"""The number of dead letters among them."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="progress"):
    """One batch of one query."""

    query: str  # the query's name
    trigger: str = ""  # micro-batch, real-time or catching-up (bounded micro-batches before real time)
    run: str  # Spark's id of this start of the query
    batch: int  # number of the batch, continued over restarts
    rows: int  # records read
    rows_per_second: float  # records read per second of processing
    duration_ms: int  # the batch's duration; in real time a batch lasts for the checkpoint interval
    # rows dropped as late, as Spark counts them: (sensor, window) pairs, of which a micro-batch merges those of one
    # partition before it counts
    late_rows: int
    state_rows: int  # rows of state: (sensor, window) pairs
    state_bytes: int = 0  # memory used by the state
    watermark_ms: int | None  # epoch ms; 0 before the first; None without windows
    start: Offsets | None  # first offsets of the batch; None for the first batch of a new checkpoint
    end: Offsets | None  # end offsets, exclusive: all earlier records are processed
    lag: int  # unread records in the topics when the batch was planned
    dead_letters: int | None = None  # written by the query itself; None if it does not count them


class Examined(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="examined"):
    """The result of examining finished batches of one query for rejected records."""

    query: str
    batch: int  # number of the newest examined batch
    rows: int  # records read again
    malformed: int  # dead letters for records that are not readings
    late: int  # dead letters for readings whose windows were all closed
    late_by_others: int = 0  # those among them that were in time at their arrival
    duration_ms: int


class Totals(msgspec.Struct, kw_only=True):
    """The totals of one query in this run: sums of its `Progress` and `Examined`."""

    batches: int = 0
    rows: int = 0
    late_rows: int = 0
    malformed: int = 0
    late_readings: int = 0
    late_by_others: int = 0
    end: Offsets | None = None

    def add(self, progress: Progress) -> None:
        """Add one batch."""
        self.batches += 1
        self.rows += progress.rows
        self.late_rows += progress.late_rows
        self.end = progress.end

    def add_examined(self, examined: Examined) -> None:
        """Add the result of one examination."""
        self.malformed += examined.malformed
        self.late_readings += examined.late
        self.late_by_others += examined.late_by_others


def progress_of(report: dict[str, Any]) -> Progress:
    """Convert Spark's progress report (StreamingQueryProgress as JSON)."""
    source = report["sources"][0]
    operators = report.get("stateOperators", [])
    watermark = report.get("eventTime", {}).get("watermark")
    end, latest = source.get("endOffset"), source.get("latestOffset")
    return Progress(
        query=report["name"],
        run=report["runId"],
        batch=report["batchId"],
        rows=report["numInputRows"],
        rows_per_second=round(report.get("processedRowsPerSecond", 0.0), 1),
        duration_ms=report.get("durationMs", {}).get("triggerExecution", report.get("batchDuration", 0)),
        late_rows=sum(operator["numRowsDroppedByWatermark"] for operator in operators),
        state_rows=sum(operator["numRowsTotal"] for operator in operators),
        state_bytes=sum(operator.get("memoryUsedBytes", 0) for operator in operators),
        watermark_ms=None if watermark is None else round(datetime.fromisoformat(watermark).timestamp() * 1000),
        start=source.get("startOffset"),
        end=end,
        lag=max(0, offsets_sum(latest) - offsets_sum(end)) if latest and end else 0,
        dead_letters=report.get("observedMetrics", {}).get(OBSERVED, {}).get(DEAD_LETTERS),
    )


def offsets_sum(offsets: Offsets) -> int:
    """Return the sum over all partitions."""
    return sum(offset for partitions in offsets.values() for offset in partitions.values())


class ProgressListener:
    """Passes each batch's progress and the run id of each ended query, which comes after it, to a function.

    It is called in a Spark thread, must be quick and must not call Spark: the bus carries all events. Java calls these
    methods directly instead of pyspark's `StreamingQueryListener`, which asks Java for each field of an event: a
    hundred calls and eight exceptions per batch, where one call is enough.
    """

    def __init__(self, spark: SparkSession, sink: Callable[[Progress | str], None]) -> None:
        self._sink = sink
        self._jlistener = java_class(spark, "org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper")(self)

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        """Ignore it: `onQueryProgress` names the query."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Pass on the progress of a finished batch."""
        self._sink(progress_of(json.loads(event.progress().json())))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Ignore it: no batch ran."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Pass on the end of a run. Its exception is read from the query itself."""
        self._sink(event.runId().toString())

    class Java:
        """Tells py4j which Java interface this object implements."""

        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)
