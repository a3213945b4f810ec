"""A Delta table with every record of a topic exactly once, written by delta-rs without Spark.

A commit adds a batch's files and, atomically, the batch's number as the version of two Delta application
transactions. The first has this archive's checkpoint in its name, and identifies a repeated batch. The second has the
same name in every archive, and identifies a table of another checkpoint. delta-rs refuses the second of two concurrent
commits with the same application.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from spark_sinks.archive.contract import (
    Maintained,
    another_checkpoint,
    check_columns,
    deleted_beside,
    first_kept,
    not_begun,
    nullable,
    overtaken,
)
from spark_sinks.spec.parts import Maintain

APPLICATION: Final = "trivium-archive"


class DeltaArchive:
    """A table and the single job that writes it."""

    def __init__(self, uri: str, archive: str, options: Mapping[str, str]) -> None:
        """Check that the table belongs to this checkpoint.

        Args:
            uri: the table's directory or URL; the first batch creates it.
            archive: the id of the job's checkpoint.
            options: storage options by delta-rs's names.

        Raises:
            ArchiveError: the table belongs to another checkpoint.
        """
        self._uri = uri
        self._application = f"{APPLICATION}-{archive}"
        self._options = dict(options)
        self.newest()

    def newest(self) -> int | None:
        """Return the newest batch in the table; None if there is none. ArchiveError if the table is another's."""
        table = _opened(self._uri, self._options)
        return None if table is None else self._newest(table)

    def _newest(self, table: DeltaTable) -> int | None:
        newest = table.transaction_version(self._application)
        if newest is None and table.transaction_version(APPLICATION) is not None:
            raise another_checkpoint(self._uri)
        return newest

    def append(self, rows: pa.Table, number: int) -> None:
        """Add a batch, unless the table already has it.

        Raises:
            ArchiveError: a column has another type in the table.
            CommitFailedError: another process has just added a batch of this archive; no row was added.
        """
        rows, table = nullable(rows), _opened(self._uri, self._options)
        if table is not None:
            newest = self._newest(table)
            if newest is not None and newest >= number:
                return
            check_columns(self._uri, pa.schema(table.schema().to_arrow()), rows.schema)
        both = [Transaction(APPLICATION, number), Transaction(self._application, number)]
        write_deltalake(
            self._uri if table is None else table,
            rows,
            mode="append",
            partition_by=["date", "topic"] if table is None else None,
            schema_mode=None if table is None else "merge",
            storage_options=self._options,
            commit_properties=CommitProperties(app_transactions=both),
        )


def _opened(uri: str, options: Mapping[str, str]) -> DeltaTable | None:
    try:
        return DeltaTable(uri, storage_options=dict(options))
    except TableNotFoundError:
        return None


def files(uri: str, options: Mapping[str, str]) -> list[str]:
    """Return the data files of the newest version. The columns `date` and `topic` are in their directory names.

    Raises:
        ArchiveError: there is no table, or another engine has deleted rows without rewriting its files.
    """
    table = _opened(uri, options)
    if table is None:
        raise not_begun(uri, "Delta")
    if "deletionVectors" in (table.protocol().reader_features or ()):
        raise deleted_beside(uri)
    return list(table.file_uris())


def maintain(uri: str, options: Mapping[str, str], settings: Maintain, now: datetime.datetime) -> Maintained:
    """Merge small files, delete old rows and the files that no version needs; safe while others write the table.

    Raises:
        ArchiveError: there is no table, or another process merged or deleted at the same time.
    """
    table = _opened(uri, options)
    if table is None:
        raise not_begun(uri, "Delta")
    try:
        return _maintain(table, settings, now)
    except CommitFailedError as error:
        raise overtaken(uri, error) from error


def _maintain(table: DeltaTable, settings: Maintain, now: datetime.datetime) -> Maintained:
    done = Maintained()
    if (first := first_kept(settings, now)) is not None:
        done.expired = table.delete(f"date < '{first.isoformat()}'")["num_deleted_rows"] or 0
    before = _rows_of_files(table)
    made = table.optimize.compact(target_size=settings.file_mb << 20)
    done.merged, done.into = made["numFilesRemoved"], made["numFilesAdded"]
    after = _rows_of_files(table)
    done.rows = sum(rows for file, rows in before.items() if file not in after)
    # Whole hours: less than one hour is zero, which is only safe for a table that has no writer.
    hours = settings.unused.ms // 3_600_000
    unused = table.vacuum(retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=True)
    done.unused = len(unused)
    table.create_checkpoint()
    table.cleanup_metadata()
    return done


def _rows_of_files(table: DeltaTable) -> dict[str, int]:
    files = pa.table(table.get_add_actions())
    return dict(zip(files["path"].to_pylist(), files["num_records"].to_pylist(), strict=True))
