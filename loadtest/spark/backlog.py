"""Scenario `backlog`: starts a job on stored readings of an hour and more, in order; none may be missing."""

from __future__ import annotations

import time
from pathlib import Path

from aiokafka import AIOKafkaProducer

from loadtest.spark.job import Job
from loadtest.spark.readings import Sender, make_topics, settled

SENSORS = 200
STEP_MS = 50  # between readings


async def run(bootstrap: str, directory: Path, readings: int, trigger: str) -> int:
    """Fill the topic, start the job, compare; 0 if nothing is missing."""
    topics = await make_topics(bootstrap)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=20) as producer:
        sender = Sender(producer, topics.source)
        begin = int(time.time() * 1000) - readings * STEP_MS
        for number in range(readings):
            await sender.send(f"s{number % SENSORS}", number % 61 - 20, begin + number * STEP_MS)
        await sender.flush()
    async with Job(bootstrap, topics, directory, "--trigger", trigger, "--interval", "5s") as job:
        began = time.monotonic()
        await job.start()
        verdict = await settled(bootstrap, topics, sender, 240)
        seconds = time.monotonic() - began
        code = await job.stop()
    batches = [line for line in job.reports if line["kind"] == "progress"]
    largest = max((line["rows"] for line in batches if line.get("trigger") != trigger), default=0)
    print(f"{trigger}: {readings:,} readings, {seconds:.0f} s, largest batch while catching up {largest:,}: {verdict}")
    return 0 if verdict.kept and code == 0 else 1
