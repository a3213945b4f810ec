"""Common parts of the archives of every format. Needs no Spark."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

import msgspec

from spark_sinks.spec.parts import Maintain

if TYPE_CHECKING:
    import pyarrow as pa

_Opened = TypeVar("_Opened")
"""The library's own type of a table."""
MARK: Final = "_trivium.json"
"""A file with the same id in a checkpoint and its archive. A new checkpoint numbers batches from 0 again, so its
batches would be mistaken for batches that the archive already has."""
MERGED: Final = "_merged"
"""A file in a segment of Parquet files that is complete and merged."""
WriteFiles = Callable[["pa.Table"], Iterable[Any]]
"""Writes rows to new files of a table, in any process: it can be pickled, and so can the descriptions that it returns.
Readers do not see the files before `Table.commit`."""


class ArchiveError(RuntimeError):
    """The archive cannot be written; the message says why and what to do."""


def another_checkpoint(archive: str) -> ArchiveError:
    """Return the error for an archive with batches of another checkpoint."""
    return ArchiveError(
        f"{archive} was written with another checkpoint, whose batches have the same numbers: use that checkpoint "
        f"again, or another archive"
    )


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


class Table(ABC, Generic[_Opened]):
    """A table that commits a batch's files together with the batch's number, and the single driver that does so.

    A driver that takes the table over fences the earlier ones: the table counts its drivers, and a commit is for one.

    Args:
        name: the table's name, directory or URL; the first batch creates it.
        archive: the id of the job's checkpoint; empty if it is only read or maintained.

    Raises:
        ArchiveError: the table belongs to another checkpoint.
    """

    FORMAT: ClassVar[str]
    CONFLICT: ClassVar[type[Exception]]
    """The library's error for a commit that lost against concurrent writers in every attempt."""

    def __init__(self, name: str, archive: str) -> None:
        self._name = name
        self._archive = archive
        self._driver = 0
        if archive and (table := self._opened()) is not None:
            self._newest(table)
            self._driver = self._drivers(table)

    def newest(self) -> int | None:
        """Return the newest batch in the table; None if there is none. ArchiveError if the table is another's."""
        table = self._opened()
        return None if table is None else self._newest(table)

    def take_over(self, schema: pa.Schema) -> int | None:
        """Refuse the commits of every earlier driver from now on; return the newest batch.

        Raises:
            ArchiveError: see `writer`.
            Exception: `CONFLICT`; nothing has changed.
        """
        self._driver = self._claimed(self._fitting(nullable(schema)))
        return self.newest()

    def writer(self, schema: pa.Schema, number: int) -> WriteFiles | None:
        """Return what writes the files of a batch of this schema; None if the table already has the batch.

        Raises:
            ArchiveError: a column has another type in the table, or the table is not one that can be written.
        """
        table = self._fitting(nullable(schema))
        newest = self._newest(table)
        return None if newest is not None and newest >= number else self._writer(table)

    def commit(self, files: Sequence[Any], number: int) -> None:
        """Add the files of a batch, unless the table already has the batch, completely or not at all.

        Args:
            files: the descriptions that the batch's `WriteFiles` returned.
            number: the batch's number.

        Raises:
            ArchiveError: another driver has taken the table over, or a file cannot be seen from here.
            Exception: `CONFLICT`; no row was added.
        """
        if not files:
            return
        if (lost := self._unseen(files)) is not None:
            raise ArchiveError(
                f"{self._name}: a task has written {lost}, which the driver does not see: an archive must be on a file "
                "system that driver and workers share"
            )
        self._commit(files, number)

    def _is_new(self, table: _Opened, number: int) -> bool:
        """Whether the table lacks a batch; ArchiveError if this driver may not add it."""
        if self._drivers(table) != self._driver:
            raise ArchiveError(f"{self._name}: another driver has taken the archive over: one job, one checkpoint")
        newest = self._newest(table)
        return newest is None or newest < number

    def files(self) -> list[str]:
        """Return the data files of the newest version.

        Raises:
            ArchiveError: there is no table, or another engine has deleted rows without rewriting its files.
        """
        files_left = self._files(self._existing())
        if files_left is None:
            raise ArchiveError(
                f"{self._name}: another engine has deleted rows without rewriting their files: have it compact the "
                "table first"
            )
        return files_left

    def maintain(self, settings: Maintain, now: datetime.datetime) -> Maintained:
        """Merge small files, delete old rows and the files that no version needs; safe while others write the table.

        Raises:
            ArchiveError: there is no table, or it lost against concurrent writers.
        """
        table = self._existing()
        try:
            return self._maintain(table, settings, now)
        except self.CONFLICT as error:
            raise ArchiveError(f"{self._name}: concurrent writers changed the table, try again: {error}") from error

    def _existing(self) -> _Opened:
        table = self._opened()
        if table is None:
            raise ArchiveError(f"{self._name}: there is no {self.FORMAT} table")
        return table

    @abstractmethod
    def _opened(self) -> _Opened | None:
        """Return the table as it is now; None if there is none."""

    @abstractmethod
    def _newest(self, table: _Opened) -> int | None: ...

    @abstractmethod
    def _drivers(self, table: _Opened) -> int:
        """Return how many drivers have taken the table over."""

    @abstractmethod
    def _claimed(self, table: _Opened) -> int:
        """Count one driver more, atomically, and return the number."""

    @abstractmethod
    def _fitting(self, schema: pa.Schema) -> _Opened:
        """Return the table with all columns of a nullable schema; it is created if there is none."""

    @abstractmethod
    def _writer(self, table: _Opened) -> WriteFiles: ...

    @abstractmethod
    def _unseen(self, files: Sequence[Any]) -> str | None:
        """Return the first file that does not exist for this process; None if all do."""

    @abstractmethod
    def _commit(self, files: Sequence[Any], number: int) -> None: ...

    @abstractmethod
    def _files(self, table: _Opened) -> list[str] | None:
        """Return its data files; None if rows are deleted by a list in another file."""

    @abstractmethod
    def _maintain(self, table: _Opened, settings: Maintain, now: datetime.datetime) -> Maintained: ...


def nullable(schema: pa.Schema) -> pa.Schema:
    """Return the schema with nullable columns, so that a later version of a job does not need another table."""
    for number, field in enumerate(schema):
        schema = schema.set(number, field.with_nullable(True))
    return schema


def check_columns(archive: str, there: pa.Schema, given: pa.Schema) -> None:
    """Raise ArchiveError if a column has another type in the table than in the job, since it would be cast."""
    for name in sorted(set(there.names) & set(given.names)):
        old, new = _kind(there.field(name).type), _kind(given.field(name).type)
        if old != new:
            raise ArchiveError(f"{archive}: column {name} is {old} there and {new} in the job: rename the job's column")


def _kind(of: pa.DataType) -> str:
    """Return a type's logical name, without its memory layout; of a nested type only the outer name."""
    return str(of).partition("<")[0].removeprefix("large_").removesuffix("_view")
