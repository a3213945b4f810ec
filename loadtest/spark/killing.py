"""Kills a job again and again, each time at another moment: of its start, a batch, a commit, its scan for rejects.

A kill waits for what it is to hit and for nothing else. So what lasts a millisecond is hit as often as what lasts
seconds, and a round takes little longer than a start.
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
"""Between two looks at a checkpoint: a file that is being committed is seen under its temporary name."""
PATIENCE_S: Final = 15.0
"""How long what is to be hit may take to come, once the job reads; then it is killed all the same."""
FIRST_START_S: Final = 12.0
"""What a start is taken to last before the first one was seen."""


class Moment(NamedTuple):
    """What a kill is to hit."""

    name: str
    place: str | None  # in a query's checkpoint: comes with the first change there; None: with the launch itself
    within_s: float  # how much later, at most


START: Final = Moment("start", None, 0.0)
MOMENTS: Final = (
    START,
    Moment("batch", "offsets", 1.0),  # it is planned
    Moment("commit", "commits", 0.005),
    Moment("any", "offsets", 4.0),
)
SCAN: Final = Moment("scan", "examined", 0.02)


def moments(rng: random.Random, *, scans: bool) -> Iterator[Moment]:
    """Without end: each kind as often as the others, in any order. `scans`: whether the job has such."""
    kinds = (*MOMENTS, SCAN) if scans else MOMENTS
    while True:
        yield from rng.sample(kinds, len(kinds))


async def rounds(job: Job, kills: int, rng: random.Random, *, scans: bool, told: Callable[[int, str], None]) -> None:
    """Start the job and kill it, so many times.

    Args:
        job: does not run, before and after.
        kills: how many.
        rng: where the moments come from.
        scans: whether the job looks for what its results leave out (`spark_sinks.reject_scanner`).
        told: gets the number of each kill, and what it was to hit.
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
        told(number, moment.name)


async def _changed(checkpoint: Path, place: str) -> None:
    """Wait for a change in the checkpoints of a job's queries, while there is patience."""
    before, deadline = _state(checkpoint, place), time.monotonic() + PATIENCE_S
    while _state(checkpoint, place) == before and time.monotonic() < deadline:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(POLL_S)


def _state(checkpoint: Path, place: str) -> set[tuple[str, int]]:
    """When each directory or file of this name was changed: a directory is, with the names in it."""
    found = set()
    for query in checkpoint.iterdir() if checkpoint.is_dir() else ():
        try:
            found.add((query.name, (query / place).stat().st_mtime_ns))
        except (FileNotFoundError, NotADirectoryError):  # there is none yet, or it is just replaced
            continue
    return found
