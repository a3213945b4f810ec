"""A Delta table with every record of a topic exactly once, written by delta-rs without Spark.

A commit adds a batch's files and, atomically, the batch's number as the version of two Delta application
transactions. The first has this archive's checkpoint in its name, and identifies a repeated batch. The second has the
same name in every archive, and identifies a table of another checkpoint. delta-rs refuses the second of two concurrent
commits with the same application.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from spark_sinks.archive.contract import Maintained, Table, another_checkpoint, check_columns, first_kept, nullable
from spark_sinks.spec.parts import Maintain

APPLICATION: Final = "trivium-archive"


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

    def append(self, rows: pa.Table, number: int) -> None:
        """See `Table`. The conflict is another process that has just added a batch of this archive."""
        rows, table = nullable(rows), self._opened()
        if table is not None:
            newest = self._newest(table)
            if newest is not None and newest >= number:
                return
            check_columns(self._name, pa.schema(table.schema().to_arrow()), rows.schema)
        both = [Transaction(APPLICATION, number), Transaction(self._application, number)]
        write_deltalake(
            self._name if table is None else table,
            rows,
            mode="append",
            partition_by=["date", "topic"] if table is None else None,
            schema_mode=None if table is None else "merge",
            storage_options=self._options,
            commit_properties=CommitProperties(app_transactions=both),
        )

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


def _rows_of_files(table: DeltaTable) -> dict[str, int]:
    files = pa.table(table.get_add_actions())
    return dict(zip(files["path"].to_pylist(), files["num_records"].to_pylist(), strict=True))
