"""Kills every job that survives kills, each at another moment, while records arrive; one engine, a declaration a job.

- max-temperature, in micro-batches, in real time, on a backlog and on a cluster: see `windows`.
- last-known: its topic must have the newest value of every device; in micro-batches no device may ever go back.
- archives: an independent reader reads all the time; it must see each record once, and none missing before another.
  Every second `maintain` is killed too. At the end the archive has all records of the log.

A proof that fails, or takes too long, does not stop the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from loadtest.beside import beside
from loadtest.clients.pace import at_rate
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.spark.lakes import FORMATS, Parquet
from loadtest.spark.proof import Plan, Proof
from loadtest.spark.readings import Topics, make_topics
from loadtest.spark.windows import Backlog, OnCluster, Windows
from loadtest.start import start_process
from loadtest.verify import stored

SENSORS: Final = 50
DEVICES: Final = 200
EVERY: Final = 50
"""One in this many values is none: as the newest one it deletes its device."""
SHUFFLED_MS: Final = 3_000
SETTLE_S: Final = 300.0
CREATION_TIME: Final = "creation-time"
ORIGIN_TIME: Final = "origin.time"
ORIGIN_OFFSET: Final = "origin.offset"
"""Headers with the time of a record, and with the time and offset of a result's record."""
LAST_KNOWN: Final = """
job = "last-known"
source = {{ topics = ["{topics.source}"], decode = "none", dead_letters = "{topics.dead_letter}" }}
sink = {{ kafka = "{topics.target}" }}
run = {{ checkpoint = "{checkpoint}", max_offsets_per_trigger = 10000 }}
"""
ARCHIVE: Final = """
job = "archive"
source = {{ topics = ["{topics.source}"], decode = "none" }}
sink = {{ {sink} }}
run = {{ checkpoint = "{checkpoint}", max_offsets_per_trigger = 2000 }}
"""
UPKEEP_S: Final = 300.0
UPKEEP_PAUSE_S: Final = 3.0


class Value(NamedTuple):
    """A device's value; the greater one is the newer."""

    time: int  # the record's own time, epoch ms
    offset: int
    value: bytes  # empty if null


class Newest(NamedTuple):
    """The result of comparing the topic with the newest values."""

    devices: int
    missing: int
    wrong: int  # another value than the newest
    results: int
    back: int  # results older than one before them


class LastKnown(Proof):
    """The newest value of every device."""

    compacted = True

    @property
    def job_file(self) -> str:
        """Its job file."""
        return LAST_KNOWN.format(topics=self.topics, checkpoint=self.directory / "checkpoint")

    async def send(self, producer: AIOKafkaProducer) -> None:
        """Send values out of order."""
        async for number in at_rate(self.rate):
            at = int(time.time() * 1000) - self.rng.randrange(SHUFFLED_MS)
            value, key = b"%d" % number if number % EVERY else None, b"d%d" % self.rng.randrange(DEVICES)
            await producer.send(self.topics.source, value, key, headers=[(CREATION_TIME, b"%d" % at)])

    async def verdict(self) -> tuple[object, bool]:
        """Compare when nothing is missing, or after `SETTLE_S`; a killed real-time job may go back briefly."""
        newest: dict[bytes, Value] = {}
        async for record in stored(self.bootstrap, self.topics.source):
            position = _value(record, CREATION_TIME, record.offset)
            newest[record.key] = max(newest.get(record.key, position), position)
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = await compare(self.bootstrap, self.topics.target, newest)
            kept = found.missing == found.wrong == 0 and (self.trigger == "real-time" or not found.back)
            if kept or time.monotonic() > deadline:
                return found, kept
            await asyncio.sleep(1)


async def compare(bootstrap: str, target: str, newest: Mapping[bytes, Value]) -> Newest:
    """Compare the results in a topic with the newest values."""
    found: dict[bytes, Value] = {}
    results = back = 0
    async for record in stored(bootstrap, target):
        position = _value(record, ORIGIN_TIME, int(dict(record.headers)[ORIGIN_OFFSET]))
        results += 1
        back += record.key in found and position < found[record.key]
        found[record.key] = position
    missing = len(newest.keys() - found.keys())
    wrong = sum(key in found and found[key] != value for key, value in newest.items())
    return Newest(len(newest), missing, wrong, results, back)


def _value(record: Any, header: str, offset: int) -> Value:
    return Value(int(dict(record.headers)[header]), offset, record.value or b"")


class Archive(Proof):
    """An archive in one format, with its `maintain` and a reader."""

    rate = 1_000
    scans = False

    def prepare(self, bootstrap: str, topics: Topics, directory: Path, plan: Plan) -> None:
        """Make the lake."""
        super().prepare(bootstrap, topics, directory, plan)
        self.lake = FORMATS[self.name](directory)
        self.reads = self.rows = self.repeated = self.maintained = self.killed = 0
        self.wrong: list[str] = []

    @property
    def job_file(self) -> str:
        """Its job file."""
        return ARCHIVE.format(topics=self.topics, sink=self.lake.sink, checkpoint=self.directory / "checkpoint")

    async def send(self, producer: AIOKafkaProducer) -> None:
        """Send numbered records of some sensors."""
        async for number in at_rate(self.rate):
            place, sensor = divmod(number - 1, SENSORS)
            await producer.send(self.topics.source, b'{"n": %d}' % place, b"s%d" % sensor)

    @contextlib.asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Read and maintain all the time."""
        async with beside(self._read_for_ever(), self._maintain_for_ever()):
            yield

    async def verdict(self) -> tuple[object, bool]:
        """Wait until the archive has the log."""
        log, deadline = await self._log(), time.monotonic() + SETTLE_S
        while await asyncio.to_thread(self._read) < log and time.monotonic() < deadline:  # noqa: ASYNC110 - it reads
            await asyncio.sleep(1)
        return f"{self.rows:,} of {log:,} rows", self.rows >= log

    async def after(self) -> tuple[object, bool]:
        """Maintain once more, and compare with the log."""
        before = len(self.lake.files())
        await self._maintain(None)
        log, found = await self._log(), await asyncio.to_thread(self.lake.read)
        text = (
            f"log {log:,}, {found}; files, with unused ones, {before:,} before the last maintain, "
            f"{len(self.lake.files()):,} after; {self.reads:,} reads meanwhile, {self.repeated} repeated; maintenance "
            f"{self.maintained} finished, {self.killed} killed; wrong: {self.wrong[:10]}"
        )
        return text, not self.wrong and found.rows == found.distinct == log

    async def _log(self) -> int:
        async with AIOKafkaConsumer(self.topics.source, bootstrap_servers=self.bootstrap) as consumer:
            await consumer.getmany(timeout_ms=100)
            ends: dict[TopicPartition, int] = await consumer.end_offsets(consumer.assignment())
            return sum(ends.values())

    def _read(self) -> int:
        """Read once; return the number of rows. A read of Parquet is repeated if a file is gone."""
        try:
            found = self.lake.read()
        except duckdb.IOException as error:
            if type(self.lake) is not Parquet:
                self.wrong.append(str(error))
            self.repeated += 1
            return 0
        self.reads += 1
        if not found.right:
            self.wrong.append(str(found))
        self.rows = found.rows
        return found.rows

    async def _read_for_ever(self) -> None:
        while True:
            await asyncio.to_thread(self._read)
            await asyncio.sleep(0.2)

    async def _maintain_for_ever(self) -> None:
        """Run `maintain` repeatedly, and kill every second one at a random moment."""
        rng, took = random.Random(self.rng.random()), 0.0
        while True:
            await asyncio.sleep(UPKEEP_PAUSE_S)
            if not self.rows:  # there is no archive yet
                continue
            began = time.monotonic()
            await self._maintain(rng.uniform(0, took) if took and rng.random() < 0.5 else None)
            took = max(took, time.monotonic() - began)

    async def _maintain(self, kill_after_s: float | None) -> None:
        """Run `maintain` once; `kill_after_s` None lets it finish."""
        process = await start_process(
            sys.executable, "-m", "gateway", "spark", "maintain", str(self.directory / "job.toml"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(process.communicate())
            try:
                await asyncio.wait([ended], timeout=UPKEEP_S if kill_after_s is None else kill_after_s)
            finally:  # also if the proof is cancelled
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        output, _ = ended.result()
        if process.returncode == -signal.SIGKILL and kill_after_s is not None:
            self.killed += 1
        elif process.returncode == 0:
            self.maintained += 1
        else:
            self.wrong.append(f"maintain ended with {process.returncode}: {output.decode().strip()}")


PROOFS: Final[Mapping[str, Callable[[], Proof]]] = {
    "max-temperature": lambda: Windows("max-temperature"),
    "max-temperature in real time": lambda: Windows("max-temperature", "real-time"),
    "backlog": lambda: Backlog("backlog", "real-time"),
    "cluster": lambda: OnCluster("cluster"),
    "last-known": lambda: LastKnown("last-known"),
    "last-known in real time": lambda: LastKnown("last-known", "real-time"),
    **{name: (lambda name=name: Archive(name)) for name in FORMATS},  # type: ignore[misc]
}


async def prove(proof: Proof, bootstrap: str, directory: Path, plan: Plan) -> str | None:
    """Have the job suffer, let it finish, compare; return what was violated, or None."""
    proof.prepare(bootstrap, await make_topics(bootstrap, compacted=proof.compacted), directory, plan)
    async with proof.job() as job, proof.beside():
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5) as producer:
            async with beside(proof.send(producer)):
                await proof.suffer(job)
            await producer.flush()
        found, kept = await proof.verdict()
        code = await job.stopped()
    last, whole = await proof.after()
    print(f"{proof.name}, {proof.trigger}: {found} {last}", flush=True)
    return None if kept and whole and code == 0 else f"{found} {last}, exit code {code}"


async def run(stand: Stand, plan: Plan) -> None:
    """Run all proofs."""
    bootstrap, turn = await stand.kafka(), asyncio.Semaphore(plan.together)

    async def one(name: str) -> None:
        place = stand.directory / name.replace(" ", "-")
        place.mkdir()
        async with turn:
            began = time.monotonic()
            try:
                async with asyncio.timeout(plan.proof_limit):
                    wrong = await prove(PROOFS[name](), bootstrap, place, plan)
            except TimeoutError:
                wrong = f"not finished within {plan.proof_limit:g} s"
            except Exception as error:  # the others continue
                traceback.print_exc()
                wrong = repr(error)
        stand.row(
            proof=name, verdict="not kept" if wrong else "kept", kills=plan.kills, s=round(time.monotonic() - began)
        )
        stand.check(wrong is None, f"{name}: {wrong}")

    await asyncio.gather(*(one(name) for name in plan.only or PROOFS))


SCENARIOS = (Scenario("proofs", "kill each job that survives kills, while records arrive", Plan(), run),)
