"""The rows of a Delta or Iceberg table, which Spark's Python workers read by the table's own library.

So a backfill reads every store that the archive's job writes to, without a connector of Hadoop's. The workers need the
packages of the extra `lake`.
"""

from __future__ import annotations

import datetime
import functools
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession

from spark_sinks.archive.lake import table_of
from spark_sinks.spec.backfill import ArchiveSource

SCHEMA: Final = pa.schema(
    [
        ("date", pa.date32()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
_OF_SPARK: Final = (
    "date date, topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary, "
    "headers array<struct<key: string, value: binary>>"
)
_TASKS: Final = 64
_READ_ROWS: Final = 1_024
_PIECE_BYTES: Final = 8 << 20
"""About the most bytes that pass from a worker to Spark at once."""
Batches = Iterable[pa.RecordBatch]


def table_rows(spark: SparkSession, source: ArchiveSource, days: tuple[datetime.date, datetime.date]) -> DataFrame:
    """Return the rows of the table's newest version, at least those of these days (both included) and of its topics.

    Raises:
        ArchiveError: there is no table, or another engine has deleted rows without rewriting its files.
        MissingColumnsError: it is no archive of records.
    """
    table_of(source).files()
    parts, batches_of = (_of_delta if source.format == "delta" else _of_iceberg)(source, days)
    frame = spark.createDataFrame(pa.table({"part": pa.array(map(pickle.dumps, parts), pa.binary())}))
    frame = frame.repartition(max(1, min(len(parts), _TASKS)))
    return frame.mapInArrow(functools.partial(_read, batches_of), _OF_SPARK)


class MissingColumnsError(RuntimeError):
    """A table lacks columns of an archive; the message names them."""


def check_columns(names: Iterable[str]) -> None:
    """Raise MissingColumnsError unless these columns are those of an archive."""
    if missing := set(SCHEMA.names) - set(names):
        raise MissingColumnsError(f"not an archive of records: no column {', '.join(sorted(missing))}")


def _of_delta(
    source: ArchiveSource, days: tuple[datetime.date, datetime.date]
) -> tuple[list[Any], Callable[[Any], Batches]]:
    """Return the table's files, and the function that reads one."""
    from deltalake import DeltaTable  # noqa: PLC0415 - of the extra `lake`

    dataset = DeltaTable(source.archive, storage_options=dict(source.options)).to_pyarrow_dataset()
    check_columns(dataset.schema.names)
    date, topic = ds.field("date"), ds.field("topic")
    wanted = (date >= pa.scalar(days[0])) & (date <= pa.scalar(days[1]))
    if source.topics:
        wanted &= topic.isin(list(source.topics))
    return list(dataset.get_fragments(filter=wanted)), functools.partial(_of_fragment, dataset.schema)


def _of_fragment(schema: pa.Schema, fragment: Any) -> Batches:
    read = fragment.scanner(
        schema=schema, columns=SCHEMA.names, batch_size=_READ_ROWS, batch_readahead=1, fragment_readahead=1
    )
    batches: Batches = read.to_batches()
    return batches


def _of_iceberg(
    source: ArchiveSource, days: tuple[datetime.date, datetime.date]
) -> tuple[list[Any], Callable[[Any], Batches]]:
    """Return the table's files, and the function that reads one."""
    from pyiceberg.catalog import load_catalog  # noqa: PLC0415 - of the extra `lake`

    table = load_catalog(source.catalog, **source.options).load_table(source.archive)
    check_columns(table.schema().column_names)
    wanted = f"date >= '{days[0]}' and date <= '{days[1]}'"
    if source.topics:
        wanted += f" and topic in ({', '.join(map(repr, source.topics))})"
    scan = table.scan(row_filter=wanted, selected_fields=tuple(SCHEMA.names))
    return list(scan.plan_files()), functools.partial(_of_task, table.metadata, table.io, scan.projection())


def _of_task(metadata: Any, io: Any, projection: Any, task: Any) -> Batches:
    from pyiceberg.expressions import AlwaysTrue  # noqa: PLC0415 - of the extra `lake`
    from pyiceberg.io.pyarrow import ArrowScan  # noqa: PLC0415

    batches: Batches = ArrowScan(metadata, io, projection, AlwaysTrue()).to_record_batches([task])
    return batches


def _read(batches_of: Callable[[Any], Batches], parts: Batches) -> Iterator[pa.RecordBatch]:
    """Read the files of a task; runs in a worker."""
    for some in parts:
        for part in some.column("part"):
            for batch in batches_of(pickle.loads(part.as_py())):  # noqa: S301 - from our own driver
                yield from _pieces(batch)


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows:
        rows = pa.Table.from_batches([batch]).select(SCHEMA.names).cast(SCHEMA)
        yield from rows.to_batches(max_chunksize=max(1, _PIECE_BYTES * rows.num_rows // max(1, rows.nbytes)))
