"""Parquet files that hold every record of a topic exactly once, for every reader at every moment.

A batch is written beside the archive and becomes a directory of it by one rename, which is there or is not; what a
killed job left beside is written anew. The batch's number names the directory and the checkpoint fixes what a batch
reads, so a batch that is there already is not written again. No reader needs to know more than where the files are.

    ARCHIVE/segment=0/batch=12/date=2026-11-23/topic=sensors/part-....parquet
    ARCHIVE.staging/START/12/...                                             being written; nobody's

A segment whose batches are all there may be merged (`spark_sinks/archive/segments.py`); it has `MERGED` in it then, and
no batch is added to it any more.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from spark_sinks.archive.contract import MERGED, ArchiveError, another_checkpoint
from spark_sinks.archive.rows import Files, checkpoint_id


class Archive:
    """An archive, and the one job that writes it."""

    def __init__(
        self, spark: SparkSession, path: str, checkpoint: str, *, files: int = 1, segment: int = 1_000
    ) -> None:
        """Claim the archive for the job of this checkpoint.

        Args:
            spark: the session, whose Hadoop file systems are used.
            path: the archive's directory or URL; made when it is not there.
            checkpoint: the query's own, which remembers that the archive is its own.
            files: per batch, date and topic.
            segment: so many batches are in one directory.

        Raises:
            ArchiveError: another checkpoint's job writes this archive, or its segments have another size.
        """
        self._hadoop = Files(spark)
        self._path = path.rstrip("/")
        self._files = files
        self._segment = segment
        self._claim(checkpoint)
        all_staging = f"{self._path}.staging"
        self._hadoop.delete(all_staging)
        # Of this start alone: a killed job's JVM may write for a moment longer.
        self._staging = f"{all_staging}/{uuid.uuid4().hex}"
        self._hadoop.make(self._staging)
        local = [Path(name.removeprefix("file://")) for name in (self._path, self._staging)]
        if all(place.is_dir() for place in local) and local[0].stat().st_dev != local[1].stat().st_dev:
            raise ArchiveError(
                f"{path} is a file system of its own, into which nothing is renamed: take a directory in it"
            )

    def write(self, batch: DataFrame, number: int) -> None:
        """Add a batch (of `rows`); nothing when it is there already. For `foreachBatch`."""
        segment, staged = f"{self._path}/segment={number // self._segment}", f"{self._staging}/{number}"
        target = f"{segment}/batch={number}"
        if self._hadoop.exists(target) or self._hadoop.exists(f"{segment}/{MERGED}"):
            return
        # Every engine reads these times; INT96, Spark's own, has no unit and no zone.
        batch.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        (
            batch.coalesce(self._files)
            .sortWithinPartitions("date", "topic", "partition", "offset")
            .write.mode("overwrite")
            .option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
            .partitionBy("date", "topic")
            .parquet(staged)
        )
        self._hadoop.make(segment)
        if not self._hadoop.rename(staged, target):
            raise ArchiveError(f"batch {number} could not be renamed from {staged} into {segment}")

    def _claim(self, checkpoint: str) -> None:
        ours = {"archive": checkpoint_id(self._hadoop, checkpoint), "segment": self._segment}
        mark = self._hadoop.read_mark(self._path)
        if not mark:
            self._hadoop.write_mark(self._path, ours)
        elif mark["archive"] != ours["archive"]:
            raise another_checkpoint(self._path)
        elif "segment" not in mark:
            raise ArchiveError(
                f"{self._path} was begun by an older version, without segments: take another archive and checkpoint"
            )
        elif mark["segment"] != self._segment:
            raise ArchiveError(
                f"{self._path} has {mark['segment']} batches in a segment: take it again, or another archive"
            )
