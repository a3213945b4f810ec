"""Looks after an archive of Parquet files beside the job that writes it: merges, forgets, clears away. Needs no Spark.

A segment that has all its batches is written anew beside the archive, in larger files, and changes places with the old
one in a single step of the file system: at every moment each record is in the archive's files once, also when this is
killed. A directory of the new segment is one that the old one has, too (`batch=` is the first batch with this date and
topic), so whoever lists directories just then and opens their files afterwards has all rows, or misses a file, which is
an error: never a part of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from spark_sinks.archive.contract import MARK, MERGED, ArchiveError, Maintained, first_kept
from spark_sinks.spec.parts import Maintain

ROW_GROUP_BYTES: Final = 32 << 20  # in memory, of which a file's row groups are made
READ_ROWS: Final = 4_096  # at once: a record may have a MiB
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def maintain(archive: Path, settings: Maintain, now: datetime.datetime) -> Maintained:
    """Merge what is complete, delete what is too old, clear away what dead jobs left.

    Args:
        archive: its directory.
        settings: what to do.
        now: in UTC.

    Raises:
        ArchiveError: there is no archive, or directories cannot change places.
    """
    if not (archive / MARK).is_file():
        raise ArchiveError(f"{archive}: no archive of Parquet files has been begun there")
    done = Maintained()
    places = archive.with_name(f"{archive.name}.merging")
    place = places / uuid.uuid4().hex
    place.mkdir(parents=True)
    try:
        if (first := first_kept(settings, now)) is not None:
            done.expired = _forget(archive, place, first.isoformat())
        for segment in _complete(archive):
            _merge(segment, place / segment.name, settings.file_mb << 20, done)
    finally:
        shutil.rmtree(place)
    for left in (*places.iterdir(), *_listed(archive.with_name(f"{archive.name}.staging"))):
        # What goes away meanwhile is another's: of a job that writes, or of one that clears away as it starts.
        with contextlib.suppress(FileNotFoundError):
            done.unused += _cleared(left, now.timestamp() - settings.unused.ms / 1_000)
    return done


def exchange(one: Path, other: Path) -> None:
    """Let two directories change places in one step; ArchiveError where the system or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise ArchiveError("Parquet files are merged on Linux only, where two directories change places in one step")
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        why = os.strerror(ctypes.get_errno())
        raise ArchiveError(f"{one}: its file system cannot exchange two directories in one step ({why})")


def _listed(directory: Path) -> Sequence[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _cleared(left: Path, before: float) -> int:
    """Delete a directory in which nothing was changed since; how many files. FileNotFoundError: somebody is at work."""
    below = list(left.rglob("*"))
    if max(path.stat().st_mtime for path in (left, *below)) >= before:
        return 0
    files = sum(path.is_file() for path in below)
    shutil.rmtree(left)
    return files


def _numbered(directory: Path, name: str) -> list[Path]:
    return sorted(directory.glob(f"{name}=*"), key=lambda path: int(path.name.partition("=")[2]))


def _complete(archive: Path) -> Iterator[Path]:
    """Segments that no batch will be added to: there is a later one."""
    for segment in _numbered(archive, "segment")[:-1]:
        if not (segment / MERGED).exists():
            yield segment


def _forget(archive: Path, place: Path, first: str) -> int:
    """Delete the directories of dates before `first`; how many rows they had. A batch's own directory stays."""
    rows = 0
    dated = list(archive.glob("segment=*/batch=*/date=*"))
    for number, old in enumerate(path for path in dated if path.name.removeprefix("date=") < first):
        rows += sum(pq.read_metadata(file).num_rows for file in old.rglob("*.parquet"))
        old.rename(place / str(number))
    for gone in place.iterdir():
        shutil.rmtree(gone)
    return rows


def _merge(segment: Path, new: Path, file_bytes: int, done: Maintained) -> None:
    leaves: dict[tuple[str, str], list[Path]] = {}
    homes: dict[tuple[str, str], Path] = {}
    for batch in _numbered(segment, "batch"):
        for leaf in batch.glob("date=*/topic=*"):
            name = leaf.parent.name, leaf.name
            leaves.setdefault(name, []).extend(sorted(leaf.glob("*.parquet")))
            homes.setdefault(name, leaf.relative_to(segment))
    new.mkdir()
    before = after = into = 0
    for name, files in leaves.items():
        try:
            schema = pa.unify_schemas([pq.read_schema(file).remove_metadata() for file in files])
        except pa.ArrowException as error:
            done.left += (f"{segment} keeps its files, whose columns differ: {error}",)
            shutil.rmtree(new)
            return
        home = new / homes[name]
        home.mkdir(parents=True)
        before += sum(pq.read_metadata(file).num_rows for file in files)
        for written in _written(files, schema, home, file_bytes):
            after += written
            into += 1
    if after != before:
        raise ArchiveError(f"{segment}: its files have {before:,} rows, and the merged ones {after:,}; nothing changed")
    (new / MERGED).touch()
    for path in (new, *new.rglob("*")):
        _to_disk(path)
    exchange(segment, new)
    shutil.rmtree(new)  # what the segment was
    done.merged += sum(len(files) for files in leaves.values())
    done.into += into
    done.rows += after


def _written(files: Sequence[Path], schema: pa.Schema, home: Path, file_bytes: int) -> Iterator[int]:
    """Write the rows of `files` into new ones of about `file_bytes`; how many each has."""
    groups = _row_groups(files, schema)
    group = next(groups, None)
    number = 0
    while group is not None:
        rows = 0
        with (
            (home / f"part-{number:05}.parquet").open("wb") as target,
            pq.ParquetWriter(target, schema, compression="zstd") as writer,
        ):
            while group is not None and target.tell() < file_bytes:
                writer.write_table(group)
                rows += group.num_rows
                group = next(groups, None)
        number += 1
        yield rows


def _row_groups(files: Sequence[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    held: list[pa.Table] = []
    held_bytes = 0
    for file in files:
        with pq.ParquetFile(file) as source:
            for batch in source.iter_batches(batch_size=READ_ROWS):
                held.append(_as(pa.Table.from_batches([batch]), schema))
                held_bytes += batch.nbytes
                if held_bytes >= ROW_GROUP_BYTES:
                    yield pa.concat_tables(held)
                    held, held_bytes = [], 0
    if held:
        yield pa.concat_tables(held)


def _as(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """With the columns of `schema`; those that the table has not are null."""
    for field in schema:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(schema.names).cast(schema)


def _to_disk(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
