"""A backfill from a real archive's layout to a real Kafka."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from spark_sinks.job_file import read
from spark_sinks.replay.backfill import backfill
from spark_sinks.replay.run import Replayed
from tests.support.topics import read_committed

START_MS = 1_700_000_000_000
BACKFILL = """
job = "backfill"
name = "TARGET"
source = { archive = "ARCHIVE", topics = ["house"] }
sink = { kafka = "TARGET" }
run = { bootstrap_servers = "BOOTSTRAP", rate = 40 }
"""


async def test_an_archive_goes_to_a_topic_once_by_time_and_in_the_order_of_its_partitions(
    spark: SparkSession, new_topic: Any, bootstrap: str, tmp_path: Path
) -> None:
    target = await new_topic(partitions=1)
    rows = [
        (
            batch,
            "house" if batch < 2 else "other",
            partition,
            offset,
            START_MS + 10 * offset + partition,
            f"k{offset % 3}",
        )
        for batch in range(3)
        for offset in range(30 * batch, 30 * batch + 30)
        for partition in range(2)
    ]
    table = pa.table(
        {
            "segment": [0] * len(rows),
            "batch": [row[0] for row in rows],
            "date": ["2023-11-14"] * len(rows),
            "topic": [row[1] for row in rows],
            "partition": pa.array([row[2] for row in rows], pa.int32()),
            "offset": [row[3] for row in rows],
            "timestamp": pa.array([1_000 * row[4] for row in rows], pa.timestamp("us", "UTC")),
            "key": [row[5].encode() for row in rows],
            "value": [b"%d" % row[3] for row in rows],
            "headers": [[{"key": "unit", "value": b"C"}]] * len(rows),
        }
    )
    pq.write_to_dataset(table, tmp_path / "lake", partition_cols=["segment", "batch", "date", "topic"])
    text = BACKFILL.replace("TARGET", target).replace("ARCHIVE", str(tmp_path / "lake"))
    (tmp_path / "backfill.toml").write_text(text.replace("BOOTSTRAP", bootstrap))
    job: Any = read(tmp_path / "backfill.toml").spec

    async def run(records: int | None) -> Replayed:
        """Until so many records are told of."""
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
    assert [record.timestamp for record in records] == sorted(row[4] for row in rows if row[1] == "house")
    assert [dict(record.headers)["origin.offset"] for record in records] == [b"%d" % (n // 2) for n in range(120)]
    assert all(record.headers[0] == ("unit", b"C") for record in records)
    assert {record.key for record in records} == {b"k0", b"k1", b"k2"}
