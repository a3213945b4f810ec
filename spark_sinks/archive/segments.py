"""Maintains an archive of Parquet files while its job writes it: merges files, deletes old rows. Needs no Spark.

A complete segment is rewritten outside the archive in larger files, and atomically exchanged with the old one: at any
time each record is in the archive once, even if this process is killed. Every directory of the new segment exists in
the old one too (`batch=` is the first batch with this date and topic). So a reader that lists directories just then and
opens their files later reads all rows, or misses a file, which is an error; it never reads a part of them.
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

ROW_GROUP_BYTES: Final = 32 << 20  # size in memory of a row group to write
READ_ROWS: Final = 4_096  # per read: one record may have 1 MiB
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def maintain(archive: Path, settings: Maintain, now: datetime.datetime) -> Maintained:
    """Merge complete segments, delete old rows, and remove what dead jobs left.

    Args:
        archive: the archive's directory.
        settings: file size, dates to keep, and age of unused files.
        now: in UTC.

    Raises:
        ArchiveError: there is no archive, or the file system cannot exchange directories.
    """
    if not (archive / MARK).is_file():
        raise ArchiveError(f"{archive}: there is no archive of Parquet files")
    done = Maintained()
    places = archive.with_name(f"{archive.name}.merging")
    directory = places / uuid.uuid4().hex
    directory.mkdir(parents=True)
    try:
        if (first := first_kept(settings, now)) is not None:
            done.expired = _forget(archive, directory, first.isoformat())
        for segment in _complete(archive):
            _merge(segment, directory / segment.name, settings.file_mb << 20, done)
    finally:
        shutil.rmtree(directory)
    for left in (*places.iterdir(), *archive.with_name(f"{archive.name}.staging").glob("*")):
        # A path that disappears meanwhile belongs to a running job, or was removed by one that starts.
        with contextlib.suppress(FileNotFoundError):
            done.unused += _cleared(left, now.timestamp() - settings.unused.ms / 1_000)
    return done


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories atomically; ArchiveError if the system or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise ArchiveError("merging Parquet files needs Linux, which can exchange two directories atomically")
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        why = os.strerror(ctypes.get_errno())
        raise ArchiveError(f"{one}: its file system cannot exchange two directories atomically ({why})")


def _cleared(left: Path, before: float) -> int:
    """Delete a directory that has not changed since `before`; return its files. FileNotFoundError if it is in use."""
    below = list(left.rglob("*"))
    if max(path.stat().st_mtime for path in (left, *below)) >= before:
        return 0
    files = sum(path.is_file() for path in below)
    shutil.rmtree(left)
    return files


def _numbered(directory: Path, name: str) -> list[Path]:
    return sorted(directory.glob(f"{name}=*"), key=lambda path: int(path.name.partition("=")[2]))


def _complete(archive: Path) -> Iterator[Path]:
    """Yield the unmerged segments that get no more batches, because a later one exists."""
    for segment in _numbered(archive, "segment")[:-1]:
        if not (segment / MERGED).exists():
            yield segment


def _forget(archive: Path, directory: Path, first: str) -> int:
    """Delete the directories of dates before `first`; return their rows. The batch directories stay."""
    rows = 0
    dated = list(archive.glob("segment=*/batch=*/date=*"))
    for number, old in enumerate(path for path in dated if path.name.removeprefix("date=") < first):
        rows += sum(pq.read_metadata(file).num_rows for file in old.rglob("*.parquet"))
        old.rename(directory / str(number))
    for gone in directory.iterdir():
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
            done.left += (f"{segment} was not merged, because columns of its files differ: {error}",)
            shutil.rmtree(new)
            return
        home = new / homes[name]
        home.mkdir(parents=True)
        before += sum(pq.read_metadata(file).num_rows for file in files)
        for written in _written(files, schema, home, file_bytes):
            after += written
            into += 1
    if after != before:
        raise ArchiveError(f"{segment}: its files have {before:,} rows, but the merged ones {after:,}; not changed")
    (new / MERGED).touch()
    for path in (new, *new.rglob("*")):
        _to_disk(path)
    exchange(segment, new)
    shutil.rmtree(new)  # now the old segment
    done.merged += sum(len(files) for files in leaves.values())
    done.into += into
    done.rows += after


def _written(files: Sequence[Path], schema: pa.Schema, home: Path, file_bytes: int) -> Iterator[int]:
    """Write the rows of `files` into new ones of about `file_bytes`; yield the number of rows of each."""
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
    """Yield the rows with the columns of `schema`; missing ones are null."""
    held, held_bytes = [schema.empty_table()], 0
    for file in files:
        with pq.ParquetFile(file) as source:
            for batch in source.iter_batches(batch_size=READ_ROWS):
                held.append(pa.Table.from_batches([batch]))
                held_bytes += batch.nbytes
                if held_bytes >= ROW_GROUP_BYTES:
                    yield pa.concat_tables(held, promote_options="default")
                    held, held_bytes = [schema.empty_table()], 0
    if len(held) > 1:
        yield pa.concat_tables(held, promote_options="default")


def _to_disk(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
