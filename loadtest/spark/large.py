"""Archives large records with the job's default settings; every record must be there, once.

With `compressed` the log is far smaller than its records, so batches are not bounded by the log's bytes either.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Final, Literal, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
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
    """Parameters.

    Attributes:
        format: only this one; repeatable.
        records: number of records.
        size: bytes of a value.
        compressed: records that compress well.
        heap: of Java; none: the default.
        quick_start: whether Java starts quickly instead of running fast.
    """

    format: tuple[Literal["parquet", "delta", "iceberg"], ...] = ()
    records: int = 4_000
    size: int = 200_000
    compressed: bool = False
    heap: str | None = None
    quick_start: bool = False


async def run(stand: Stand, plan: Plan) -> None:
    """Fill a topic, and archive it in each format: every archive must have every record once."""
    bootstrap, directory = await stand.kafka(), stand.directory
    topics = await make_topics(bootstrap, partitions=1)
    compression = "gzip" if plan.compressed else None
    rng = random.Random(plan.size)
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, max_request_size=2 * plan.size, compression_type=compression
    ) as producer:
        for _ in range(plan.records):
            await producer.send(topics.source, bytes(plan.size) if plan.compressed else rng.randbytes(plan.size))
    for name in plan.format or FORMATS:
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
            code = await job.stopped()
        found = await asyncio.to_thread(lake.read)
        stand.row(**{
            "": name, "rows": found.rows, "bytes each": plan.size, "distinct": found.distinct,
            "batches": len(job.batches()), "files": len(lake.files()), "s": round(seconds), "JVM MiB": memory >> 20,
        })  # fmt: skip
        stand.check(code == 0 and found.right and found.rows == plan.records, f"{name}: {found}, exit code {code}")


SCENARIOS = (Scenario("large", "archive large records with the default settings", Plan(), run),)
