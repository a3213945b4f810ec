"""What archives of every format have in common; nothing here needs Spark."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Final

import msgspec

from spark_sinks.spec.parts import Maintain

if TYPE_CHECKING:
    import pyarrow as pa

MARK: Final = "_trivium.json"
"""In a checkpoint and in its archive, with the same id: batch numbers begin anew with a new checkpoint, and would be
taken for batches that are there."""
MERGED: Final = "_merged"
"""In a segment of Parquet files that has all its batches, and files of any of them."""


class ArchiveError(RuntimeError):
    """The archive cannot be written; the text says why and what to do."""


def another_checkpoint(archive: str) -> ArchiveError:
    """The archive has batches of another checkpoint."""
    return ArchiveError(
        f"{archive} was written with another checkpoint, whose batches have the same numbers: take that checkpoint "
        f"again, or another archive"
    )


def not_begun(archive: str, kind: str) -> ArchiveError:
    """There is no table to look after."""
    return ArchiveError(f"{archive}: no {kind} table has been begun there")


def deleted_beside(archive: str) -> ArchiveError:
    """Some rows of its files are deleted, by a list that is in another file."""
    return ArchiveError(
        f"{archive}: another engine has deleted rows without writing their files anew: let it compact the table first"
    )


def overtaken(archive: str, error: Exception) -> ArchiveError:
    """Others were quicker, again and again."""
    return ArchiveError(f"{archive}: others changed the table meanwhile, begin again: {error}")


class Maintained(msgspec.Struct, kw_only=True):
    """What was done to an archive; a number of files or of rows each."""

    merged: int = 0  # small files
    into: int = 0  # larger ones, which have their rows
    rows: int = 0  # in these, before and after
    expired: int = 0  # rows, because of their date
    unused: int = 0  # files that were in the archive no more, or never
    left: tuple[str, ...] = ()  # what could not be done, a sentence each


def first_kept(settings: Maintain, now: datetime.datetime) -> datetime.date | None:
    """Records of an earlier `date` are too old; None: none is."""
    return None if settings.keep_days is None else now.date() - datetime.timedelta(days=settings.keep_days)


def nullable(rows: pa.Table) -> pa.Table:
    """The same rows, of columns that may be null: what a later version of a job knows better is no other table."""
    schema = rows.schema
    for number, field in enumerate(schema):
        schema = schema.set(number, field.with_nullable(True))
    return rows.cast(schema)


def check_columns(archive: str, there: pa.Schema, given: pa.Schema) -> None:
    """Raise ArchiveError where a column of a job has another type than in the table, which would be cast."""
    for name in sorted(set(there.names) & set(given.names)):
        old, new = _kind(there.field(name).type), _kind(given.field(name).type)
        if old != new:
            raise ArchiveError(f"{archive}: its column {name} is {old}, and the job's {new}: give it another name")


def _kind(of: pa.DataType) -> str:
    """A type by what it holds, not by how it is kept in memory; a nested one by its own name alone."""
    return str(of).partition("<")[0].removeprefix("large_").removesuffix("_view")
