"""An archive of Parquet files with every record of a topic exactly once, for every reader at any time.

A batch is written outside the archive and then moved into it with one atomic directory rename; files that a killed job
left outside are written again. The batch number names the directory and the checkpoint fixes the batch's offset range,
so a batch that already exists is not written again. Readers only need the archive's path.

    ARCHIVE/segment=0/batch=12/date=2026-11-23/topic=sensors/part-....parquet
    ARCHIVE.staging/START/12/...                                             being written, not part of the archive

A complete segment may be merged (`spark_sinks/archive/segments.py`). It then contains `MERGED`, and no batch is added
to it any more.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from spark_sinks.archive.contract import MERGED, ArchiveError, another_checkpoint
from spark_sinks.archive.rows import checkpoint_id, read_mark, write_mark
from spark_sinks.spark.java import Files


class ParquetArchive:
    """An archive and the single job that writes it."""

    def __init__(
        self, spark: SparkSession, path: str, checkpoint: str, *, files: int = 1, segment: int = 1_000
    ) -> None:
        """Claim the archive for the job of this checkpoint.

        Args:
            spark: the session, whose Hadoop file systems are used.
            path: the archive's directory or URL; created if missing.
            checkpoint: the query's own checkpoint, which stores the archive's id.
            files: per batch, date and topic.
            segment: batches per segment directory.

        Raises:
            ArchiveError: the archive belongs to another checkpoint, or has another segment size.
        """
        self._path = path.rstrip("/")
        self._hadoop = Files(spark, self._path)
        self._files = files
        self._segment = segment
        self._claim(checkpoint_id(spark, checkpoint))
        all_staging = f"{self._path}.staging"
        self._hadoop.delete(all_staging)
        # The directory has a new name at each start, because a killed job's JVM may write for a moment longer.
        self._staging = f"{all_staging}/{uuid.uuid4().hex}"
        self._hadoop.make(self._staging)
        local = [Path(name.removeprefix("file://")) for name in (self._path, self._staging)]
        if all(directory.is_dir() for directory in local) and local[0].stat().st_dev != local[1].stat().st_dev:
            raise ArchiveError(
                f"{path} is the root of a file system, so nothing can be renamed into it: use a directory below it"
            )

    def write(self, batch: DataFrame, number: int) -> None:
        """Add a batch (of `rows`) unless the archive already has it. For `foreachBatch`."""
        segment, staged = f"{self._path}/segment={number // self._segment}", f"{self._staging}/{number}"
        target = f"{segment}/batch={number}"
        if self._hadoop.exists(target) or self._hadoop.exists(f"{segment}/{MERGED}"):
            return
        # Every engine can read these timestamps; INT96, Spark's own type, has no unit and no zone.
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

    def _claim(self, archive: str) -> None:
        ours = {"archive": archive, "segment": self._segment}
        mark = read_mark(self._hadoop, self._path)
        if not mark:
            write_mark(self._hadoop, self._path, ours)
        elif mark["archive"] != ours["archive"]:
            raise another_checkpoint(self._path)
        elif mark.get("segment") != self._segment:
            raise ArchiveError(
                f"{self._path} has {mark.get('segment')} batches per segment: use this number again, or another archive"
            )
