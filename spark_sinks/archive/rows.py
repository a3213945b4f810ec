"""What an archive keeps of a record, and the file systems that it and its checkpoint are on."""

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
    """What is kept of each record of `decode.readings`: everything.

    Returns:
        `date` (of Kafka's timestamp, UTC) and `topic`, by which files are laid out; `partition`, `offset`, `timestamp`,
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
    """Hadoop's file systems, by names: what a checkpoint or an archive may be on."""

    def __init__(self, spark: SparkSession) -> None:
        self._path_of = java_class(spark, "org.apache.hadoop.fs.Path")
        self._configuration = spark._jsc.hadoopConfiguration()

    def exists(self, name: str) -> bool:
        """Whether there is a file or a directory."""
        return bool(self._system(name).exists(self._path_of(name)))

    def make(self, name: str) -> None:
        """Make a directory and those it is in."""
        self._system(name).mkdirs(self._path_of(name))

    def delete(self, name: str) -> None:
        """Delete a file or a directory with all that is in it; nothing where it is not there."""
        self._system(name).delete(self._path_of(name), True)

    def rename(self, name: str, new: str) -> bool:
        """In one step, where the file system can; False: it was not done."""
        return bool(self._system(name).rename(self._path_of(name), self._path_of(new)))

    def read_mark(self, directory: str) -> dict[str, Any]:
        """What a directory's mark says; empty when there is none."""
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
        """Mark a directory."""
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
    """The id that a query's checkpoint has for its archive; made at the first start.

    In the directory of the query itself: whoever deletes it, or gives the job another name, begins at batch 0 again,
    and must not be taken for the archive's job.
    """
    mark = files.read_mark(checkpoint)
    if not mark:
        mark = {"archive": uuid.uuid4().hex}
        files.write_mark(checkpoint, mark)
    return str(mark["archive"])
