"""Scenario `kills`: kills the job repeatedly while readings arrive, some far too late.

In the end every window must be right, and every late reading in a window or in a dead letter.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.beside import beside
from loadtest.clients.pace import at_rate
from loadtest.spark import killing
from loadtest.spark.job import Job
from loadtest.spark.readings import LATE, Sender, make_topics, settled

SENSORS = 50
EVERY = 50  # one in this many readings is far too late
LATE_MS = 120_000


class Plan(NamedTuple):
    """Parameters."""

    kills: int
    rate: int
    trigger: str
    seed: int


async def run(bootstrap: str, directory: Path, plan: Plan) -> int:
    """Kill, finish, compare; 0 if nothing was violated."""
    rng = random.Random(plan.seed)
    topics = await make_topics(bootstrap)
    # Time passes between kills, and only the intended readings may become late.
    options = ["--watermark", "60s", "--trigger", plan.trigger]
    options += ["--interval", "5s"] if plan.trigger == "real-time" else []
    async with (
        Job(bootstrap, topics, directory, *options) as job,
        AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5) as producer,
    ):
        sender = Sender(producer, topics.source)

        def on_kill(kill: int, moment: str) -> None:
            print(
                f"{plan.trigger}: kill {kill} of {plan.kills} ({moment}): {len(sender.expected):,} windows, "
                f"{len(sender.late)} late",
                flush=True,
            )

        async with beside(_send(sender, plan.rate, rng)):
            await killing.rounds(job, plan.kills, rng, scans=True, on_kill=on_kill)
            await job.start()
            await asyncio.sleep(5)
        await sender.flush()
        verdict = await settled(bootstrap, topics, sender, 60)
        code = await job.stop()
    print(f"{plan.trigger}, {plan.kills} kills: {verdict}")
    return 0 if verdict.kept and code == 0 else 1


async def _send(sender: Sender, rate: int, rng: random.Random) -> None:
    async for number in at_rate(rate):
        now = int(time.time() * 1000)
        if number % EVERY:
            await sender.send(f"s{number % SENSORS}", rng.uniform(-20, 40), now - rng.randrange(3_000))
        else:
            await sender.send(f"{LATE}{number}", 99.5, now - LATE_MS)
