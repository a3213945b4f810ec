"""Maintenance of a Parquet archive, without Spark: readable by DuckDB, and at every step of a directory listing."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_sinks.archive import segments
from spark_sinks.archive.contract import MARK, MERGED, ArchiveError
from spark_sinks.spec.parts import Maintain
from spark_sinks.spec.values import Duration

NOW = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)
SEGMENT = 4
ROWS = 5


def begun(directory: Path) -> Path:
    archive = directory / "lake"
    archive.mkdir()
    (archive / MARK).write_text(json.dumps({"archive": "ours", "segment": SEGMENT}))
    return archive


def add(archive: Path, number: int, *leaves: tuple[str, str], more: bool = False) -> None:
    """Write a batch as Spark does: five rows per date and topic."""
    for place, (date, topic) in enumerate(leaves):
        home = archive / f"segment={number // SEGMENT}" / f"batch={number}" / f"date={date}" / f"topic={topic}"
        home.mkdir(parents=True)
        offsets = [(number * 10 + place) * ROWS + row for row in range(ROWS)]
        columns = {"offset": offsets, "value": [b"\xff"] * ROWS, **({"load": [1.5] * ROWS} if more else {})}
        pq.write_table(pa.table(columns), home / f"part-{number}.parquet")


def filled(directory: Path) -> Path:
    """Two complete segments whose batches have different dates and topics, and an incomplete third one."""
    archive = begun(directory)
    for number in range(9):
        days = [("2026-11-20", "a")] if number % 3 else [("2026-11-21", "b"), ("2026-11-20", "a")]
        add(archive, number, *days, ("2026-11-22", f"t{number}"), more=number > 2)
    return archive


def read(archive: Path) -> list[tuple[str, str, int, float | None]]:
    """Read the archive as any reader would."""
    files = f"{archive}/**/*.parquet"
    rows = duckdb.sql(
        f"SELECT date::TEXT, topic, \"offset\", load FROM read_parquet('{files}', hive_partitioning=true, "
        "union_by_name=true) ORDER BY ALL"
    )
    return rows.fetchall()


def files(archive: Path) -> int:
    return len(list(archive.rglob("*.parquet")))


def test_complete_segments_are_merged_and_rows_are_the_same(tmp_path: Path) -> None:
    archive = filled(tmp_path)
    before, there = read(archive), files(archive)
    done = segments.maintain(archive, Maintain(), NOW)
    assert read(archive) == before
    assert done.rows == 8 * ROWS * 2 + 3 * ROWS
    assert files(archive) == there - done.merged + done.into == 2 * (1 + 1 + 4) + 2
    assert [(archive / f"segment={number}" / MERGED).exists() for number in range(3)] == [True, True, False]
    assert segments.maintain(archive, Maintain(), NOW).merged == 0
    assert {path.name for path in tmp_path.iterdir()} == {"lake", "lake.merging"}


def test_files_are_as_large_as_wanted(tmp_path: Path) -> None:
    archive = begun(tmp_path)
    for number in range(SEGMENT + 1):
        add(archive, number, ("2026-11-20", "a"))
        home = next((archive / f"segment={number // SEGMENT}" / f"batch={number}").rglob("*.parquet"))
        pq.write_table(pa.table({"offset": [number], "value": [os.urandom(700 << 10)]}), home)
    segments.maintain(archive, Maintain(file_mb=1), NOW)
    sizes = [path.stat().st_size for path in (archive / "segment=0").rglob("*.parquet")]
    assert len(sizes) in {1, 2}
    assert sum(sizes) > SEGMENT * (700 << 10)


class Walker:
    """List the files below a directory as readers do, one directory at a time; a missing directory has none."""

    def __init__(self, old: Path, new: Path, after: int, *, backwards: bool) -> None:
        """The two are exchanged before directory number `after` is listed."""
        self.files: list[Path] = []
        self.exchanged = False
        self._left = after
        self._places = old, new
        self._backwards = backwards
        self.walk(old)

    def walk(self, place: Path) -> None:
        if self._left == 0:
            segments.exchange(*self._places)
            self.exchanged = True
        self._left -= 1
        try:
            entries = sorted(os.scandir(place), key=lambda entry: entry.name, reverse=self._backwards)
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.is_dir():
                self.walk(Path(entry.path))
            elif entry.name.endswith(".parquet"):
                self.files.append(Path(entry.path))


@pytest.mark.parametrize("backwards", [False, True])
def test_a_listing_during_an_exchange_has_every_row_or_misses_a_file(tmp_path: Path, *, backwards: bool) -> None:
    merged, other = filled(tmp_path) / "segment=0", tmp_path / "other"
    segments.maintain(merged.parent, Maintain(), NOW)
    other.mkdir()
    old = filled(other) / "segment=0"
    expected = sorted(row for file in old.rglob("*.parquet") for row in pq.read_table(file)["offset"].to_pylist())
    outcomes = []
    while (walker := Walker(old, merged, len(outcomes), backwards=backwards)).exchanged:
        try:
            rows = [row for file in walker.files for row in pq.read_table(file)["offset"].to_pylist()]
        except FileNotFoundError:
            outcomes.append("a file is missed")
        else:
            assert sorted(rows) == expected, f"exchanged before directory {len(outcomes)} was listed"
            outcomes.append("every row")
        segments.exchange(old, merged)
    assert {"a file is missed", "every row"} == set(outcomes)


def test_dates_are_deleted_after_their_retention(tmp_path: Path) -> None:
    archive = filled(tmp_path)
    kept = [row for row in read(archive) if row[0] >= "2026-11-21"]
    done = segments.maintain(archive, Maintain(keep_days=2), NOW)
    assert done.expired == 9 * ROWS
    assert read(archive) == kept
    assert all((archive / "segment=2" / "batch=8").iterdir()), "a batch that is repeated is known by its directory"


def test_old_leftovers_of_killed_jobs_are_deleted(tmp_path: Path) -> None:
    archive = begun(tmp_path)
    for name in ("lake.staging", "lake.merging"):
        left = tmp_path / name / "dead" / "7"
        left.mkdir(parents=True)
        (left / "part.parquet").write_bytes(b"half")
    assert segments.maintain(archive, Maintain(), datetime.datetime.now(datetime.UTC)).unused == 0
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=2)
    assert segments.maintain(archive, Maintain(unused=Duration("1h")), later).unused == 2
    assert not list(tmp_path.rglob("part.parquet"))


def test_a_vanishing_file_belongs_to_a_concurrent_run(tmp_path: Path) -> None:
    archive = filled(tmp_path)
    before = read(archive)
    at_work = tmp_path / "lake.staging" / "now" / "7"
    at_work.mkdir(parents=True)
    (at_work / "part.parquet").write_bytes(b"half")
    (at_work / "gone").symlink_to(at_work / "nothing")  # like a file that disappears after it was listed
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=2)
    assert segments.maintain(archive, Maintain(unused=Duration("1h")), later).unused == 0
    assert (at_work / "part.parquet").exists()
    assert read(archive) == before


def test_files_whose_columns_differ_in_type_are_kept_and_reported(tmp_path: Path) -> None:
    archive = filled(tmp_path)
    home = next((archive / "segment=0" / "batch=3").rglob("topic=a/*.parquet"))
    pq.write_table(pa.table({"offset": ["much"]}), home)
    there = files(archive)
    done = segments.maintain(archive, Maintain(), NOW)
    assert "segment=0 was not merged, because columns of its files differ: " in done.left[0]
    assert done.merged > 0
    assert files(archive) == there - done.merged + done.into
    assert not (archive / "segment=0" / MERGED).exists()


def test_a_directory_that_is_no_archive_is_left_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="there is no archive of Parquet files"):
        segments.maintain(tmp_path, Maintain(), NOW)
