"""Scenario `last`: kills a last-known job repeatedly while values arrive out of order.

In the end its topic must have the newest value of every device, and in micro-batches no device may ever go back.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.beside import beside
from loadtest.clients.pace import at_rate
from loadtest.spark import killing
from loadtest.spark.job import Job
from loadtest.spark.readings import Topics, make_topics
from loadtest.verify import stored

DEVICES: Final = 200
EVERY: Final = 50
"""One in this many records has no value; as the newest one it deletes its device."""
SHUFFLED_MS: Final = 3_000
SETTLE_S: Final = 300.0
CREATION_TIME: Final = "creation-time"
ORIGIN_TIME: Final = "origin.time"
ORIGIN_OFFSET: Final = "origin.offset"
"""Headers with the time of a record, and with the time and offset of a result's record."""
FILE: Final = """
job = "last-known"
source = {{ topics = ["{source}"], decode = "none", dead_letters = "{letters}" }}
sink = {{ kafka = "{target}" }}
run = {{ checkpoint = "{checkpoint}", max_offsets_per_trigger = 10000 }}
"""


class Plan(NamedTuple):
    """Parameters."""

    kills: int
    rate: int
    trigger: str
    seed: int


class Value(NamedTuple):
    """A device's value; the greater one is the newer."""

    time: int  # the record's own time, epoch ms
    offset: int
    value: bytes  # empty if null


class Verdict(NamedTuple):
    """The result of comparing the topic with the newest values."""

    devices: int
    missing: int
    wrong: int  # another value than the newest
    results: int
    back: int  # results older than one before them

    def kept(self, trigger: str) -> bool:
        """Return whether nothing was violated; a killed real-time job may go back briefly."""
        return self.missing == self.wrong == 0 and (trigger == "real-time" or self.back == 0)


async def run(bootstrap: str, directory: Path, plan: Plan) -> int:
    """Kill, finish, compare; 0 if nothing was violated."""
    rng = random.Random(plan.seed)
    topics = await make_topics(bootstrap, compacted=True)
    file = directory / "last.toml"
    file.write_text(
        FILE.format(
            source=topics.source, target=topics.target, letters=topics.dead_letter, checkpoint=directory / "checkpoint"
        )
    )
    options = ["--trigger", plan.trigger, *(["--interval", "5s"] if plan.trigger == "real-time" else [])]
    async with Job(bootstrap, topics, directory, *options, file=file) as job:
        async with (
            AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5) as producer,
            beside(_send(producer, topics.source, plan.rate, rng)),
        ):

            def on_kill(kill: int, moment: str) -> None:
                print(f"last-known: kill {kill} of {plan.kills} ({moment})", flush=True)

            await killing.rounds(job, plan.kills, rng, scans=True, on_kill=on_kill)
            await job.start()
        verdict = await _settled(bootstrap, topics, plan.trigger)
        code = await job.stop()
    print(f"last-known, {plan.trigger}, {plan.kills} kills: {verdict}")
    return 0 if verdict.kept(plan.trigger) and code == 0 else 1


async def _settled(bootstrap: str, topics: Topics, trigger: str) -> Verdict:
    """Return the verdict when nothing is missing, or after `SETTLE_S`."""
    newest: dict[bytes, Value] = {}
    async for record in stored(bootstrap, topics.source):
        position = _value(record, CREATION_TIME, record.offset)
        newest[_key(record)] = max(newest.get(_key(record), position), position)
    deadline = time.monotonic() + SETTLE_S
    while True:
        verdict = await _compare(bootstrap, topics, newest)
        if verdict.kept(trigger) or time.monotonic() > deadline:
            return verdict
        await asyncio.sleep(1)


async def _compare(bootstrap: str, topics: Topics, newest: dict[bytes, Value]) -> Verdict:
    found: dict[bytes, Value] = {}
    results = back = 0
    async for record in stored(bootstrap, topics.target):
        key, headers = _key(record), dict(record.headers)
        position = _value(record, ORIGIN_TIME, int(headers[ORIGIN_OFFSET]))
        results += 1
        back += key in found and position < found[key]
        found[key] = position
    missing = len(newest.keys() - found.keys())
    wrong = sum(key in found and found[key] != value for key, value in newest.items())
    return Verdict(len(newest), missing, wrong, results, back)


def _key(record: Any) -> bytes:
    key: bytes = record.key
    return key


def _value(record: Any, header: str, offset: int) -> Value:
    return Value(int(dict(record.headers)[header]), offset, record.value or b"")


async def _send(producer: AIOKafkaProducer, topic: str, rate: int, rng: random.Random) -> None:
    async for number in at_rate(rate):
        at = int(time.time() * 1000) - rng.randrange(SHUFFLED_MS)
        value = b"%d" % number if number % EVERY else None
        key = b"d%d" % rng.randrange(DEVICES)
        await producer.send(topic, value, key, headers=[(CREATION_TIME, b"%d" % at)])
