"""Scenario `large`: archives large records with the job's default settings; every record must be there, once.

With `compressed` the log is far smaller than its records, so batches are not bounded by the log's bytes either.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.spark.job import Job
from loadtest.spark.lakes import FORMATS
from loadtest.spark.readings import make_topics

FILE: Final = """
job = "archive"
source = {{ topics = ["{topic}"], decode = "none" }}
sink = {{ {sink} }}
run = {{ checkpoint = "{checkpoint}"{settings} }}
"""
LIMIT_S: Final = 600.0


class Plan(NamedTuple):
    """Parameters."""

    formats: tuple[str, ...]
    records: int
    size: int  # bytes of a value
    compressed: bool
    heap: str | None = None  # of Java; None: the default
    quick_start: bool = False


async def run(bootstrap: str, directory: Path, plan: Plan) -> int:
    """Fill a topic, and archive it in each format; 0 if every archive has every record once."""
    topics = await make_topics(bootstrap, partitions=1)
    compression = "gzip" if plan.compressed else None
    rng = random.Random(plan.size)
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, max_request_size=2 * plan.size, compression_type=compression
    ) as producer:
        for _ in range(plan.records):
            await producer.send(topics.source, bytes(plan.size) if plan.compressed else rng.randbytes(plan.size))
    kept = True
    for name in plan.formats:
        place = directory / name
        place.mkdir()
        lake = FORMATS[name](place)
        file = place / "archive.toml"
        settings = "" if plan.heap is None else f', driver_memory = "{plan.heap}"'
        file.write_text(
            FILE.format(topic=topics.source, sink=lake.sink, checkpoint=place / "checkpoint", settings=settings)
        )
        began = time.monotonic()
        async with Job(bootstrap, topics, place, file=file, quick_start=plan.quick_start) as job:
            await job.start()
            await job.wait_until(lambda job=job: job.rows() >= plan.records, LIMIT_S)  # type: ignore[misc]
            seconds, memory = time.monotonic() - began, job.most_resident()
            code = await job.stop()
        found = await asyncio.to_thread(lake.read)
        right = code == 0 and found.right and found.rows == plan.records
        print(
            f"{name}: {found.rows:,} rows of {plan.size:,} bytes, {found.distinct:,} distinct, in {len(job.batches())} "
            f"batches and {len(lake.files())} files, {seconds:.0f} s, JVM at most {memory >> 20:,} MiB, exit {code}",
            flush=True,
        )
        kept &= right
    return 0 if kept else 1
