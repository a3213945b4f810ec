"""Archives of large records: a table's batch never has to fit into Java's memory, nor into that of the driver."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from loadtest.spark.job import Job
from loadtest.spark.lakes import FORMATS
from loadtest.spark.readings import make_topics

TABLES = ("delta", "iceberg")
RECORDS, BYTES = 2_000, 200_000
FILE = """
job = "archive"
source = {{ topics = ["{topic}"], decode = "none" }}
sink = {{ {sink} }}
run = {{ checkpoint = "{checkpoint}"{settings} }}
"""


@pytest.mark.spark
@pytest.mark.timeout(400)
async def test_a_batch_larger_than_the_heap_is_written(bootstrap: str, tmp_path: Path, spark_jars: list[Path]) -> None:
    # 400 MB in one batch: compressed, they are too few bytes in the log for several ones.
    topics = await make_topics(bootstrap, 1)
    options = {"max_request_size": 2 * BYTES, "compression_type": "gzip"}
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, **options) as producer:
        for _ in range(RECORDS):
            await producer.send(topics.source, bytes(BYTES))
    for name in TABLES:
        place = tmp_path / name
        place.mkdir()
        lake, file, heap = FORMATS[name](place), place / "archive.toml", ', driver_memory = "480m"'
        text = FILE.format(topic=topics.source, sink=lake.sink, checkpoint=place / "checkpoint", settings=heap)
        file.write_text(text)
        async with Job(bootstrap, topics, place, file=file) as job:
            await job.start()
            await job.wait_until(lambda job=job: job.rows() >= RECORDS, 300)
            assert await job.stopped() == 0
        found = await asyncio.to_thread(lake.read)
        assert (found.right, found.rows) == (True, RECORDS), name


@pytest.mark.parametrize("format_", TABLES)
async def test_a_planned_batch_that_the_table_does_not_have_is_planned_anew(
    *, run_once: Any, declare: Any, new_topic: Any, producer: AIOKafkaProducer, tmp_path: Path, format_: str
) -> None:
    source = await new_topic(partitions=2)
    for number in range(50):
        await producer.send(source, b"%d" % number, partition=number % 2)
    await producer.flush()

    def job(place: Path, most: int) -> Any:
        text = FILE.format(topic=source, sink=FORMATS[format_](place).sink, checkpoint="CHECKPOINT", settings="")
        return declare(text, max_offsets_per_trigger=most)

    (elsewhere := tmp_path / "elsewhere").mkdir()
    assert [one.rows for one in await run_once(job(elsewhere, 1_000)) if one.rows] == [50]
    for left in (tmp_path / "checkpoint" / "archive" / "commits").glob("*0*"):
        left.unlink()  # as if the job had died of batch 0: neither Spark nor the table has it
    batches = await run_once(job(tmp_path, 20))
    assert [one.rows for one in batches if one.rows] == [20, 20, 10]
    found = await asyncio.to_thread(FORMATS[format_](tmp_path).read)
    assert (found.right, found.rows) == (True, 50)
