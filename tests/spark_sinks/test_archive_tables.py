"""Archives as tables, without Spark: idempotent batches, concurrent writers, and maintenance."""

from __future__ import annotations

import contextlib
import datetime
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog import load_catalog

from spark_sinks.archive.contract import ArchiveError, Maintained
from spark_sinks.archive.delta import DeltaArchive
from spark_sinks.archive.iceberg import IcebergArchive
from spark_sinks.spec.parts import Maintain
from spark_sinks.spec.values import Duration
from tests.support.table_batches import append

ROOT = Path(__file__).parents[2]
DAY = datetime.date(2026, 11, 20)
DATES = [datetime.date.min, datetime.date(1969, 12, 31), DAY, datetime.date.max]
NOW = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)
PER_BATCH = 6
Row = tuple[datetime.date, str, float | None]


def batch(number: int, *, day: datetime.date = DAY, **more: Any) -> pa.Table:
    """Rows as Spark collects them: six rows of one topic and two dates."""
    offsets = range(number * PER_BATCH, (number + 1) * PER_BATCH)
    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
    columns = {
        "date": pa.array([day + datetime.timedelta(days=offset % 2) for offset in offsets]),
        "topic": pa.array(["sensors"] * PER_BATCH),
        "partition": pa.array([0] * PER_BATCH, pa.int32()),
        "offset": pa.array(offsets, pa.int64()),
        "timestamp": pa.array([NOW] * PER_BATCH, pa.timestamp("us", "UTC")),
        "value": pa.array([b"\x00\xff"] * PER_BATCH),
        "headers": pa.array([[{"key": "unit", "value": b"C"}], None] * 3, pa.list_(pair)),
        **{name: pa.array(values) for name, values in more.items()},
    }
    return pa.table(columns)


class Lake:
    """A table of one format, and how other programs read it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def archive(self, checkpoint: str = "ours") -> DeltaArchive | IcebergArchive:
        raise NotImplementedError

    def read(self) -> pa.Table:
        raise NotImplementedError

    def maintain(self, settings: Maintain, now: datetime.datetime = NOW) -> Maintained:
        raise NotImplementedError

    def offsets(self) -> list[int]:
        return sorted(self.read()["offset"].to_pylist())

    def data_files(self) -> list[Path]:
        return [path for path in self.directory.rglob("*.parquet") if "_delta_log" not in path.parts]


class Delta(Lake):
    def archive(self, checkpoint: str = "ours") -> DeltaArchive:
        return DeltaArchive(str(self.directory / "lake"), checkpoint, {})

    def read(self) -> pa.Table:
        return pa.table(DeltaTable(self.directory / "lake").to_pyarrow_table())

    def maintain(self, settings: Maintain, now: datetime.datetime = NOW) -> Maintained:
        return DeltaArchive(str(self.directory / "lake"), "", {}).maintain(settings, now)


class Iceberg(Lake):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._options = {
            "type": "sql", "uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}/lake",
        }  # fmt: skip

    def archive(self, checkpoint: str = "ours") -> IcebergArchive:
        return IcebergArchive("plant.sensors", checkpoint, "test", self._options)

    def read(self) -> pa.Table:
        return load_catalog("test", **self._options).load_table("plant.sensors").scan().to_arrow()

    def maintain(self, settings: Maintain, now: datetime.datetime = NOW) -> Maintained:
        return IcebergArchive("plant.sensors", "", "test", self._options).maintain(settings, now)


FORMATS = {"Delta": Delta, "Iceberg": Iceberg}


@pytest.fixture(params=FORMATS)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return FORMATS[request.param](tmp_path)


def up_to(batches: int) -> list[int]:
    return list(range(batches * PER_BATCH))


def test_a_repeated_batch_is_in_the_table_once(lake: Lake) -> None:
    archive = lake.archive()
    assert archive.newest() is None
    for number in (0, 0, 1):
        append(archive, batch(number), number)
    again = lake.archive()  # as after a kill
    assert again.newest() == 1
    append(again, batch(1), 1)
    append(again, batch(0), 0)
    append(again, batch(2), 2)
    assert lake.offsets() == up_to(3)
    row = lake.read().filter(pa.compute.field("offset") == 0).to_pylist()[0]
    assert (row["date"], row["timestamp"], row["value"]) == (DAY, NOW, b"\x00\xff")
    assert row["headers"] == [{"key": "unit", "value": b"C"}]


def test_only_one_of_several_processes_writes_a_batch(lake: Lake) -> None:
    append(lake.archive(), batch(0), 0)
    start = threading.Barrier(4)
    refused: list[Exception] = []

    def write() -> None:
        archive = lake.archive()
        for number in (1, 2):
            start.wait(60)
            try:
                append(archive, batch(number), number)
            except Exception as error:
                refused.append(error)  # the job would end here, and check again after a restart

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert lake.offsets() == up_to(3), refused


def test_another_checkpoint_is_refused(lake: Lake) -> None:
    append(lake.archive(), batch(0), 0)
    with pytest.raises(ArchiveError, match="was written with another checkpoint"):
        lake.archive("theirs")


def test_a_driver_that_takes_over_fences_the_earlier_ones(lake: Lake) -> None:
    former = lake.archive()
    schema = batch(0).schema
    assert lake.archive().take_over(schema) is None, "no batch yet, nor a table"
    with pytest.raises(ArchiveError, match="another driver has taken the archive over"):
        append(former, batch(0), 0)
    driver = lake.archive()
    append(driver, batch(0), 0)
    late = driver.writer(schema, 1)
    assert late is not None
    files = list(late(batch(1)))
    successor = lake.archive()
    assert successor.take_over(schema) == 0
    with pytest.raises(ArchiveError, match="another driver has taken the archive over"):
        driver.commit(files, 1)
    assert lake.offsets() == up_to(1)
    append(successor, batch(1).slice(0, 2), 1)
    append(lake.archive(), batch(2), 2)
    assert lake.offsets() == [*up_to(1), 6, 7, *range(12, 18)]


def test_a_batch_is_of_one_driver_when_another_takes_over_at_the_same_moment(lake: Lake) -> None:
    append(lake.archive(), batch(0), 0)
    expected = up_to(1)
    for number in range(1, 9):
        former, start = lake.archive(), threading.Barrier(2)

        def commit(archive: Any = former, number: int = number, start: threading.Barrier = start) -> None:
            start.wait(60)
            # It is either refused or in time: the table says which.
            with contextlib.suppress(ArchiveError, archive.CONFLICT):
                append(archive, batch(number), number)

        thread = threading.Thread(target=commit)
        thread.start()
        successor = lake.archive()
        start.wait(60)
        newest = taken_over(successor)
        if newest is not None and newest < number:
            append(successor, batch(number).slice(0, 2), number)
        thread.join()
        expected += [number * PER_BATCH + place for place in range(PER_BATCH if newest == number else 2)]
        assert lake.offsets() == expected


def taken_over(archive: DeltaArchive | IcebergArchive) -> int | None:
    """Take the table over; again if a commit of the former driver was faster, as a restarted job does."""
    while True:
        try:
            return archive.take_over(batch(0).schema)
        except archive.CONFLICT:
            continue


def test_files_that_the_driver_does_not_see_are_not_committed(lake: Lake) -> None:
    archive = lake.archive()
    append(archive, batch(0), 0)
    write = archive.writer(batch(1).schema, 1)
    assert write is not None
    before = set(lake.data_files())
    files = list(write(batch(1)))
    for path in set(lake.data_files()) - before:
        path.unlink()  # as if a worker had written it to a disk of its own
    with pytest.raises(ArchiveError, match="must be on a file system that driver and workers share"):
        archive.commit(files, 1)
    assert lake.offsets() == up_to(1)


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(DATES), st.sampled_from(["a", "b.c"]), st.none() | st.floats(allow_nan=False)),
        min_size=1, max_size=30,
    )
)  # fmt: skip
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rows_are_read_as_they_were_written(lake: Lake, rows: list[Row]) -> None:
    archive = lake.archive()
    newest = archive.newest()
    number = 0 if newest is None else newest + 1
    given = pa.table(
        {
            "date": [date for date, *_ in rows],
            "topic": [topic for _, topic, _ in rows],
            "offset": range(number * 100, number * 100 + len(rows)),
            "timestamp": pa.array([NOW] * len(rows), pa.timestamp("us", "UTC")),
            "load": pa.array([load for *_, load in rows], pa.float64()),
        }
    )
    append(archive, given, number)
    found = lake.read().sort_by("offset").slice(number and len(lake.offsets()) - len(rows))
    for name in given.column_names:
        assert found[name].to_pylist() == given[name].to_pylist(), name


def test_a_reader_of_a_delta_table_skips_files_by_their_ranges(tmp_path: Path) -> None:
    lake = Delta(tmp_path)
    for number in range(3):
        append(lake.archive(), batch(number, load=[None, 1.5, -2.0, None, None, 7.0]), number)
    files = pa.table(DeltaTable(tmp_path / "lake").get_add_actions(flatten=True)).to_pylist()
    for file in files:
        rows = pq.read_table(tmp_path / "lake" / file["path"], partitioning=None)
        assert file["num_records"] == rows.num_rows
        for name in ("offset", "load", "timestamp"):
            least_and_most = pa.compute.min_max(rows[name]).as_py()
            assert {"min": file[f"min.{name}"], "max": file[f"max.{name}"]} == least_and_most
            assert file[f"null_count.{name}"] == rows[name].null_count
    found = DeltaTable(tmp_path / "lake").to_pyarrow_dataset()
    assert len(list(found.get_fragments(filter=pa.compute.field("offset") == 12))) == 1


@pytest.mark.parametrize(
    ("partition_by", "rule", "refusal"),
    [(["partition"], None, "is partitioned by partition"), (["date"], {"low": "offset >= 0"}, "has constraints, or")],
)
def test_a_delta_table_with_other_partitions_or_with_rules_is_refused(
    tmp_path: Path, partition_by: list[str], rule: dict[str, str] | None, refusal: str
) -> None:
    fields = Schema.from_arrow(batch(0).schema)
    table = DeltaTable.create(tmp_path / "lake", fields, partition_by=partition_by)
    if rule is not None:
        table.alter.add_constraint(rule)
    with pytest.raises(ArchiveError, match=refusal):
        append(Delta(tmp_path).archive(), batch(0), 0)


def test_a_delta_table_without_partitions_is_written(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path / "lake", Schema.from_arrow(batch(0).schema))
    append(Delta(tmp_path).archive(), batch(0), 0)
    assert Delta(tmp_path).offsets() == up_to(1)
    assert Delta(tmp_path).read()["topic"].to_pylist() == ["sensors"] * PER_BATCH


def test_a_new_column_is_null_in_old_rows_and_a_changed_type_is_refused(lake: Lake) -> None:
    archive = lake.archive()
    append(archive, batch(0), 0)
    append(archive, batch(1, load=[1.5] * PER_BATCH), 1)
    append(archive, batch(2), 2)
    assert [row["load"] for row in lake.read().sort_by("offset").to_pylist()] == [None] * 6 + [1.5] * 6 + [None] * 6
    with pytest.raises(ArchiveError, match="column load is double there and string"):
        append(archive, batch(3, load=["much"] * PER_BATCH), 3)
    assert lake.offsets() == up_to(3)


def test_merging_small_files_beside_a_writer_keeps_the_batch_numbers(lake: Lake) -> None:
    archive = lake.archive()
    for number in range(5):
        append(archive, batch(number), number)
    before = lake.read().sort_by("offset")
    assert len(lake.data_files()) == 10  # two dates
    failed: list[Exception] = []

    def write() -> None:
        try:
            for number in range(5, 12):
                append(archive, batch(number), number)
        except Exception as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    first = lake.maintain(Maintain())
    writer.join()
    assert not failed
    assert lake.read().sort_by("offset").slice(0, before.num_rows).equals(before)
    assert lake.offsets() == up_to(12)
    second = lake.maintain(Maintain())
    assert second.merged >= second.into == 2
    assert second.rows == 12 * PER_BATCH
    assert (first.unused, second.unused) == (0, 0), "files of a day ago at most are kept for readers"
    append(lake.archive(), batch(11), 11)
    assert lake.offsets() == up_to(12)


def test_only_files_that_no_reader_needs_are_deleted(lake: Lake) -> None:
    archive = lake.archive()
    for number in range(3):
        append(archive, batch(number), number)
    home = lake.data_files()[0]
    orphan = home.with_name("00000-dead-batch.parquet")
    orphan.write_bytes(home.read_bytes())
    done = lake.maintain(Maintain(unused=Duration("1h")), NOW + datetime.timedelta(days=3650))
    assert done.unused >= 7
    assert len(lake.data_files()) == 2
    assert lake.offsets() == up_to(3)
    append(lake.archive(), batch(2), 2)
    append(lake.archive(), batch(3), 3)
    assert lake.offsets() == up_to(4)


def test_records_older_than_the_retention_are_deleted(lake: Lake) -> None:
    archive = lake.archive()
    append(archive, batch(0), 0)  # dates: 20th and 21st
    append(archive, batch(1, day=datetime.date(2026, 11, 22)), 1)
    done = lake.maintain(Maintain(keep_days=2))
    assert done.expired == 3
    assert lake.offsets() == [1, 3, 5, *range(6, 12)]
    append(lake.archive(), batch(1), 1)
    assert lake.offsets() == [1, 3, 5, *range(6, 12)]


def test_a_missing_table_is_not_maintained(lake: Lake) -> None:
    with pytest.raises(ArchiveError, match="there is no"):
        lake.maintain(Maintain())


JOB = """
import sys
from pathlib import Path
from tests.spark_sinks.test_archive_tables import Delta, batch
from tests.support.table_batches import append

lake, commit = Delta(Path(sys.argv[1])), Path(sys.argv[1], "commit")
archive = lake.archive()
number = int(commit.read_text()) + 1 if commit.exists() else 0
while True:
    append(archive, batch(number), number)
    print(number, flush=True)
    commit.with_suffix(".new").write_text(str(number))
    commit.with_suffix(".new").rename(commit)
    number += 1
"""


def test_killed_between_its_table_and_its_checkpoint_or_anywhere(tmp_path: Path) -> None:
    lake, last = Delta(tmp_path), -1
    for _ in range(2):
        argv = [sys.executable, "-c", JOB, str(tmp_path)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as job:
            assert job.stdout is not None
            numbers = [int(job.stdout.readline()) for _ in range(3)]
            job.kill()
            numbers += [int(line) for line in job.stdout if line.endswith("\n")]
        assert numbers[0] <= last + 1
        last = numbers[-1]
        assert lake.offsets() in (up_to(last + 1), up_to(last + 2))
