"""The `foreachBatch` function that writes a job's batches to its archive."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame, SparkSession

from spark_sinks.archive.lake import table_of
from spark_sinks.archive.parquet import Archive
from spark_sinks.archive.rows import checkpoint_id
from spark_sinks.spec.parts import ArchiveSink


def writing(spark: SparkSession, sink: ArchiveSink, checkpoint: str) -> Callable[[DataFrame, int], None]:
    """Claim the archive for the query of this checkpoint, and return the function that adds a batch of `rows`.

    Raises:
        ArchiveError: the archive belongs to another checkpoint.
    """
    if sink.format == "parquet":
        return Archive(spark, sink.archive, checkpoint, files=sink.files, segment=sink.segment).write
    table = table_of(sink, checkpoint_id(spark, checkpoint))

    def write(batch: DataFrame, number: int) -> None:
        newest = table.newest()
        if newest is None or newest < number:
            table.append(batch.toArrow(), number)

    return write
