"""The `foreachBatch` function that writes a job's batches to its archive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession

from spark_sinks.archive.parquet import Archive
from spark_sinks.archive.rows import checkpoint_id
from spark_sinks.spec.parts import ArchiveSink


class Table(Protocol):
    """A table that commits a batch's rows together with its number."""

    def newest(self) -> int | None:
        """Return the newest batch in the table; None if there is none."""

    def append(self, rows: Any, number: int) -> None:
        """Add a batch (a `pyarrow.Table`) completely or not at all."""


def writing(spark: SparkSession, sink: ArchiveSink, checkpoint: str) -> Callable[[DataFrame, int], None]:
    """Claim the archive for the query of this checkpoint, and return the function that adds a batch of `rows`.

    Raises:
        ArchiveError: the archive belongs to another checkpoint.
    """
    if sink.format == "parquet":
        return Archive(spark, sink.archive, checkpoint, files=sink.files, segment=sink.segment).write
    table = _table(sink, checkpoint_id(spark, checkpoint))

    def write(batch: DataFrame, number: int) -> None:
        newest = table.newest()
        if newest is None or newest < number:
            table.append(batch.toArrow(), number)

    return write


def _table(sink: ArchiveSink, archive: str) -> Table:
    # Each needs packages of the extra `lake`.
    if sink.format == "delta":
        from spark_sinks.archive.delta import DeltaArchive  # noqa: PLC0415

        return DeltaArchive(sink.archive, archive, sink.options)
    from spark_sinks.archive.iceberg import IcebergArchive  # noqa: PLC0415

    return IcebergArchive(sink.archive, archive, sink.catalog, sink.options)
