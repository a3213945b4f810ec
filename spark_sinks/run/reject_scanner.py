"""Finds the records that a query's results omit, malformed and late readings, and writes them as dead letters.

Spark only counts the rows that it drops as late, and loses even that count when it is killed. But its checkpoint has
the offset range and the watermark of each finished batch. So a thread reads every finished batch a second time and
applies the same watermark; a file in the checkpoint (`examined`) holds the number of the last batch examined. Every
record is read exactly twice, however many are late, and a kill at any moment loses no dead letter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.read.headers import ERROR
from spark_sinks.read.records import of_partition
from spark_sinks.read.sources import kafka_range, producer_settings
from spark_sinks.run.job import Flow
from spark_sinks.spark.checkpoint import JobCheckpoint, PlannedBatch
from spark_sinks.spark.progress import Examined, Offsets, offsets_sum
from spark_sinks.transforms.dead_letters import LATE, LATE_BY_OTHERS, dead_letters

MOST_BATCHES = 50
"""The most batches examined together. Spark keeps the metadata of a hundred, so the next ones are still there."""


class RejectScanner:
    """Examines the finished batches of one query, starting after the last one that the checkpoint marks as examined.

    Args:
        flow: the job, with the topic for its dead letters.
        report: called in the thread with the result of each examination, and the exception that ended the thread.

    Attributes:
        tasks: the most tasks that may scan at the same time. None means one per partition.
    """

    def __init__(self, flow: Flow, report: Callable[[Examined | BaseException], None]) -> None:
        self.tasks: int | None = None
        self._flow = flow
        self._spark = flow.spark
        self._report = report
        self._checkpoint = JobCheckpoint(flow.spark, flow.checkpoint)
        self._finished = threading.Event()  # set when another batch is finished
        self._stopped = False
        self._out_of_time = False
        self._thread = threading.Thread(target=self._work, name=f"reject scanner of {flow.name}", daemon=True)

    def start(self) -> None:
        """Start the thread. It waits for `batch_finished`, then first examines the batches left by an earlier run."""
        self._thread.start()

    def batch_finished(self) -> None:
        """Examine the batches finished since the last time."""
        self._finished.set()

    def stop(self, limit_s: float) -> None:
        """Examine the batches that are finished now, for at most `limit_s`; the next start does the rest."""
        self._stopped = True
        self._finished.set()
        self._thread.join(limit_s)
        self._out_of_time = True
        if self._thread.is_alive():
            self._spark.sparkContext.cancelJobGroup(self._group)
            self._thread.join()

    @property
    def _group(self) -> str:
        return f"reject scanner of {self._flow.name} {id(self)}"

    def _work(self) -> None:
        self._spark.sparkContext.setJobGroup(self._group, "readings that no result counts", interruptOnCancel=True)
        last = False
        try:
            while not last:
                self._finished.wait()
                self._finished.clear()
                last = self._stopped
                while not self._out_of_time and (examined := self._examine()) is not None:
                    self._report(examined)
        except Exception as error:  # raised by the thread that runs the query
            if not self._stopped:
                self._report(error)

    def _examine(self) -> Examined | None:
        batches = self._next()
        if not batches:
            return None
        began = time.monotonic()
        start, end = batches[0].start, batches[-1].end
        rows = offsets_sum(end) - offsets_sum(start)
        malformed, late, by_others = self._send(start, end, watermark_of(batches)) if rows else (0, 0, 0)
        self._checkpoint.mark_examined(batches[-1].number)
        return Examined(
            query=self._flow.name,
            batch=batches[-1].number,
            rows=rows,
            malformed=malformed,
            late=late + by_others,
            late_by_others=by_others,
            duration_ms=round((time.monotonic() - began) * 1000),
        )

    def _send(self, start: Offsets, end: Offsets, watermark_ms: Column) -> tuple[int, int, int]:
        """Write an offset range's dead letters; return how many are malformed, late, and late by other readings."""
        connection = self._flow.options.connection
        records = kafka_range(self._spark, start, end, connection=connection)
        if self.tasks is not None:
            records = records.coalesce(self.tasks)
        rejected = self._flow.left_out(records, watermark_ms).cache()  # few; the source is read once
        try:
            counts = (F.count_if(F.col(ERROR) == reason) for reason in (LATE, LATE_BY_OTHERS))
            [(count, late, by_others)] = rejected.select(F.count(F.lit(1)), *counts).collect()
            if count:
                topic = self._flow.letters_topic
                limits = self._flow.limits(topic)
                writer = dead_letters(rejected, limits[topic]).write.format("kafka")
                writer.options(**producer_settings(connection, limits)).option("topic", topic).save()
        finally:
            rejected.unpersist()
        return count - late - by_others, late, by_others

    def _next(self) -> list[PlannedBatch]:
        """Return the next finished batches that were not examined, as many as may be examined together.

        They have at most the records of one micro-batch; a single larger batch is still examined whole.
        """
        done = self._checkpoint.examined()
        newest = self._checkpoint.newest()
        if newest is None or newest == done:
            return []
        first = max(self._checkpoint.oldest(), -1 if done is None else done + 1)
        batches: list[PlannedBatch] = []
        rows = 0
        for number in range(first, min(newest + 1, first + MOST_BATCHES)):
            batch = self._checkpoint.batch(number)
            if batch is None:
                break
            rows += offsets_sum(batch.end) - offsets_sum(batch.start)
            if batches and rows > self._flow.options.max_offsets_per_trigger:
                break
            batches.append(batch)
        return batches


def watermark_of(batches: Sequence[PlannedBatch]) -> Column:
    """The watermark (epoch ms) of the batch that contained a record, from its topic, partition and offset."""
    changes = [batches[0]]  # the last batch of each run with the same watermark
    for batch in batches[1:]:
        if batch.watermark_ms == changes[-1].watermark_ms:
            changes[-1] = batch
        else:
            changes.append(batch)
    if len(changes) == 1:
        return F.lit(changes[0].watermark_ms)
    ends = {
        (topic, partition): [batch.end.get(topic, {}).get(partition, 0) for batch in changes]
        for topic, partitions in changes[-1].end.items()
        for partition in partitions
    }
    passed = F.filter(of_partition(ends, "array<bigint>"), lambda end: end <= F.col("offset"))
    return F.get(F.lit([batch.watermark_ms for batch in changes]), F.size(passed))
