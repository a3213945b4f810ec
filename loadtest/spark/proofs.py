"""Kills every job that survives kills, each at another moment, while records arrive; one engine, a declaration a job.

- max-temperature, in micro-batches and in real time: every window must be right, and every reading that is far too late
  in a window or in a dead letter.
- last-known: its topic must have the newest value of every device; in micro-batches no device may ever go back.
- archives: an independent reader reads all the time; it must see each record once, and none missing before another.
  Every second `maintain` is killed too. At the end the archive has all records of the log.

A kill waits only for its moment: of a start, a batch, a commit, a scan for rejects. So a step of a millisecond is hit
as often as one of seconds. A proof that fails, or takes too long, does not stop the others.
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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from loadtest.beside import beside
from loadtest.clients.pace import at_rate
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.spark.job import Job
from loadtest.spark.lakes import FORMATS, Parquet
from loadtest.spark.readings import LATE, Sender, Topics, make_topics, settled
from loadtest.start import start_process
from loadtest.verify import stored

SENSORS: Final = 50
DEVICES: Final = 200
EVERY: Final = 50
"""One in this many readings is far too late; of values, one has none: as the newest one it deletes its device."""
LATE_MS: Final = 120_000
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


KILL_POLL_S: Final = 0.002
"""Interval of checkpoint polls; short enough to see a file under its temporary name before it is committed."""
PATIENCE_S: Final = 15.0
"""How long to wait for the target after the job reads; then the job is killed anyway."""
FIRST_START_S: Final = 12.0
"""The assumed duration of the first start."""


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        kills: of each proof.
        together: proofs that run at the same time.
        proof_limit: seconds after which a proof is stopped.
        only: only this proof, by the name in its verdict; repeatable.
        seed: of all random choices.
    """

    kills: int = 20
    together: int = 2
    proof_limit: float = 1_200.0
    only: tuple[str, ...] = ()
    seed: int = 0


class Proof:
    """A job that is killed, what is sent to it, and what must hold in the end.

    Attributes:
        rate: records per second.
        trigger: of the job.
        scans: whether the job scans for rejects (`spark_sinks.run.reject_scanner`).
        compacted: whether the topic of its results is compacted.
    """

    rate = 200
    scans = True
    compacted = False

    def __init__(self, name: str, trigger: str = "micro-batch") -> None:
        self.name = name
        self.trigger = trigger

    def prepare(self, bootstrap: str, topics: Topics, directory: Path, rng: random.Random) -> None:
        """Take what the proof runs on."""
        self.bootstrap, self.topics, self.directory, self.rng = bootstrap, topics, directory, rng

    @property
    def job_file(self) -> str | None:
        """The text of its job file; None for max-temperature."""
        return None

    def job(self) -> Job:
        """Return the job, not started."""
        options = ["--trigger", self.trigger, *(["--interval", "5s"] if self.trigger == "real-time" else [])]
        if self.job_file is None:  # time passes between kills, and only the intended readings may become late
            return Job(self.bootstrap, self.topics, self.directory, "--watermark", "60s", *options)
        file = self.directory / "job.toml"
        file.write_text(self.job_file)
        return Job(self.bootstrap, self.topics, self.directory, *options, file=file)

    async def send(self, producer: AIOKafkaProducer) -> None:
        """Send records at the rate until cancelled."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Do what goes on beside the job."""
        yield

    async def verdict(self) -> tuple[object, bool]:
        """Return what was found, and whether nothing was violated; waits until the job has caught up."""
        raise NotImplementedError

    async def after(self) -> tuple[object, bool]:
        """Return the same of what is checked after the job's end."""
        return "", True


class Windows(Proof):
    """max-temperature."""

    async def send(self, producer: AIOKafkaProducer) -> None:
        """Send readings, some far too late."""
        self.sender = Sender(producer, self.topics.source)
        async for number in at_rate(self.rate):
            now = int(time.time() * 1000)
            if number % EVERY:
                at = now - self.rng.randrange(3_000)
                await self.sender.send(f"s{number % SENSORS}", self.rng.uniform(-20, 40), at)
            else:
                await self.sender.send(f"{LATE}{number}", 99.5, now - LATE_MS)

    async def verdict(self) -> tuple[object, bool]:
        """Compare the windows."""
        found = await settled(self.bootstrap, self.topics, self.sender, 60)
        return found, found.kept


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

    def prepare(self, bootstrap: str, topics: Topics, directory: Path, rng: random.Random) -> None:
        """Make the lake."""
        super().prepare(bootstrap, topics, directory, rng)
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


class Moment(NamedTuple):
    """The target of a kill."""

    name: str
    place: str | None  # file or directory in a query's checkpoint whose change starts the moment; None: the launch
    within_s: float  # latest kill after that


START: Final = Moment("start", None, 0.0)
MOMENTS: Final = (
    START,
    Moment("batch", "offsets", 1.0),  # the batch is planned
    Moment("commit", "commits", 0.005),
    Moment("any", "offsets", 4.0),
)
SCAN: Final = Moment("scan", "examined", 0.02)


def moments(rng: random.Random, *, scans: bool) -> Iterator[Moment]:
    """Yield moments forever, each kind equally often in random order; `scans` includes the scan for rejects."""
    kinds = (*MOMENTS, SCAN) if scans else MOMENTS
    while True:
        yield from rng.sample(kinds, len(kinds))


async def kill_rounds(
    job: Job, kills: int, rng: random.Random, *, scans: bool, on_kill: Callable[[int, str], None]
) -> None:
    """Start and kill the job `kills` times.

    Args:
        job: not running, before and after.
        kills: number of kills.
        rng: chooses the moments.
        scans: whether the job scans for rejects (`spark_sinks.run.reject_scanner`).
        on_kill: called with the number and the target of each kill.
    """
    took = FIRST_START_S
    for number, moment in zip(range(1, kills + 1), moments(rng, scans=scans), strict=False):
        began = time.monotonic()
        await job.launch()
        if moment.place is None:
            await asyncio.sleep(rng.uniform(0, took))
        else:
            await job.wait_ready()
            took = time.monotonic() - began
            await _changed(job.checkpoint, moment.place)
            await asyncio.sleep(rng.uniform(0, moment.within_s))
        await job.kill()
        on_kill(number, moment.name)


async def _changed(checkpoint: Path, place: str) -> None:
    """Wait for a change in the checkpoints of a job's queries, for at most `PATIENCE_S`."""
    before, deadline = _state(checkpoint, place), time.monotonic() + PATIENCE_S
    while _state(checkpoint, place) == before and time.monotonic() < deadline:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(KILL_POLL_S)


def _state(checkpoint: Path, place: str) -> set[tuple[str, int]]:
    """Return the modification times of the files or directories with this name."""
    found = set()
    for query in checkpoint.iterdir() if checkpoint.is_dir() else ():
        try:
            found.add((query.name, (query / place).stat().st_mtime_ns))
        except (FileNotFoundError, NotADirectoryError):  # missing, or just being replaced
            continue
    return found


PROOFS: Final[Mapping[str, Callable[[], Proof]]] = {
    "max-temperature": lambda: Windows("max-temperature"),
    "max-temperature in real time": lambda: Windows("max-temperature", "real-time"),
    "last-known": lambda: LastKnown("last-known"),
    "last-known in real time": lambda: LastKnown("last-known", "real-time"),
    **{name: (lambda name=name: Archive(name)) for name in FORMATS},  # type: ignore[misc]
}


async def prove(proof: Proof, bootstrap: str, directory: Path, plan: Plan) -> str | None:
    """Kill, finish, compare; return what was violated, or None."""
    rng = random.Random(plan.seed)
    proof.prepare(bootstrap, await make_topics(bootstrap, compacted=proof.compacted), directory, rng)

    def on_kill(kill: int, moment: str) -> None:
        print(f"{proof.name}, {proof.trigger}: kill {kill} of {plan.kills} ({moment})", flush=True)

    async with proof.job() as job, proof.beside():
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5) as producer:
            async with beside(proof.send(producer)):
                await kill_rounds(job, plan.kills, rng, scans=proof.scans, on_kill=on_kill)
                await job.start()
                await asyncio.sleep(5)
            await producer.flush()
        found, kept = await proof.verdict()
        code = await job.stop()
    last, whole = await proof.after()
    print(f"{proof.name}, {proof.trigger}, {plan.kills} kills: {found} {last}", flush=True)
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
