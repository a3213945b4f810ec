"""Scenario `archive`: the job of an archive is killed again and again while records come, and its upkeep with it.

A reader that knows nothing of either reads all the time: each record must be there once, and none left out before
another. At the end all of the log is there, in large files, and nothing beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import duckdb
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from loadtest.beside import beside
from loadtest.spark.job import Job
from loadtest.spark.lakes import FORMATS, Parquet
from loadtest.spark.readings import make_topics

FILE: Final = """
job = "archive"
source = {{ topics = ["{topic}"], decode = "none" }}
sink = {{ {sink} }}
run = {{ checkpoint = "{checkpoint}", max_offsets_per_trigger = 2000 }}
maintain = {{ unused = "{unused}" }}
"""
SETTLE_READS: Final = 180  # a second apart
UPKEEP_S: Final = 300.0


class Plan(NamedTuple):
    """What to do."""

    format: str
    kills: int
    rate: int
    seed: int


class Reader:
    """Reads all the time, and keeps what was wrong."""

    def __init__(self, lake: Parquet) -> None:
        self.lake = lake
        self.reads = 0
        self.missed = 0  # reads of Parquet that found a file gone, which is an error: they are repeated
        self.wrong: list[str] = []

    def read(self) -> int:
        """Once; how many rows there are."""
        try:
            found = self.lake.read()
        except duckdb.IOException as error:
            if type(self.lake) is not Parquet:
                self.wrong.append(str(error))
            self.missed += 1
            return 0
        self.reads += 1
        if not found.right:
            self.wrong.append(f"{found.rows:,} rows, {found.distinct:,} distinct, of {found.expected:,}")
        return found.rows

    async def for_ever(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.to_thread(self.read)
            await asyncio.sleep(0.2)


async def run(bootstrap: str, directory: Path, plan: Plan) -> int:
    """Kill, finish, compare; 0: every promise was kept."""
    topics = await make_topics(bootstrap)
    lake = FORMATS[plan.format](directory)
    reader = Reader(lake)
    file, last_file = directory / "archive.toml", directory / "last.toml"
    for path, unused in ((file, "24h"), (last_file, "1ms")):
        path.write_text(
            FILE.format(topic=topics.source, sink=lake.sink, checkpoint=directory / "checkpoint", unused=unused)
        )
    job = Job(bootstrap, topics, directory, file=file)
    failed: list[str] = []
    async with beside(reader.for_ever()):
        try:
            code = await _rounds(job, reader, file, plan, failed)
        finally:
            await job.kill()
    before = len(lake.files())
    failed += await _ended(await _upkeep(last_file))
    log = sum((await _ends(bootstrap, topics.source)).values())
    found = await asyncio.to_thread(lake.read)
    disk = await asyncio.to_thread(lake.rows_on_disk)
    print(
        f"{plan.format}, {plan.kills} kills: log {log:,}, rows {found.rows:,}, distinct {found.distinct:,}, on disk "
        f"{disk:,}; files {before:,} before the last upkeep, {len(lake.files()):,} after; {reader.reads:,} reads "
        f"meanwhile, {len(reader.wrong)} wrong, {reader.missed} repeated"
    )
    for told in (*reader.wrong[:10], *failed):
        print(told)
    kept = not reader.wrong and not failed and code == 0
    return 0 if kept and found.rows == found.distinct == disk == log else 1


async def _rounds(job: Job, reader: Reader, file: Path, plan: Plan, failed: list[str]) -> int:
    """Records come, the job is killed again and again, and goes on to the log's end; its exit code."""
    chance = random.Random(plan.seed)
    async with (
        AIOKafkaProducer(bootstrap_servers=job.bootstrap, linger_ms=5) as producer,
        beside(_send(producer, job.topics.source, plan.rate)),
    ):
        for kill in range(plan.kills):
            await job.start()
            rows = await asyncio.to_thread(reader.read)
            upkeep = await _upkeep(file) if rows else None
            await asyncio.sleep(chance.uniform(0, 6))
            await job.kill()
            if upkeep is not None:
                failed += await _ended(upkeep, kill=True)
            rows = await asyncio.to_thread(reader.read)
            print(f"kill {kill + 1} of {plan.kills}: {rows:,} rows, {len(reader.lake.files()):,} files", flush=True)
        await job.start()
        failed += await _ended(await _upkeep(file)) if plan.kills else []
    log = sum((await _ends(job.bootstrap, job.topics.source)).values())
    for _ in range(SETTLE_READS):
        if await asyncio.to_thread(reader.read) >= log:
            break
        await asyncio.sleep(1)
    return await job.stop()


async def _upkeep(file: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "spark", "maintain", str(file),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


async def _ended(upkeep: asyncio.subprocess.Process, *, kill: bool = False) -> list[str]:
    """What was wrong with it, but that it was killed."""
    if kill and upkeep.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(upkeep.pid, signal.SIGKILL)
    async with asyncio.timeout(UPKEEP_S):
        told, _ = await upkeep.communicate()
    text = told.decode().strip()
    if text:
        print(text, flush=True)
    return [] if upkeep.returncode in {0, -signal.SIGKILL} else [f"the upkeep failed: {text}"]


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
