"""A proof about a job that survives kills: what is sent to it, what it suffers, and what must hold in the end.

A kill waits only for its moment: of a start, a batch, a commit, a scan for rejects. So a step of a millisecond is hit
as often as one of seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.spark.job import Job
from loadtest.spark.readings import Topics

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
        readings: of the backlog.
        proof_limit: seconds after which a proof is stopped.
        only: only this proof, by the name in its verdict; repeatable.
        seed: of all random choices.
    """

    kills: int = 20
    together: int = 2
    readings: int = 100_000
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

    def prepare(self, bootstrap: str, topics: Topics, directory: Path, plan: Plan) -> None:
        """Take what the proof runs on."""
        self.bootstrap, self.topics, self.directory, self.plan = bootstrap, topics, directory, plan
        self.rng = random.Random(plan.seed)

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

    async def suffer(self, job: Job) -> None:
        """Kill the job repeatedly; in the end it runs."""
        await kill_rounds(job, self.plan.kills, self.rng, scans=self.scans, on_kill=self.hurt)
        await job.start()
        await asyncio.sleep(5)

    def hurt(self, number: int, how: str) -> None:
        """Tell of something that was done to the job."""
        print(f"{self.name}, {self.trigger}: kill {number} of {self.plan.kills} ({how})", flush=True)

    async def verdict(self) -> tuple[object, bool]:
        """Return what was found, and whether nothing was violated; waits until the job has caught up."""
        raise NotImplementedError

    async def after(self) -> tuple[object, bool]:
        """Return the same of what is checked after the job's end."""
        return "", True


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
