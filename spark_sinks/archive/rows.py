"""The columns of an archive, and the marks of archives and checkpoints."""

from __future__ import annotations

import json
import uuid
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.archive.contract import MARK, ArchiveError
from spark_sinks.read.decode import LAST_INSTANT
from spark_sinks.spark.java import Files
from spark_sinks.spec.parts import Source


def rows(checked: DataFrame, source: Source) -> DataFrame:
    """Select everything that is known of each record of `decode.readings`.

    Returns:
        `date` (of Kafka's timestamp, UTC) and `topic`, which partition the files; `partition`, `offset`, `timestamp`
        (at most `LAST_INSTANT`), `key` and `value` (binary), `headers` (an array of key and value), `time`, and with a
        decoder the declared columns and `error`.
    """
    decoded = () if source.decode == "none" else (*source.columns, "error")
    last = F.lit(LAST_INSTANT).cast("timestamp")  # later ones are no milliseconds, and other engines have none of them
    timestamp = F.least("record.timestamp", last)
    return checked.select(
        F.to_date(timestamp).alias("date"),
        "topic",
        *(F.col(f"record.{name}").alias(name) for name in ("partition", "offset")),
        timestamp.alias("timestamp"),
        *(F.col(f"record.{name}").alias(name) for name in ("key", "value", "headers")),
        F.least("time", last).alias("time"),
        *decoded,
    )


def read_mark(files: Files, directory: str) -> dict[str, Any]:
    """Read a directory's mark file; empty if there is none."""
    mark: dict[str, Any] = json.loads(files.read(f"{directory}/{MARK}") or "{}")
    return mark


def write_mark(files: Files, directory: str, mark: dict[str, Any]) -> None:
    """Write a directory's mark file."""
    name = f"{directory}/{MARK}"
    if not files.replace(name, json.dumps(mark), f"{name}.new"):
        raise ArchiveError(f"{name} cannot be written")


def checkpoint_id(spark: SparkSession, checkpoint: str) -> str:
    """Return the id that a query's checkpoint has for its archive; the first start creates it.

    It is stored in the query's own checkpoint directory: if this is deleted, or the job is renamed, batches start at 0
    again and must not be mistaken for the archive's.
    """
    files = Files(spark, checkpoint)
    mark = read_mark(files, checkpoint)
    if not mark:
        mark = {"archive": uuid.uuid4().hex}
        write_mark(files, checkpoint, mark)
    return str(mark["archive"])
