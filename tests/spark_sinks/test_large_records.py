"""Archives of large records: a table's batch never has to fit into Java's memory, nor into that of the driver."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from loadtest.engine.stand import Stand
from loadtest.spark import large
from loadtest.spark.lakes import FORMATS

TABLES = ("delta", "iceberg")


@pytest.mark.spark
@pytest.mark.timeout(400)
async def test_a_batch_larger_than_the_heap_is_written(bootstrap: str, tmp_path: Path, spark_jars: list[Path]) -> None:
    # 400 MB in one batch: compressed, they are too few bytes in the log for several ones.
    plan = large.Plan(TABLES, records=2_000, size=200_000, compressed=True, heap="480m", quick_start=True)
    async with Stand(tmp_path, bootstrap) as stand:
        await large.run(stand, plan)
    assert stand.problems == []


@pytest.mark.parametrize("format_", TABLES)
async def test_a_planned_batch_that_the_table_does_not_have_is_planned_anew(
    *, run_once: Any, declare: Any, new_topic: Any, producer: AIOKafkaProducer, tmp_path: Path, format_: str
) -> None:
    source = await new_topic(partitions=2)
    for number in range(50):
        await producer.send(source, b"%d" % number, partition=number % 2)
    await producer.flush()

    def job(place: Path, most: int) -> Any:
        text = large.FILE.format(topic=source, sink=FORMATS[format_](place).sink, checkpoint="CHECKPOINT", settings="")
        return declare(text, max_offsets_per_trigger=most)

    (elsewhere := tmp_path / "elsewhere").mkdir()
    assert [one.rows for one in await run_once(job(elsewhere, 1_000)) if one.rows] == [50]
    for left in (tmp_path / "checkpoint" / "archive" / "commits").glob("*0*"):
        left.unlink()  # as if the job had died of batch 0: neither Spark nor the table has it
    batches = await run_once(job(tmp_path, 20))
    assert [one.rows for one in batches if one.rows] == [20, 20, 10]
    found = await asyncio.to_thread(FORMATS[format_](tmp_path).read)
    assert (found.right, found.rows) == (True, 50)
