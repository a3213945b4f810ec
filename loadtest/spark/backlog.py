"""Starts a job on stored readings of an hour and more, in order; none may be missing."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.spark.job import Job
from loadtest.spark.readings import Sender, make_topics, settled

SENSORS = 200
STEP_MS = 50  # between readings


class Plan(NamedTuple):
    """How many readings, and the job's trigger."""

    readings: int = 100_000
    trigger: Literal["micro-batch", "real-time"] = "real-time"


async def run(stand: Stand, plan: Plan) -> None:
    """Fill the topic, start the job, compare."""
    bootstrap, (readings, trigger) = await stand.kafka(), plan
    topics = await make_topics(bootstrap)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=20) as producer:
        sender = Sender(producer, topics.source)
        begin = int(time.time() * 1000) - readings * STEP_MS
        for number in range(readings):
            await sender.send(f"s{number % SENSORS}", number % 61 - 20, begin + number * STEP_MS)
        await sender.flush()
    async with Job(bootstrap, topics, stand.directory, "--trigger", trigger, "--interval", "5s") as job:
        began = time.monotonic()
        await job.start()
        verdict = await settled(bootstrap, topics, sender, 240)
        seconds = time.monotonic() - began
        code = await job.stop()
    largest = max((line["rows"] for line in job.batches() if line.get("trigger") != trigger), default=0)
    stand.row(trigger=trigger, readings=readings, s=round(seconds), verdict=str(verdict), **{"largest batch": largest})
    stand.check(verdict.kept and code == 0, f"exit code {code}: {verdict}")


SCENARIOS = (Scenario("backlog", "start a job on minutes of stored readings", Plan(), run),)
