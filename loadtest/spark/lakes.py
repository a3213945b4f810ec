"""Reads archives with other engines than Spark: Parquet by DuckDB, Delta by delta-rs, Iceberg by pyiceberg."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import duckdb
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError

COUNT: Final = """
WITH places AS MATERIALIZED (SELECT partition, "offset" FROM {rows})
SELECT count(*)::BIGINT, count(DISTINCT (partition, "offset"))::BIGINT,
    (SELECT coalesce(sum(ends), 0)::BIGINT FROM (SELECT max("offset") + 1 AS ends FROM places GROUP BY partition))
FROM places
"""
"""The rows are read only once, because a batch may be added between two directory listings."""
SEGMENT: Final = 5
"""Few batches per segment, so that segments are merged while the job is killed."""


class Found(NamedTuple):
    """The result of a read."""

    rows: int = 0
    distinct: int = 0
    expected: int = 0  # sum over the partitions of the newest offset + 1

    @property
    def right(self) -> bool:
        """Whether each record is there once, and none is missing before another."""
        return self.rows == self.distinct == self.expected


class Parquet:
    """Directories of files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sink = f'archive = "{directory}/lake", segment = {SEGMENT}'

    def read(self) -> Found:
        """Read by file names only; duckdb.IOException if a file was deleted before it was opened."""
        if not any((self.directory / "lake").rglob("*.parquet")):
            return Found()
        return _count(f"read_parquet('{self.directory}/lake/**/*.parquet', hive_partitioning=false)")

    def files(self) -> list[Path]:
        """Return all data files, including those that readers do not see."""
        return [path for place in self.directory.glob("lake*") for path in place.rglob("*.parquet")]


class Delta(Parquet):
    """A Delta table."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.sink = f'archive = "{directory}/lake", format = "delta"'

    def read(self) -> Found:
        """Read with delta-rs."""
        try:
            table = DeltaTable(self.directory / "lake")
        except TableNotFoundError:
            return Found()
        rows = pa.table(table.to_pyarrow_table(columns=["partition", "offset"]))
        return _count_table(rows)

    def files(self) -> list[Path]:
        """Return all data files, including those that readers do not see."""
        return [path for path in super().files() if "_delta_log" not in path.parts]


class Iceberg(Parquet):
    """An Iceberg table with a SQLite catalog."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._options = {
            "type": "sql",
            "uri": f"sqlite:///{directory}/catalog.db",
            "warehouse": f"file://{directory}/lake",
        }
        given = ", ".join(f'{name} = "{value}"' for name, value in self._options.items())
        self.sink = f'archive = "load.sensors", format = "iceberg", options = {{ {given} }}'

    def read(self) -> Found:
        """Read with pyiceberg."""
        try:
            table = load_catalog("default", **self._options).load_table("load.sensors")
        except NoSuchTableError:
            return Found()
        return _count_table(table.scan(selected_fields=("partition", "offset")).to_arrow())


FORMATS: Final = {"parquet": Parquet, "delta": Delta, "iceberg": Iceberg}


def _count_table(rows: pa.Table) -> Found:
    with duckdb.connect() as connection:
        connection.register("found", rows)
        return Found(*connection.sql(COUNT.format(rows="found")).fetchall()[0])


def _count(rows: str) -> Found:
    with duckdb.connect() as connection:
        return Found(*connection.sql(COUNT.format(rows=rows)).fetchall()[0])
