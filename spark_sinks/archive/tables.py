"""Adds a query's batches to a Delta or Iceberg table: tasks write the files, the driver commits their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema

from spark_sinks.archive.contract import Table, nullable
from spark_sinks.spark.checkpoint import JobCheckpoint

FILE_BYTES: Final = 64 << 20
"""About the most bytes of rows that a task keeps, and writes to one file for each date and topic."""


class TableArchive:
    """A table, and the query that writes it.

    Args:
        table: the table.
        files: the tasks of a batch.
    """

    def __init__(self, table: Table[Any], files: int) -> None:
        self._table = table
        self._files = files

    def drop_planned(self, rows: DataFrame, checkpoint: JobCheckpoint) -> None:
        """Have the next batch planned anew if the table does not have it, so that new settings apply to it.

        The driver that planned it may still write it, with other records under the same number; the table refuses its
        commits before the plan is dropped.
        """
        planned = checkpoint.planned()
        if planned is None:
            return
        newest = self._table.take_over(_schema(rows))
        if newest is None or newest < planned:
            checkpoint.forget_planned(planned)

    def write(self, batch: DataFrame, number: int) -> None:
        """Add a batch (of `rows`) unless the table already has it. For `foreachBatch`."""
        write = self._table.writer(_schema(batch), number)
        if write is None:
            return
        pickle: Any = CPickleSerializer()  # it has no types

        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for rows in _gathered(batches):
                yield pa.RecordBatch.from_pydict({"file": [pickle.dumps(file) for file in write(rows)]})

        made = batch.coalesce(self._files).mapInArrow(task, "file binary").collect()
        self._table.commit([pickle.loads(row.file) for row in made], number)


def _schema(rows: DataFrame) -> pa.Schema:
    return to_arrow_schema(rows.schema, timezone="UTC")


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows of a task in tables of about `FILE_BYTES`, the last one smaller."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= FILE_BYTES:
            yield _table(held)
            held, size = [], 0
    if held:
        yield _table(held)


def _table(batches: list[pa.RecordBatch]) -> pa.Table:
    rows = pa.Table.from_batches(batches)
    return rows.cast(nullable(rows.schema))
