"""Common parts of the archives of every format. Needs no Spark."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Final

import msgspec

from spark_sinks.spec.parts import Maintain

if TYPE_CHECKING:
    import pyarrow as pa

MARK: Final = "_trivium.json"
"""A file with the same id in a checkpoint and its archive. A new checkpoint numbers batches from 0 again, so its
batches would be mistaken for batches that the archive already has."""
MERGED: Final = "_merged"
"""A file in a segment of Parquet files that is complete and merged."""


class ArchiveError(RuntimeError):
    """The archive cannot be written; the message says why and what to do."""


def another_checkpoint(archive: str) -> ArchiveError:
    """Return the error for an archive with batches of another checkpoint."""
    return ArchiveError(
        f"{archive} was written with another checkpoint, whose batches have the same numbers: use that checkpoint "
        f"again, or another archive"
    )


def not_begun(archive: str, kind: str) -> ArchiveError:
    """Return the error for a table that does not exist yet."""
    return ArchiveError(f"{archive}: there is no {kind} table")


def deleted_beside(archive: str) -> ArchiveError:
    """Return the error for rows that are deleted by a list in another file."""
    return ArchiveError(
        f"{archive}: another engine has deleted rows without rewriting their files: have it compact the table first"
    )


def overtaken(archive: str, error: Exception) -> ArchiveError:
    """Return the error for a commit that lost against concurrent writers in every attempt."""
    return ArchiveError(f"{archive}: concurrent writers changed the table, try again: {error}")


class Maintained(msgspec.Struct, kw_only=True):
    """The work done on an archive, in numbers of files or rows."""

    merged: int = 0  # small files that were merged
    into: int = 0  # new files that replace them
    rows: int = 0  # rows in the merged files
    expired: int = 0  # rows deleted because of their date
    unused: int = 0  # deleted files that were not part of the archive
    left: tuple[str, ...] = ()  # what could not be done, one sentence each


def first_kept(settings: Maintain, now: datetime.datetime) -> datetime.date | None:
    """Return the earliest `date` to keep; None if all records are kept."""
    return None if settings.keep_days is None else now.date() - datetime.timedelta(days=settings.keep_days)


def nullable(rows: pa.Table) -> pa.Table:
    """Return the rows with nullable columns, so that a later version of a job does not need another table."""
    schema = rows.schema
    for number, field in enumerate(schema):
        schema = schema.set(number, field.with_nullable(True))
    return rows.cast(schema)


def check_columns(archive: str, there: pa.Schema, given: pa.Schema) -> None:
    """Raise ArchiveError if a column has another type in the table than in the job, since it would be cast."""
    for name in sorted(set(there.names) & set(given.names)):
        old, new = _kind(there.field(name).type), _kind(given.field(name).type)
        if old != new:
            raise ArchiveError(f"{archive}: column {name} is {old} there and {new} in the job: rename the job's column")


def _kind(of: pa.DataType) -> str:
    """Return a type's logical name, without its memory layout; of a nested type only the outer name."""
    return str(of).partition("<")[0].removeprefix("large_").removesuffix("_view")
