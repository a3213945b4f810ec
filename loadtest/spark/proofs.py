"""Scenario `proofs`: runs the kill scenario of every job that survives kills, and prints a verdict for each.

A proof that fails, or takes too long, does not stop the others.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from loadtest.spark import archive, kills, last

READINGS: Final = 200  # per second
RECORDS: Final = 1_000


class Plan(NamedTuple):
    """Parameters."""

    kills: int
    together: int  # proofs that run at the same time
    limit_s: float  # time limit of one proof
    only: tuple[str, ...]  # empty for all
    seed: int


Proof = Callable[[str, Path, Plan], Awaitable[int]]
PROOFS: Final[Mapping[str, Proof]] = {
    "max-temperature": lambda kafka, directory, plan: kills.run(
        kafka, directory, kills.Plan(plan.kills, READINGS, "micro-batch", plan.seed)
    ),
    "max-temperature in real time": lambda kafka, directory, plan: kills.run(
        kafka, directory, kills.Plan(plan.kills, READINGS, "real-time", plan.seed)
    ),
    "last-known": lambda kafka, directory, plan: last.run(
        kafka, directory, last.Plan(plan.kills, READINGS, "micro-batch", plan.seed)
    ),
    "parquet": lambda kafka, directory, plan: archive.run(
        kafka, directory, archive.Plan("parquet", plan.kills, RECORDS, plan.seed)
    ),
    "delta": lambda kafka, directory, plan: archive.run(
        kafka, directory, archive.Plan("delta", plan.kills, RECORDS, plan.seed)
    ),
    "iceberg": lambda kafka, directory, plan: archive.run(
        kafka, directory, archive.Plan("iceberg", plan.kills, RECORDS, plan.seed)
    ),
}


async def run(bootstrap: str, directory: Path, plan: Plan) -> int:
    """Run all proofs; 0 if each passed."""
    wanted = plan.only or tuple(PROOFS)
    turn = asyncio.Semaphore(plan.together)
    verdicts = await asyncio.gather(*(_one(bootstrap, directory, plan, name, turn) for name in wanted))
    print()
    for name, verdict in zip(wanted, verdicts, strict=True):
        print(f"{name:30} {verdict}")
    return 0 if all(verdict.startswith("kept") for verdict in verdicts) else 1


async def _one(bootstrap: str, directory: Path, plan: Plan, name: str, turn: asyncio.Semaphore) -> str:
    """Run one proof, and return its verdict in words."""
    place = directory / name.replace(" ", "-")
    place.mkdir()
    async with turn:
        began = time.monotonic()
        try:
            async with asyncio.timeout(plan.limit_s):
                code = await PROOFS[name](bootstrap, place, plan)
        except TimeoutError:
            verdict = f"not kept: not finished within {plan.limit_s:g} s"
        except Exception as error:  # the others continue
            traceback.print_exc()
            verdict = f"not kept: {type(error).__name__}: {error}"
        else:
            verdict = "not kept" if code else "kept"
        verdict += f" ({plan.kills} kills, {time.monotonic() - began:.0f} s)"
    print(f"{name}: {verdict}", flush=True)
    return verdict
