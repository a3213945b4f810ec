"""What a query reports: one compact JSON object per batch, and the totals of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from spark_sinks.java import java_class

Offsets = dict[str, dict[str, int]]
"""Topic -> partition (decimal) -> offset, as Spark writes them."""

OBSERVED = "records"
"""What a query counts of its records itself, in Spark's report..."""
DEAD_LETTERS = "dead_letters"
"""... and of that, the dead letters that it wrote."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="progress"):
    """One batch of one query."""

    query: str  # the query's name
    trigger: str = ""  # micro-batch, real-time or catching-up (bounded micro-batches before real time)
    run: str  # Spark's id of this start of the query
    batch: int  # number of the batch, continued over restarts
    rows: int  # records read
    rows_per_second: float  # records read per second of processing
    duration_ms: int  # how long the batch took. A real-time batch is as long as its checkpoint interval
    # what the state dropped as too late, as Spark counts it: (sensor, window) pairs, and a micro-batch merges the pairs
    # of one partition before it counts
    late_rows: int
    state_rows: int  # (sensor, window) pairs kept
    state_bytes: int = 0  # memory that they take
    watermark_ms: int | None  # event time that closed windows, epoch ms; 0 before the first; None without windows
    start: Offsets | None  # offsets where the batch began (None for the very first of a new checkpoint)
    end: Offsets | None  # offsets where it ended, exclusive: everything before has been processed
    lag: int  # records that were in the topic and not yet read when the batch was planned
    dead_letters: int | None = None  # that the query itself wrote; None: it does not know


class Examined(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="examined"):
    """Finished batches of one query whose readings are accounted for."""

    query: str
    batch: int  # the newest of them
    rows: int  # records read again
    malformed: int  # dead letters of records that are no readings
    late: int  # dead letters of readings all of whose windows were closed
    duration_ms: int


class Totals(msgspec.Struct, kw_only=True):
    """What one query did in this run; the fields are sums of `Progress` and `Examined`."""

    batches: int = 0
    rows: int = 0
    late_rows: int = 0
    malformed: int = 0
    late_readings: int = 0
    end: Offsets | None = None

    def add(self, progress: Progress) -> None:
        """Count one batch in."""
        self.batches += 1
        self.rows += progress.rows
        self.late_rows += progress.late_rows
        self.end = progress.end

    def add_examined(self, examined: Examined) -> None:
        """Count what was found in finished batches."""
        self.malformed += examined.malformed
        self.late_readings += examined.late


def progress_of(report: dict[str, Any]) -> Progress:
    """Spark's own report of a batch (StreamingQueryProgress as JSON) as ours."""
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
    """Over all partitions."""
    return sum(offset for partitions in offsets.values() for offset in partitions.values())


class ProgressListener:
    """Hands every batch's progress to a function, and a query's end (its run id) to another, in a thread of Spark's.

    The end comes after the last progress. Both functions must be quick and must not call Spark: they run on
    the bus that carries all events. Java calls the methods itself, not by pyspark's `StreamingQueryListener`: that asks
    Java for each field of an event, a hundred questions and eight exceptions a batch, and one is enough.
    """

    def __init__(self, spark: SparkSession, sink: Callable[[Progress], None], ended: Callable[[str], None]) -> None:
        self._sink = sink
        self._ended = ended
        self._jlistener = java_class(spark, "org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper")(self)

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        """Nothing to report: `onQueryProgress` names the query."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """One batch is done."""
        self._sink(progress_of(json.loads(event.progress().json())))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Nothing to report: no batch ran."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """No more progress of this run; the one who runs the query asks it for its exception."""
        self._ended(event.runId().toString())

    class Java:
        """What py4j wants to know."""

        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)
