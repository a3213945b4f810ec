"""Kills a job repeatedly, each time at another moment: of its start, a batch, a commit, its scan for rejects.

A kill waits only for its target. So a step of a millisecond is hit as often as one of seconds, and a round takes little
longer than a start.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from loadtest.spark.job import Job

POLL_S: Final = 0.002
"""Interval of checkpoint polls; short enough to see a file under its temporary name before it is committed."""
PATIENCE_S: Final = 15.0
"""How long to wait for the target after the job reads; then the job is killed anyway."""
FIRST_START_S: Final = 12.0
"""The assumed duration of the first start."""


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


async def rounds(job: Job, kills: int, rng: random.Random, *, scans: bool, on_kill: Callable[[int, str], None]) -> None:
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
        await asyncio.sleep(POLL_S)


def _state(checkpoint: Path, place: str) -> set[tuple[str, int]]:
    """Return the modification times of the files or directories with this name."""
    found = set()
    for query in checkpoint.iterdir() if checkpoint.is_dir() else ():
        try:
            found.add((query.name, (query / place).stat().st_mtime_ns))
        except (FileNotFoundError, NotADirectoryError):  # missing, or just being replaced
            continue
    return found
