"""Scenario `archive`: kills an archive job and its `maintain` repeatedly while records arrive.

An independent reader reads all the time: it must see each record once, and none missing before another. At the end
the archive has all records of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

import duckdb
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from loadtest.beside import beside
from loadtest.clients.pace import at_rate
from loadtest.spark import killing
from loadtest.spark.job import Job
from loadtest.spark.lakes import FORMATS, Parquet
from loadtest.spark.readings import make_topics
from loadtest.start import start_process

FILE: Final = """
job = "archive"
source = {{ topics = ["{topic}"], decode = "none" }}
sink = {{ {sink} }}
run = {{ checkpoint = "{checkpoint}", max_offsets_per_trigger = 2000 }}
"""
SETTLE_READS: Final = 180  # one second apart
UPKEEP_S: Final = 300.0
UPKEEP_PAUSE_S: Final = 3.0


class Plan(NamedTuple):
    """Parameters."""

    format: str
    kills: int
    rate: int
    seed: int


class Reader:
    """Reads repeatedly, and records what was wrong."""

    def __init__(self, lake: Parquet) -> None:
        self.lake = lake
        self.reads = 0
        self.rows = 0  # in the last read
        self.missed = 0  # Parquet reads that failed because a file was gone, and are repeated
        self.wrong: list[str] = []

    def read(self) -> int:
        """Read once; return the number of rows."""
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
        self.rows = found.rows
        return found.rows

    async def for_ever(self) -> None:
        """Read until cancelled."""
        while True:
            await asyncio.to_thread(self.read)
            await asyncio.sleep(0.2)


async def run(bootstrap: str, directory: Path, plan: Plan) -> int:
    """Kill, finish, compare; 0 if nothing was violated."""
    topics = await make_topics(bootstrap)
    lake = FORMATS[plan.format](directory)
    reader = Reader(lake)
    file = directory / "archive.toml"
    file.write_text(FILE.format(topic=topics.source, sink=lake.sink, checkpoint=directory / "checkpoint"))
    job = Job(bootstrap, topics, directory, file=file)
    upkeep = Upkeep(file, reader, random.Random(plan.seed + 1))
    async with job, beside(reader.for_ever(), upkeep.for_ever()):
        code = await _rounds(job, reader, plan)
    before = len(lake.files())
    await upkeep.once(None)
    log = sum((await _ends(bootstrap, topics.source)).values())
    found = await asyncio.to_thread(lake.read)
    print(
        f"{plan.format}, {plan.kills} kills: log {log:,}, rows {found.rows:,}, distinct {found.distinct:,}; files, "
        f"with unused ones, {before:,} before the last maintain, {len(lake.files()):,} after; {reader.reads:,} reads "
        f"meanwhile, {len(reader.wrong)} wrong, {reader.missed} repeated; maintenance runs: {upkeep.done} "
        f"finished, {upkeep.killed} killed"
    )
    for problem in (*reader.wrong[:10], *upkeep.failed):
        print(problem)
    kept = not reader.wrong and not upkeep.failed and code == 0
    return 0 if kept and found.rows == found.distinct == log else 1


class Upkeep:
    """Runs `maintain` repeatedly, and kills every second one at a random moment."""

    def __init__(self, file: Path, reader: Reader, rng: random.Random) -> None:
        self.done = 0
        self.killed = 0
        self.failed: list[str] = []
        self._file = file
        self._reader = reader
        self._rng = rng

    async def for_ever(self) -> None:
        """Run until cancelled."""
        took = 0.0
        while True:
            await asyncio.sleep(UPKEEP_PAUSE_S)
            if not self._reader.rows:  # there is no archive yet
                continue
            began = time.monotonic()
            kills = took and self._rng.random() < 0.5
            await self.once(self._rng.uniform(0, took) if kills else None)
            took = max(took, time.monotonic() - began)

    async def once(self, kill_after_s: float | None) -> None:
        """Run `maintain` once; `kill_after_s` None lets it finish."""
        process = await start_process(
            sys.executable, "-m", "gateway", "spark", "maintain", str(self._file),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(process.communicate())
            try:
                await asyncio.wait([ended], timeout=UPKEEP_S if kill_after_s is None else kill_after_s)
            finally:  # also if the scenario is cancelled
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        output, _ = ended.result()
        if process.returncode == -signal.SIGKILL and kill_after_s is not None:
            self.killed += 1
        elif process.returncode == 0:
            self.done += 1
        else:
            self.failed.append(f"maintain ended with {process.returncode}: {output.decode().strip()}")


async def _rounds(job: Job, reader: Reader, plan: Plan) -> int:
    """Send records, kill the job repeatedly, let it reach the log's end; return its exit code."""

    def on_kill(kill: int, moment: str) -> None:
        files = len(reader.lake.files())
        print(
            f"{plan.format}: kill {kill} of {plan.kills} ({moment}): {reader.rows:,} rows, {files:,} files", flush=True
        )

    async with (
        AIOKafkaProducer(bootstrap_servers=job.bootstrap, linger_ms=5) as producer,
        beside(_send(producer, job.topics.source, plan.rate)),
    ):
        await killing.rounds(job, plan.kills, random.Random(plan.seed), scans=False, on_kill=on_kill)
        await job.start()
    log = sum((await _ends(job.bootstrap, job.topics.source)).values())
    for _ in range(SETTLE_READS):
        if await asyncio.to_thread(reader.read) >= log:
            break
        await asyncio.sleep(1)
    return await job.stop()


async def _send(producer: AIOKafkaProducer, topic: str, rate: int) -> None:
    async for number in at_rate(rate):
        place, sensor = divmod(number - 1, 50)
        await producer.send(topic, b'{"n": %d}' % place, b"s%d" % sensor)


async def _ends(bootstrap: str, topic: str) -> dict[TopicPartition, int]:
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap) as consumer:
        await consumer.getmany(timeout_ms=100)
        return dict(await consumer.end_offsets(consumer.assignment()))
