"""An Iceberg table with every record of a topic exactly once, written by pyiceberg without Spark.

A commit adds a batch's files and, atomically, the batch's number as a table property, which identifies a repeated
batch; the snapshot's summary has it too. Another property has the number of drivers that have taken the table over. A
commit is valid for one snapshot only: after a conflict with another writer the table is loaded again.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.fs import FileSelector
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    TableAlreadyExistsError,
    ValidationException,
)
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import ArrowScan, PyArrowFileIO, _dataframe_to_data_files
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update.snapshot import ExpireSnapshots

from spark_sinks.archive.contract import (
    ArchiveError,
    Maintained,
    another_checkpoint,
    check_columns,
    first_kept,
)
from spark_sinks.archive.contract import Table as ArchiveTable
from spark_sinks.spec.parts import Maintain

ARCHIVE: Final = "trivium.archive"
BATCH: Final = "trivium.batch"
ATTEMPTS: Final = 20
RETRY_S: Final = 0.1
SMALL: Final = 0.75  # share of the wanted size; larger files are not merged
DRIVERS: Final = "trivium.drivers"
RETRIES: Final = "commit.retry.num-retries"


class IcebergArchive(ArchiveTable[Table]):
    """An Iceberg table.

    Args:
        name: the table's name with its namespace.
        archive: see `ArchiveTable`.
        catalog: the catalog's name in pyiceberg's configuration.
        options: more catalog properties.
    """

    FORMAT = "Iceberg"
    CONFLICT = CommitFailedException

    def __init__(self, name: str, archive: str, catalog: str, options: Mapping[str, str]) -> None:
        self._catalog = load_catalog(catalog, **options)
        super().__init__(name, archive)

    def _opened(self) -> Table | None:
        try:
            return self._catalog.load_table(self._name)
        except NoSuchTableError:
            return None

    def _newest(self, table: Table) -> int | None:
        owner, newest = table.properties.get(ARCHIVE), table.properties.get(BATCH)
        if owner is not None and owner != self._archive:
            raise another_checkpoint(self._name)
        return None if owner is None or newest is None else int(newest)

    def _drivers(self, table: Table) -> int:
        return int(table.properties.get(DRIVERS, 0))

    def _claimed(self, table: Table) -> int:
        def change(transaction: Transaction) -> bool:
            # A snapshot without files: a commit that the former driver has begun is for the one before, and refused.
            with transaction.update_snapshot().fast_append():
                pass
            transaction.set_properties({DRIVERS: str(self._drivers(table) + 1)})
            return True

        _commit(table, change)
        return self._drivers(table)

    def _fitting(self, schema: pa.Schema) -> Table:
        table = self._opened() or _made(self._catalog, self._name, schema)
        check_columns(self._name, table.schema().as_arrow(), schema)
        if set(schema.names) - set(table.schema().column_names):
            with table.update_schema() as wider:
                wider.union_by_name(schema)
            table = self._catalog.load_table(self._name)
        return table

    def _writer(self, table: Table) -> IcebergFiles:
        return IcebergFiles(table.metadata, table.io)

    def _unseen(self, files: Sequence[DataFile]) -> str | None:
        io = self._existing().io
        return next((file.file_path for file in files if not io.new_input(file.file_path).exists()), None)

    def _commit(self, files: Sequence[DataFile], number: int) -> None:
        table = self._existing()
        marks = {ARCHIVE: self._archive, BATCH: str(number)}

        def change(transaction: Transaction) -> bool:
            if not self._is_new(table, number):
                return False
            with transaction.update_snapshot(snapshot_properties=marks).fast_append() as added:
                for file in files:
                    added.append_data_file(file)
            transaction.set_properties(marks)
            return True

        _commit(table, change)

    def _files(self, table: Table) -> list[str] | None:
        tasks = list(table.scan().plan_files())
        return None if any(task.delete_files for task in tasks) else [task.file.file_path for task in tasks]

    def _maintain(self, table: Table, settings: Maintain, now: datetime.datetime) -> Maintained:
        done = Maintained()
        if (first := first_kept(settings, now)) is not None:
            done.expired = _forget(table, first)
        for files in _bins(table, settings.file_mb << 20):
            _merge(table, files, done)
        before = now - datetime.timedelta(milliseconds=settings.unused.ms)
        table.refresh()
        _commit(table, lambda transaction: _expire(transaction, before))
        done.unused, left = _clear_away(table, before)
        done.left += left
        return done


def _made(catalog: Catalog, name: str, schema: pa.Schema) -> Table:
    catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
    with (
        contextlib.suppress(TableAlreadyExistsError, CommitFailedException),
        catalog.create_table_transaction(name, schema=schema) as making,
        making.update_spec() as spec,
    ):
        spec.add_identity("date")
        spec.add_identity("topic")
    return catalog.load_table(name)


@dataclass(frozen=True, slots=True)
class IcebergFiles:
    """Writes rows to files, one for each partition (`contract.WriteFiles`)."""

    metadata: TableMetadata
    io: FileIO

    def __call__(self, rows: pa.Table) -> Iterator[DataFile]:
        """Write the rows; yield what adds each file to the table."""
        return iter(_dataframe_to_data_files(self.metadata, rows, self.io, uuid.uuid4()))


def _commit(table: Table, change: Callable[[Transaction], bool]) -> None:
    """Commit a change against the snapshot that it was made for; after a conflict, make it again for the newer one.

    Args:
        table: refreshed before each new attempt.
        change: makes the change in the transaction; returns False if there is nothing left to do.
    """
    for attempt in itertools.count(1):
        # pyiceberg itself would retry the old change on the newer snapshot, and so add a batch that is already there.
        table.metadata.properties[RETRIES] = "0"  # in memory only
        transaction = table.transaction()
        if not change(transaction):
            return
        try:
            transaction.commit_transaction()
            return
        except CommitFailedException:
            if attempt == ATTEMPTS:
                raise
            time.sleep(RETRY_S * random.uniform(0.5, 1.5) * min(attempt, 10))  # noqa: S311 - no secret
            table.refresh()


def _forget(table: Table, first: datetime.date) -> int:
    """Delete the records dated before `first`; return their number. No file is rewritten: they are partitions."""
    old = f"date < '{first.isoformat()}'"
    rows = 0

    def change(transaction: Transaction) -> bool:
        nonlocal rows
        rows = sum(task.file.record_count for task in table.scan(row_filter=old).plan_files())
        if rows:
            transaction.delete(old)
        return rows > 0

    _commit(table, change)
    return rows


def _expire(transaction: Transaction, before: datetime.datetime) -> bool:
    ExpireSnapshots(transaction).older_than(before).commit()
    return True


def _bins(table: Table, file_bytes: int) -> Iterator[Sequence[FileScanTask]]:
    """Yield groups of two or more small files of one partition, to merge into one of about `file_bytes`."""
    small: dict[tuple[int, Any], list[FileScanTask]] = defaultdict(list)
    for task in table.scan().plan_files():
        # Files with rows that another engine has deleted in a separate file must not be merged here.
        if task.file.file_size_in_bytes < file_bytes * SMALL and not task.delete_files:
            small[task.file.spec_id, task.file.partition].append(task)
    for tasks in small.values():
        held: list[FileScanTask] = []
        size = 0
        for task in tasks:
            if held and size + task.file.file_size_in_bytes > file_bytes:
                if len(held) > 1:
                    yield held
                held, size = [], 0
            held.append(task)
            size += task.file.file_size_in_bytes
        if len(held) > 1:
            yield held


def _merge(table: Table, tasks: Sequence[FileScanTask], done: Maintained) -> None:
    """Replace these files with merged ones, or keep them if one was removed by another writer meanwhile."""
    rows = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue()).to_table(tasks)
    there = sum(task.file.record_count for task in tasks)
    if rows.num_rows != there:
        raise ArchiveError(
            f"{'.'.join(table.name())}: {len(tasks)} files should have {there:,} rows, but {rows.num_rows:,} were read"
        )
    rows = rows.take(pc.sort_indices(rows, [("partition", "ascending"), ("offset", "ascending")]))
    files = list(IcebergFiles(table.metadata, table.io)(rows))

    def change(transaction: Transaction) -> bool:
        with transaction.update_snapshot().overwrite() as replaced:
            for task in tasks:
                replaced.delete_data_file(task.file)
            for file in files:
                replaced.append_data_file(file)
        return True

    try:
        _commit(table, change)
    except (CommitFailedException, ValidationException) as error:
        done.left += (f"{len(tasks)} files were not merged: {error}",)
        for file in files:
            table.io.delete(file.file_path)
        return
    done.merged += len(tasks)
    done.into += len(files)
    done.rows += there


def _clear_away(table: Table, before: datetime.datetime) -> tuple[int, tuple[str, ...]]:
    """Delete files below the table's location that no snapshot needs and that are older than `before`."""
    io = table.io
    if not isinstance(io, PyArrowFileIO):
        return 0, (f"unused files stay: pyiceberg's {type(io).__name__} cannot list files; use its PyArrowFileIO",)
    scheme, netloc, place = PyArrowFileIO.parse_location(table.location())
    system = io.fs_by_scheme(scheme, netloc)
    listed = [
        file
        for part in ("data", "metadata")
        for file in system.get_file_info(FileSelector(f"{place}/{part}", recursive=True, allow_not_found=True))
        if file.is_file and file.mtime < before
    ]
    table.refresh()  # commits before the listing are known now; later files are young
    needed = {PyArrowFileIO.parse_location(location)[2] for location in _needed(table)}
    unused = [file.path for file in listed if file.path not in needed]
    for path in unused:
        with contextlib.suppress(FileNotFoundError):  # deleted by a concurrent maintain
            system.delete_file(path)
    return len(unused), ()


def _needed(table: Table) -> Iterator[str]:
    yield table.metadata_location
    yield from (entry.metadata_file for entry in table.metadata.metadata_log)
    yield from (statistics.statistics_path for statistics in table.metadata.statistics)
    yield from (snapshot.manifest_list for snapshot in table.metadata.snapshots)
    yield from table.inspect.all_manifests()["path"].to_pylist()
    yield from table.inspect.all_files()["file_path"].to_pylist()
