"""Backfill from an archive with the real layout to a real Kafka."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_sinks.archive.contract import Table
from spark_sinks.archive.delta import DeltaArchive
from spark_sinks.archive.iceberg import IcebergArchive
from spark_sinks.replay.archive_rows import backfill, selected
from spark_sinks.replay.run import Replayed
from spark_sinks.replay.sources import SourceError
from spark_sinks.run.failures import told
from spark_sinks.run.job_file import read
from spark_sinks.spec.parts import Maintain
from tests.support.object_store import object_store
from tests.support.table_batches import append
from tests.support.topics import read_committed

START_MS = 1_700_000_000_000
DAY = datetime.date(2023, 11, 14)
NOW = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)
BACKFILL = """
job = "backfill"
name = "TARGET"
source = { SOURCE, topics = ["007"] }
sink = { kafka = "TARGET" }
run = { bootstrap_servers = "BOOTSTRAP", rate = 40 }
"""


def batch(number: int) -> pa.Table:
    """Batches of 30 records in each of two partitions, as Spark collects them; the last batch has another topic."""
    places = [(partition, offset) for offset in range(30 * number, 30 * number + 30) for partition in range(2)]
    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
    return pa.table(
        {
            "date": [DAY] * len(places),
            "topic": ["007" if number < 2 else "08"] * len(places),
            "partition": pa.array([partition for partition, _ in places], pa.int32()),
            "offset": [offset for _, offset in places],
            "timestamp": pa.array([1_000 * at(*place) for place in places], pa.timestamp("us", "UTC")),
            "key": [b"k%d" % (offset % 3) for _, offset in places],
            "value": [b"%d" % offset for _, offset in places],
            "headers": pa.array([[{"key": "unit", "value": b"C"}]] * len(places), pa.list_(pair)),
        }
    )


def at(partition: int, offset: int) -> int:
    """Kafka's timestamp, epoch ms."""
    return START_MS + 10 * offset + partition


def parquet(directory: Path) -> str:
    for number in range(3):
        made = batch(number).append_column("segment", [[0] * 60]).append_column("batch", [[number] * 60])
        pq.write_to_dataset(made, directory / "lake", partition_cols=["segment", "batch", "date", "topic"])
    return f'archive = "{directory}/lake"'


def table_of_delta(directory: Path) -> str:
    for number in range(3):
        append(DeltaArchive(str(directory / "lake"), "ours", {}), batch(number), number)
    assert DeltaArchive(str(directory / "lake"), "", {}).maintain(Maintain(), NOW).merged, (
        "files that the table has no more"
    )
    return f'archive = "{directory}/lake", format = "delta"'


def table_of_iceberg(directory: Path) -> str:
    options = {"type": "sql", "uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}/lake"}
    for number in range(3):
        append(IcebergArchive("plant.sensors", "ours", "test", options), batch(number), number)
    assert IcebergArchive("plant.sensors", "", "test", options).maintain(Maintain(), NOW).merged, "as above"
    told = ", ".join(f'{name} = "{value}"' for name, value in options.items())
    return f'archive = "plant.sensors", format = "iceberg", catalog = "test", options = {{ {told} }}'


@pytest.mark.parametrize("made", [parquet, table_of_delta, table_of_iceberg])
async def test_an_archive_goes_to_a_topic_once_by_time_and_in_the_order_of_its_partitions(
    spark: SparkSession, new_topic: Any, bootstrap: str, tmp_path: Path, made: Callable[[Path], str]
) -> None:
    target = await new_topic(partitions=1)
    # The tables' own libraries refuse characters of patterns.
    (place := tmp_path / ("sp ace [1] {a,b} # * ?" if made is parquet else "lakes")).mkdir()
    text = BACKFILL.replace("TARGET", target).replace("SOURCE", made(place))
    (tmp_path / "backfill.toml").write_text(text.replace("BOOTSTRAP", bootstrap))
    job: Any = read(tmp_path / "backfill.toml").spec

    async def run(records: int | None) -> Replayed:
        """Run until this many records have been reported."""
        stopped, told = asyncio.Event(), 0

        def report(done: Replayed) -> None:
            nonlocal told
            told += done.records
            if records is not None and told >= records:
                stopped.set()

        return await backfill(spark, job, report=report, say=print, stopped=stopped)

    assert (await run(40)).records == 40
    assert (await run(None)).records == 80
    records = await read_committed(bootstrap, target, 120)
    assert [record.timestamp for record in records] == [at(n % 2, n // 2) for n in range(120)]
    assert [dict(record.headers)["origin.offset"] for record in records] == [b"%d" % (n // 2) for n in range(120)]
    assert {dict(record.headers)["origin.topic"] for record in records} == {b"007"}
    assert all(record.headers[0] == ("unit", b"C") for record in records)
    assert {record.key for record in records} == {b"k0", b"k1", b"k2"}


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
async def test_a_table_in_an_object_store_is_written_maintained_and_read_back(
    spark: SparkSession, new_topic: Any, bootstrap: str, tmp_path: Path, kind: str
) -> None:
    target = await new_topic(partitions=1)
    async with object_store("plant") as store:
        if kind == "delta":
            name, options = "s3://plant/lake", store.of_delta
            given = f'archive = "{name}", format = "delta"'
            table: Table[Any] = DeltaArchive(name, "ours", options)
        else:
            catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": "s3://plant/lake"}
            name, options = "plant.sensors", catalog | store.of_iceberg
            given = f'archive = "{name}", format = "iceberg", catalog = "test"'
            table = IcebergArchive(name, "ours", "test", options)
        for number in range(3):
            await asyncio.to_thread(append, table, batch(number), number)
        assert (await asyncio.to_thread(table.maintain, Maintain(), NOW)).merged
        told = ", ".join(f'"{key}" = "{value}"' for key, value in options.items())
        given += f", options = {{ {told} }}, since = 2023-11-14T22:13:20.1Z"
        text = BACKFILL.replace("TARGET", target).replace("SOURCE", given).replace("rate = 40", "rate = 1000")
        (tmp_path / "backfill.toml").write_text(text.replace("BOOTSTRAP", bootstrap))
        job: Any = read(tmp_path / "backfill.toml").spec
        done = await backfill(spark, job, report=print, say=print, stopped=asyncio.Event())
    assert done.records == 100
    records = await read_committed(bootstrap, target, 100)
    assert [record.timestamp for record in records] == [at(n % 2, n // 2) for n in range(20, 120)]


async def test_a_large_table_passes_spark_in_pieces(spark: SparkSession, tmp_path: Path) -> None:
    rows, big = 40, bytes(1_000_000)
    one = batch(0).slice(0, rows)
    large = one.set_column(one.column_names.index("value"), "value", [[big] * rows])
    append(DeltaArchive(str(tmp_path / "lake"), "ours", {}), large, 0)
    source = BACKFILL.replace("SOURCE", f'archive = "{tmp_path}/lake", format = "delta"')
    (tmp_path / "backfill.toml").write_text(source)
    job: Any = read(tmp_path / "backfill.toml").spec
    found = await asyncio.to_thread(lambda: selected(spark, job.source, {}).select("value").collect())
    assert [len(row.value) for row in found] == [len(big)] * rows


def test_a_table_of_something_else_is_named_with_what_it_lacks(spark: SparkSession, tmp_path: Path) -> None:
    write_deltalake(tmp_path / "other", batch(0).drop_columns(["headers", "key"]))
    (tmp_path / "backfill.toml").write_text(
        BACKFILL.replace("SOURCE", f'archive = "{tmp_path}/other", format = "delta"')
    )
    job: Any = read(tmp_path / "backfill.toml").spec
    with pytest.raises(SourceError, match="other: not an archive of records: no column headers, key"):
        selected(spark, job.source, {})


def test_a_file_that_is_deleted_meanwhile_is_named(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "backfill.toml").write_text(BACKFILL.replace("SOURCE", table_of_delta(tmp_path)))
    job: Any = read(tmp_path / "backfill.toml").spec
    rows = selected(spark, job.source, {})
    gone = list((tmp_path / "lake").glob("date=*/topic=007/*.parquet"))
    for file in gone:
        file.unlink()
    with pytest.raises(PySparkException) as failed:
        rows.count()
    assert any(file.name in told(failed.value) for file in gone)


def test_a_missing_archive_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    for source in (f'archive = "{tmp_path}/none"', f'archive = "{tmp_path}/none", format = "delta"'):
        (tmp_path / "backfill.toml").write_text(BACKFILL.replace("SOURCE", source))
        job: Any = read(tmp_path / "backfill.toml").spec
        with pytest.raises(SourceError, match=f"{tmp_path}/none: not an archive: "):
            selected(spark, job.source, {})


def test_a_store_without_its_connector_is_named_with_what_is_missing(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "backfill.toml").write_text(BACKFILL.replace("SOURCE", 'archive = "s3://bucket/lake"'))
    job: Any = read(tmp_path / "backfill.toml").spec
    with pytest.raises(SourceError, match=r"s3://bucket/lake: .*S3AFileSystem.*hadoop-aws"):
        selected(spark, job.source, {})
