"""A Delta table with every record of a topic exactly once, written by pyarrow and committed by delta-rs, without Spark.

A commit adds a batch's files and, atomically, the batch's number as the version of two Delta application
transactions. The first has this archive's checkpoint in its name, and identifies a repeated batch. The second has the
same name in every archive, and identifies a table of another checkpoint. A third has the number of drivers that have
taken the table over. delta-rs refuses the second of two concurrent commits with the same application.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction

from spark_sinks.archive.contract import ArchiveError, Maintained, Table, another_checkpoint, check_columns, first_kept
from spark_sinks.archive.delta_files import DeltaFiles, does_exist
from spark_sinks.spec.parts import Maintain

APPLICATION: Final = "trivium-archive"
PARTITIONS: Final = ["date", "topic"]


class DeltaArchive(Table[DeltaTable]):
    """A Delta table. The columns `date` and `topic` are in the directory names of its files.

    Args:
        name: the table's directory or URL.
        archive: see `Table`.
        options: storage options by delta-rs's names.
    """

    FORMAT = "Delta"
    CONFLICT = CommitFailedError

    def __init__(self, name: str, archive: str, options: Mapping[str, str]) -> None:
        self._application = f"{APPLICATION}-{archive}"
        self._drivers_application = f"{APPLICATION}-{archive}-drivers"
        self._options = dict(options)
        super().__init__(name, archive)

    def _opened(self) -> DeltaTable | None:
        try:
            return DeltaTable(self._name, storage_options=self._options)
        except TableNotFoundError:
            return None

    def _newest(self, table: DeltaTable) -> int | None:
        newest = table.transaction_version(self._application)
        if newest is None and table.transaction_version(APPLICATION) is not None:
            raise another_checkpoint(self._name)
        return newest

    def _drivers(self, table: DeltaTable) -> int:
        return table.transaction_version(self._drivers_application) or 0

    def _claimed(self, table: DeltaTable) -> int:
        number = self._drivers(table) + 1
        _add(table, [], Transaction(self._drivers_application, number))
        return number

    def _fitting(self, schema: pa.Schema) -> DeltaTable:
        table = self._opened()
        if table is None:
            fields = Schema.from_arrow(schema)
            return DeltaTable.create(
                self._name, fields, mode="ignore", partition_by=PARTITIONS, storage_options=self._options
            )
        there = pa.schema(table.schema().to_arrow())
        check_columns(self._name, there, schema)
        self._check_writable(table)
        if new := [field for field in schema if field.name not in there.names]:
            table.alter.add_columns(Schema.from_arrow(pa.schema(new)).fields)
        return table

    def _check_writable(self, table: DeltaTable) -> None:
        """Raise ArchiveError if rows must fulfil or get more than their columns' types say."""
        others = sorted(set(table.metadata().partition_columns) - set(PARTITIONS))
        if others:
            raise ArchiveError(f"{self._name} is partitioned by {', '.join(others)}: only date and topic are supported")
        rules = [key for key in table.metadata().configuration if key.startswith("delta.constraints.")]
        rules += [field.name for field in table.schema().fields if not field.nullable or _is_special(field.metadata)]
        if rules:
            raise ArchiveError(f"{self._name} has constraints, or generated or mapped columns: {', '.join(rules)}")

    def _writer(self, table: DeltaTable) -> DeltaFiles:
        return DeltaFiles(self._name, self._options, tuple(table.metadata().partition_columns))

    def _unseen(self, files: Sequence[AddAction]) -> str | None:
        return next((file.path for file in files if not does_exist(self._name, self._options, file.path)), None)

    def _commit(self, files: Sequence[AddAction], number: int) -> None:
        """Add the files as one batch. The conflict is another process that has just added a batch of this archive."""
        table = self._existing()
        if self._is_new(table, number):
            both = [Transaction(name, number) for name in (APPLICATION, self._application)]
            _add(table, files, *both, Transaction(self._drivers_application, self._driver))

    def _files(self, table: DeltaTable) -> list[str] | None:
        return None if "deletionVectors" in (table.protocol().reader_features or ()) else list(table.file_uris())

    def _maintain(self, table: DeltaTable, settings: Maintain, now: datetime.datetime) -> Maintained:
        done = Maintained()
        if (first := first_kept(settings, now)) is not None:
            done.expired = table.delete(f"date < '{first.isoformat()}'")["num_deleted_rows"] or 0
        before = _rows_of_files(table)
        made = table.optimize.compact(target_size=settings.file_mb << 20)
        done.merged, done.into = made["numFilesRemoved"], made["numFilesAdded"]
        after = _rows_of_files(table)
        done.rows = sum(rows for file, rows in before.items() if file not in after)
        # delta-rs counts whole hours before its own clock. Rounded up: files that a writer has not committed yet are
        # unused too.
        age = datetime.datetime.now(datetime.UTC) - (now - datetime.timedelta(milliseconds=settings.unused.ms))
        hours = max(0, math.ceil(age / datetime.timedelta(hours=1)))
        unused = table.vacuum(retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=True)
        done.unused = len(unused)
        table.create_checkpoint()
        table.cleanup_metadata()
        return done


def _add(table: DeltaTable, files: Sequence[AddAction], *applications: Transaction) -> None:
    table.create_write_transaction(
        list(files),
        "append",
        table.schema(),
        table.metadata().partition_columns,
        commit_properties=CommitProperties(app_transactions=list(applications)),
    )


def _is_special(metadata: Mapping[str, object]) -> bool:
    return any(key.startswith("delta.") for key in metadata)


def _rows_of_files(table: DeltaTable) -> dict[str, int]:
    files = pa.table(table.get_add_actions())
    return dict(zip(files["path"].to_pylist(), files["num_records"].to_pylist(), strict=True))
