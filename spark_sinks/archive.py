"""Parquet files that hold every record of a topic exactly once, for every reader at every moment.

A batch is written beside the archive and becomes a directory of it by one rename, which is there or is not; what a
killed job left beside is written anew. The batch's number names the directory and the checkpoint fixes what a batch
reads, so a batch that is there already is not written again. No reader needs to know more than where the files are.

    ARCHIVE/batch=12/date=2026-11-23/topic=sensors/part-....parquet
    ARCHIVE.staging/START/12/...                                              being written; nobody's
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.spec.parts import Source

OWNER: Final = "_trivium.json"
"""In the archive and in the checkpoint, with the same id: batch numbers begin anew with a new checkpoint, and would be
taken for batches that are there."""


class ArchiveError(RuntimeError):
    """The archive cannot be written; the text says why and what to do."""


def rows(checked: DataFrame, source: Source) -> DataFrame:
    """What is kept of each record of `decode.readings`: everything.

    Returns:
        `date` (of Kafka's timestamp, UTC) and `topic`, which name directories; `partition`, `offset`, `timestamp`,
        `key` and `value` (binary), `headers` (an array of key and value), `time`, and with a decoder the declared
        columns and `error`.
    """
    decoded = () if source.decode == "none" else (*source.columns, "error")
    raw = ("partition", "offset", "timestamp", "key", "value", "headers")
    return checked.select(
        F.to_date("record.timestamp").alias("date"),
        "topic",
        *(F.col(f"record.{name}").alias(name) for name in raw),
        "time",
        *decoded,
    )


class Archive:
    """An archive, and the one job that writes it."""

    def __init__(self, spark: SparkSession, path: str, checkpoint: str, *, files: int = 1) -> None:
        """Claim the archive for the job of this checkpoint.

        Args:
            spark: the session, whose Hadoop file systems are used.
            path: the archive's directory or URL; made when it is not there.
            checkpoint: the job's, which remembers that the archive is its own.
            files: per batch, date and topic.

        Raises:
            ArchiveError: another checkpoint's job writes this archive.
        """
        jvm: Any = spark._jvm
        self._path_of = jvm.org.apache.hadoop.fs.Path
        self._configuration = spark._jsc.hadoopConfiguration()
        self._path = path.rstrip("/")
        self._files = files
        self._claim(checkpoint)
        all_staging = f"{self._path}.staging"
        self._file_system(all_staging).delete(self._path_of(all_staging), True)
        # Of this start alone: a killed job's JVM may write for a moment longer.
        self._staging = f"{all_staging}/{uuid.uuid4().hex}"
        self._file_system(self._staging).mkdirs(self._path_of(self._staging))
        local = [Path(name.removeprefix("file://")) for name in (self._path, self._staging)]
        if all(place.is_dir() for place in local) and local[0].stat().st_dev != local[1].stat().st_dev:
            raise ArchiveError(
                f"{path} is a file system of its own, into which nothing is renamed: take a directory in it"
            )

    def write(self, batch: DataFrame, number: int) -> None:
        """Add a batch (of `rows`); nothing when it is there already. For `foreachBatch`."""
        target, staged = self._path_of(f"{self._path}/batch={number}"), self._path_of(f"{self._staging}/{number}")
        files = self._file_system(self._path)
        if files.exists(target):
            return
        (
            batch.coalesce(self._files)
            .sortWithinPartitions("date", "topic", "partition", "offset")
            .write.mode("overwrite")
            .option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
            .partitionBy("date", "topic")
            .parquet(staged.toString())
        )
        if not files.rename(staged, target):
            raise ArchiveError(f"batch {number} could not be renamed from {staged.toString()} into {self._path}")

    def _claim(self, checkpoint: str) -> None:
        ours, theirs = f"{checkpoint.rstrip('/')}/{OWNER}", f"{self._path}/{OWNER}"
        known, owner = self._read(ours), self._read(theirs)
        if owner is not None and owner != known:
            raise ArchiveError(
                f"{self._path} was written with another checkpoint, whose batches have the same numbers: "
                f"take that checkpoint again, or another archive"
            )
        if known is None:
            known = uuid.uuid4().hex
            self._write(ours, known)
        if owner is None:
            self._write(theirs, known)

    def _read(self, name: str) -> str | None:
        files, path = self._file_system(name), self._path_of(name)
        if not files.exists(path):
            return None
        stream = files.open(path)
        try:
            return str(json.loads(bytes(stream.readAllBytes()))["archive"])
        finally:
            stream.close()

    def _write(self, name: str, owner: str) -> None:
        files, path = self._file_system(name), self._path_of(name)
        new = self._path_of(f"{name}.new")
        stream = files.create(new, True)
        try:
            stream.write(bytearray(json.dumps({"archive": owner}).encode()))
        finally:
            stream.close()
        files.delete(path, False)
        if not files.rename(new, path):
            raise ArchiveError(f"{name} cannot be written")

    def _file_system(self, name: str) -> Any:
        return self._path_of(name).getFileSystem(self._configuration)
