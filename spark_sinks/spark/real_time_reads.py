"""What a query in real time has read of its present batch, which Spark reports only when the batch has ended.

The tasks of such a batch run for the whole interval. Their executors' heartbeats have the rows that each scan has given
so far. An offset without a record (a transaction's marker, an aborted record) counts as unread until the batch ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_sinks.spark.java import java_class
from spark_sinks.spark.progress import Offsets

HEARTBEAT: Final = {"spark.executor.heartbeatInterval": "1s"}
"""Spark's ten seconds would show ten seconds of records as unread."""
_ROWS: Final = "number of output rows"
_SCAN: Final = "RealTimeStreamScanExec"


class _Metric(msgspec.Struct):
    id: int = msgspec.field(name="ID")
    name: str | None = msgspec.field(name="Name", default=None)
    value: Any = msgspec.field(name="Update", default=None)


class _Task(msgspec.Struct):
    id: int = msgspec.field(name="Task ID")
    metrics: list[_Metric] = msgspec.field(name="Accumulator Updates")


class _Heartbeat(msgspec.Struct):
    tasks: list[_Task] = msgspec.field(name="Metrics Updated")


class _Heard:
    """A listener on Spark's bus. Its methods are called in a Spark thread."""

    def __init__(self, to_json: Callable[[Any], str]) -> None:
        self._to_json = to_json
        self._lock = threading.Lock()
        self._index: dict[int, int] = {}  # of each running task in its stage
        self._rows: dict[int, dict[int, int]] = {}  # by task and metric

    def rows(self, metric: int) -> dict[int, int]:
        """Return what the running tasks have counted so far, by the task's index."""
        with self._lock:
            return {self._index[task]: rows[metric] for task, rows in self._rows.items() if metric in rows}

    def onTaskStart(self, event: Any) -> None:  # noqa: N802
        task = event.taskInfo()
        with self._lock:
            self._index[task.taskId()] = task.index()

    def onTaskEnd(self, event: Any) -> None:  # noqa: N802
        task = event.taskInfo().taskId()
        with self._lock:
            self._index.pop(task, None)
            self._rows.pop(task, None)

    def onExecutorMetricsUpdate(self, event: Any) -> None:  # noqa: N802
        heartbeat = msgspec.json.decode(self._to_json(event), type=_Heartbeat)
        with self._lock:
            for task in heartbeat.tasks:
                if task.id in self._index:
                    self._rows[task.id] = {
                        metric.id: int(metric.value) for metric in task.metrics if metric.name == _ROWS
                    }

    def equals(self, _other: Any) -> bool:
        """Called for another listener, when Java looks for the one to remove."""
        return False

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        """Ignore every other event."""
        if not name.startswith("on"):
            raise AttributeError(name)
        return lambda _: None

    class Java:
        """Tells py4j which Java interface this object implements."""

        implements = ("org.apache.spark.scheduler.SparkListenerInterface",)


class RealTimeReads:
    """Follows the present batch of a query in real time, between `begin` and `end`.

    Attributes:
        batch: its number; -1 before the first.
        rows: the records that it has read.
        position: the offsets before which it has read everything; empty if no batch is known to run.
    """

    def __init__(self, spark: SparkSession) -> None:
        self.batch = -1
        self.rows = 0
        self.position: Offsets = {}
        self._spark = spark
        self._heard: _Heard | None = None
        self._jlistener: Any = None
        self._metric = -1  # the id of the scan's number of rows
        self._starts: list[tuple[str, str, int]] = []  # topic, partition and first offset of each task
        self._read: dict[int, int] = {}

    def begin(self) -> None:
        """Listen; to be called before the query starts."""
        if self._heard is None:
            self._heard = _Heard(java_class(self._spark, "org.apache.spark.util.JsonProtocol").sparkEventToJsonString)
            held = java_class(self._spark, "java.util.ArrayList")()
            held.add(self._heard)
            self._jlistener = held.get(0)  # a reference to one Java object, so that it can be removed
            self._spark._jsc.sc().addSparkListener(self._jlistener)

    def end(self) -> None:
        """Listen no more, and forget the batch."""
        self.batch, self.rows, self.position = -1, 0, {}
        if self._heard is not None:
            self._spark._jsc.sc().removeSparkListener(self._jlistener)
            self._heard = self._jlistener = None

    def look(self, query: StreamingQuery) -> None:
        """Update the attributes; to be called while the tasks of a batch run."""
        execution = query._jsq.streamingQuery().lastExecution()
        if (batch := int(execution.currentBatchId())) != self.batch:
            self._follow(execution)
            self.batch = batch
        if self._heard is not None:
            self._read |= self._heard.rows(self._metric)
        self.rows = sum(self._read.values())
        position: Offsets = {}
        for index, (topic, partition, start) in enumerate(self._starts):
            position.setdefault(topic, {})[partition] = start + self._read.get(index, 0)
        self.position = position

    def finished(self, batch: int) -> None:
        """Forget a batch that has ended."""
        if batch >= self.batch:
            self.rows, self.position = 0, {}

    def _follow(self, execution: Any) -> None:
        """Take the plan of a new batch."""
        self._read = {}
        self._starts = []
        leaves = execution.executedPlan().collectLeaves()
        for leaf in map(leaves.apply, range(leaves.size())):
            if leaf.getClass().getSimpleName() == _SCAN:
                self._metric = leaf.metrics().apply("numOutputRows").id()
                parts = leaf.inputPartitions()
                for at in map(parts.apply, range(parts.size())):
                    of = at.offsetRange()
                    self._starts.append((of.topic(), str(of.partition()), of.fromOffset()))
