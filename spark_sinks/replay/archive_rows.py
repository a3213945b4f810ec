"""Replays the rows of an archive: Spark reads and sorts them, this process writes them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import UTC, date, datetime
from itertools import islice
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType

from spark_sinks.archive.contract import ArchiveError
from spark_sinks.read.records import of_partition
from spark_sinks.replay.items import Item, Place
from spark_sinks.replay.ledger import LedgerEntry, places_of
from spark_sinks.replay.run import Clients, Replayed, Say, run
from spark_sinks.replay.sources import ReplaySource, Slice, SourceError
from spark_sinks.replay.table_rows import MissingColumnsError, check_columns, table_rows
from spark_sinks.spec.backfill import ArchiveSource, Backfill

_MISSING: Final = re.compile(r"ClassNotFoundException|UnsupportedFileSystemException")
_NO_FILE_SYSTEM: Final = (
    '; it needs the Hadoop connector of this store, such as run.conf = { "spark.jars.packages" = '
    '"org.apache.hadoop:hadoop-aws:VERSION" } with the version of Spark\'s own Hadoop'
)
_GLOB: Final = re.compile(r"[\\*?\[\]{}]")


def selected(spark: SparkSession, source: ArchiveSource, positions: Mapping[Place, int]) -> DataFrame:
    """Return the rows left to replay: each partition in offset order, merged by the newest timestamp so far.

    Args:
        spark: the session.
        source: the rows to replay.
        positions: the next offset of each partition that was partly replayed.

    Raises:
        SourceError: there is no such archive.
    """
    days = (_day(source.since, date.min), _day(source.until, date.max))
    rows = _rows(spark, source, days)
    if source.topics:
        rows = rows.where(F.col("topic").isin(*source.topics))
    day, time = F.col("date").cast("date"), F.col("timestamp")
    if source.since is not None:
        rows = rows.where((day >= F.lit(days[0])) & (time >= F.lit(source.since)))
    if source.until is not None:
        rows = rows.where((day <= F.lit(days[1])) & (time < F.lit(source.until)))
    if positions:
        rows = rows.where(F.col("offset") >= F.coalesce(of_partition(positions, "bigint"), F.lit(0)))
    own = Window.partitionBy("topic", "partition").orderBy("offset")
    return (
        rows.select(
            "topic", "partition", "offset",
            F.unix_millis("timestamp").alias("timestamp"), "key", "value", "headers",
            F.max("timestamp").over(own).alias("_shown"),
        )
        .orderBy("_shown", "topic", "partition", "offset")
        .drop("_shown")
    )  # fmt: skip


def _day(moment: datetime | None, otherwise: date) -> date:
    return otherwise if moment is None else moment.astimezone(UTC).date()


def _rows(spark: SparkSession, source: ArchiveSource, days: tuple[date, date]) -> DataFrame:
    """Return the rows in the archive at present, at least those of these days."""
    try:
        if source.format != "parquet":
            return table_rows(spark, source, days)
        name = _of_hadoop(source.archive)
        files = _GLOB.sub(r"\\\g<0>", name)  # Spark takes a path as a pattern
        reader = spark.read.options(basePath=name)
        schema = reader.parquet(files).schema
        check_columns(schema.names)
        # Spark would read a directory topic=007 as a number.
        typed = [StructField(field.name, StringType()) if field.name == "topic" else field for field in schema.fields]
        return reader.schema(StructType(typed)).parquet(files)
    except MissingColumnsError as error:
        raise SourceError(f"{source.archive}: {error}") from error
    except (AnalysisException, ArchiveError) as error:
        raise SourceError(f"{source.archive}: not an archive: {str(error).splitlines()[0]}") from error
    except Py4JJavaError as error:  # of Hadoop
        why = str(error.java_exception.toString()).splitlines()[0]
        lack = _NO_FILE_SYSTEM if _MISSING.search(why) else ""
        raise SourceError(f"{source.archive}: Spark cannot read it: {why}{lack}") from error


def _of_hadoop(name: str) -> str:
    """Convert an object store's URL to the scheme of Hadoop's file system."""
    return f"s3a://{name.removeprefix('s3://')}" if name.startswith("s3://") else name


class ArchiveRows:
    """The rows of an archive as the source of a replay (`sources.Source`)."""

    def __init__(self, rows: DataFrame, positions: Mapping[Place, int], left: int) -> None:
        """`positions` as in `selected`; `left` is the number of rows."""
        self.began: dict[Place, int] = {}
        self._rows = rows
        self._positions = dict(positions)
        self._left = left

    async def slices(self, records: int) -> AsyncIterator[Slice]:
        """Yield the rows in order, at most `records` at a time."""
        rows: Iterator[Any] = await asyncio.to_thread(lambda: iter(self._rows.toLocalIterator(prefetchPartitions=True)))
        while items := await asyncio.to_thread(lambda: [_item(row) for row in islice(rows, records)]):
            for item in items:
                self._positions[item.place] = item.offset + 1
            self._left -= len(items)
            yield Slice(items, dict(self._positions), [], left=self._left)


def _item(row: Any) -> Item:
    headers = tuple((header["key"], _bytes(header["value"])) for header in row["headers"] or ())
    return Item(
        row["topic"],
        row["partition"],
        row["offset"],
        row["timestamp"],
        _bytes(row["key"]),
        _bytes(row["value"]),
        headers,
    )


def _bytes(raw: bytearray | None) -> bytes | None:
    return None if raw is None else bytes(raw)


async def backfill(
    spark: SparkSession, job: Backfill, *, report: Callable[[Replayed], None], say: Say, stopped: asyncio.Event
) -> Replayed:
    """Replay the rest of an archive; see `run`."""

    async def open_source(clients: Clients, entry: LedgerEntry) -> ReplaySource:
        if job.sink.kafka not in await clients.topics.known([job.sink.kafka]):
            raise SourceError(f"topic {job.sink.kafka} does not exist")
        positions = places_of(entry.positions)
        rows = await asyncio.to_thread(selected, spark, job.source, positions)
        return ArchiveRows(rows, positions, await asyncio.to_thread(rows.count))

    return await run(job, open_source, report=report, say=say, stopped=stopped)
