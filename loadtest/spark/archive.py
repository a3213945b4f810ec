"""Scenario `archive`: the job of an archive is killed again and again while records come.

At the end every record of the log must be in the archive's files, each once; at every kill none may be there twice. The
files are read as any reader finds them, by their names alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from pyspark.sql import SparkSession

from loadtest.spark.job import Job
from loadtest.spark.readings import make_topics

FILE = """
job = "archive"
source = {{ topics = ["{topic}"], decode = "none" }}
sink = {{ archive = "{lake}" }}
run = {{ checkpoint = "{checkpoint}", max_offsets_per_trigger = 2000 }}
"""
SETTLE_S = 60.0


async def run(bootstrap: str, directory: Path, kills: int, rate: int, seed: int) -> int:
    """Kill, finish, compare; 0: every promise was kept."""
    chance = random.Random(seed)
    topics = await make_topics(bootstrap)
    lake, file = directory / "lake", directory / "archive.toml"
    file.write_text(FILE.format(topic=topics.source, lake=lake, checkpoint=directory / "checkpoint"))
    job = Job(bootstrap, topics, directory, file=file)
    spark = _reader()
    kept = True
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5) as producer:
        sending = asyncio.create_task(_send(producer, topics.source, rate))
        for kill in range(kills):
            await job.start()
            await asyncio.sleep(chance.uniform(0, 6))
            await job.kill()
            rows, distinct = await asyncio.to_thread(_count, spark, directory)
            kept &= rows == distinct
            print(f"kill {kill + 1} of {kills}: {rows:,} rows, {distinct:,} distinct", flush=True)
        sending.cancel()
        await asyncio.wait([sending])
        await producer.flush()
    log = sum((await _ends(bootstrap, topics.source)).values())
    await job.start()
    deadline = time.monotonic() + SETTLE_S
    rows = distinct = 0
    while rows < log and time.monotonic() < deadline:
        rows, distinct = await asyncio.to_thread(_count, spark, directory)
    code = await job.stop()
    rows, distinct = await asyncio.to_thread(_count, spark, directory)
    spark.stop()
    print(f"{kills} kills: log {log:,}, rows {rows:,}, distinct {distinct:,}")
    return 0 if kept and rows == distinct == log and code == 0 else 1


def _reader() -> SparkSession:
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    return builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()


def _count(spark: SparkSession, directory: Path) -> tuple[int, int]:
    """Rows in all files below the archive, hidden ones too, and how many different records they are."""
    files = [str(path) for path in (directory / "lake").rglob("*.parquet")]
    if not files:
        return 0, 0
    found = spark.read.parquet(*files).select("partition", "offset")
    return found.count(), found.distinct().count()


async def _send(producer: AIOKafkaProducer, topic: str, rate: int) -> None:
    sent: Counter[str] = Counter()
    began = time.monotonic()
    while True:
        for _ in range(int((time.monotonic() - began) * rate) - sent.total()):
            key = f"s{sent.total() % 50}"
            await producer.send(topic, b'{"n": %d}' % sent[key], key.encode())
            sent[key] += 1
        await asyncio.sleep(0.01)


async def _ends(bootstrap: str, topic: str) -> dict[TopicPartition, int]:
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap) as consumer:
        await consumer.getmany(timeout_ms=100)
        return dict(await consumer.end_offsets(consumer.assignment()))
