"""The columns of an archive, and access to the file systems of archives and checkpoints."""

from __future__ import annotations

import json
import uuid
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.archive.contract import MARK, ArchiveError
from spark_sinks.java import java_class
from spark_sinks.spec.parts import Source


def rows(checked: DataFrame, source: Source) -> DataFrame:
    """Select everything that is known of each record of `decode.readings`.

    Returns:
        `date` (of Kafka's timestamp, UTC) and `topic`, which partition the files; `partition`, `offset`, `timestamp`,
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


class Files:
    """Hadoop's file systems, which may hold checkpoints and archives, accessed by name."""

    def __init__(self, spark: SparkSession) -> None:
        self._path_of = java_class(spark, "org.apache.hadoop.fs.Path")
        self._configuration = spark._jsc.hadoopConfiguration()

    def exists(self, name: str) -> bool:
        """Whether a file or directory exists."""
        return bool(self._system(name).exists(self._path_of(name)))

    def make(self, name: str) -> None:
        """Create a directory and its parents."""
        self._system(name).mkdirs(self._path_of(name))

    def delete(self, name: str) -> None:
        """Delete a file, or a directory recursively; no error if it does not exist."""
        self._system(name).delete(self._path_of(name), True)

    def rename(self, name: str, new: str) -> bool:
        """Rename, atomically if the file system can; False if it failed."""
        return bool(self._system(name).rename(self._path_of(name), self._path_of(new)))

    def read_mark(self, directory: str) -> dict[str, Any]:
        """Read a directory's mark file; empty if there is none."""
        name = f"{directory}/{MARK}"
        files, path = self._system(name), self._path_of(name)
        if not files.exists(path):
            return {}
        stream = files.open(path)
        try:
            mark: dict[str, Any] = json.loads(bytes(stream.readAllBytes()))
            return mark
        finally:
            stream.close()

    def write_mark(self, directory: str, mark: dict[str, Any]) -> None:
        """Write a directory's mark file."""
        name, new = f"{directory}/{MARK}", f"{directory}/{MARK}.new"
        stream = self._system(new).create(self._path_of(new), True)
        try:
            stream.write(bytearray(json.dumps(mark).encode()))
        finally:
            stream.close()
        self.delete(name)  # Hadoop's rename does not replace
        if not self.rename(new, name):
            raise ArchiveError(f"{name} cannot be written")

    def _system(self, name: str) -> Any:
        return self._path_of(name).getFileSystem(self._configuration)


def checkpoint_id(files: Files, checkpoint: str) -> str:
    """Return the id that a query's checkpoint has for its archive; the first start creates it.

    It is stored in the query's own checkpoint directory: if this is deleted, or the job is renamed, batches start at 0
    again and must not be mistaken for the archive's.
    """
    mark = files.read_mark(checkpoint)
    if not mark:
        mark = {"archive": uuid.uuid4().hex}
        files.write_mark(checkpoint, mark)
    return str(mark["archive"])
