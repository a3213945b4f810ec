"""Dead letters are replayed twice while the job is killed repeatedly.

A read_committed consumer must see each record exactly once in its original topic, unchanged, and in order within its
partition. The records of aborted transactions, which only a read_uncommitted consumer sees, are counted and printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.gateway import children_cpu
from loadtest.spark.readings import Topics, make_topics
from loadtest.start import start_process
from loadtest.verify import stored

DEVICES: Final = 50
EVERY_TWICE: Final = 100
"""One in this many letters is in the topic once; all others are there twice, as after a killed job has rerun."""
BEGIN_MS: Final = 1_700_000_000_000
FILE: Final = """
job = "dlq-replay"
name = "{name}"
source = {{ topics = ["{letters}"] }}
run = {{ bootstrap_servers = "{bootstrap}" }}
"""


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        letters: dead letters.
        kills: of the job.
        rate: dead letters per second, while it is killed.
        seed: of all random choices.
    """

    letters: int = 10_000
    kills: int = 5
    rate: int = 500
    seed: int = 0


class Origin(NamedTuple):
    """Original position of a record."""

    partition: int
    offset: int


class Content(NamedTuple):
    """Original content of a record."""

    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    timestamp: int


async def run(stand: Stand, plan: Plan) -> None:
    """Kill the job repeatedly, let it finish, replay again, and check."""
    bootstrap, directory = await stand.kafka(), stand.directory
    rng = random.Random(plan.seed)
    topics = await make_topics(bootstrap)
    letters = await _fill(bootstrap, topics, plan.letters)
    file = directory / "replay.toml"
    file.write_text(FILE.format(name=topics.source, letters=topics.dead_letter, bootstrap=bootstrap))
    for kill in range(plan.kills):
        # With a rate limit the job mostly waits between two transactions; without one it is always within one.
        done = await _killed(file, plan.rate if kill % 2 else None, rng)
        stand.say(f"kill {kill + 1} of {plan.kills}: {done:,} records reported in this run")
    began, before = time.monotonic(), children_cpu()
    first = await _finished(file)
    seconds, cpu = time.monotonic() - began, children_cpu() - before
    second = await _finished(file)
    found, reordered, wrong = await compare(bootstrap, topics.source, letters)
    everything = sum([1 async for record in stored(bootstrap, topics.source) if _replayed(record)])
    lost, double = len(letters.keys() - found.keys()), sum(count - 1 for count in found.values())
    bad = {
        "lost": lost, "duplicates": double, "out of order": reordered, "changed": wrong,
        "replayed twice": second["records"],
    }  # fmt: skip
    stand.row(**{
        "kills": plan.kills, "letters": len(letters), **bad, "last run": first["records"], "s": round(seconds, 1),
        "CPU s": round(cpu, 1), "more to read_uncommitted": everything - found.total(),
    })  # fmt: skip
    stand.problems += [f"{count} {what}" for what, count in bad.items() if count]
    stand.check(found.total() == len(letters), f"{found.total()} of {len(letters)} letters")


async def _fill(bootstrap: str, topics: Topics, count: int) -> dict[Origin, Content]:
    """Send twice as many records as letters, and a dead letter for every second record."""
    letters: dict[Origin, Content] = {}
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=20) as producer:
        sent: list[tuple[Content, Any]] = []
        for number in range(2 * count):
            key = b"s%d" % (number % DEVICES)
            was = Content(key, b'{"n": %d}' % number, (("content-type", b"application/json"),), BEGIN_MS + number)
            headers = list(was.headers)
            future = await producer.send(topics.source, was.value, key, headers=headers, timestamp_ms=was.timestamp)
            sent.append((was, future))
        await producer.flush()
        for number, (was, future) in enumerate(sent):
            if number % 2:
                at = future.result()
                letters[Origin(at.partition, at.offset)] = was
        for number, (origin, was) in enumerate(letters.items()):
            for _ in range(1 if number % EVERY_TWICE else 2):
                headers = [
                    *was.headers, ("error", b"no good"), ("origin.topic", topics.source.encode()),
                    ("origin.partition", b"%d" % origin.partition), ("origin.offset", b"%d" % origin.offset),
                    ("origin.timestamp", b"%d" % was.timestamp),
                ]  # fmt: skip
                await producer.send(topics.dead_letter, was.value, was.key, headers=headers)
        await producer.flush()
    return letters


async def _start(file: Path, *options: str) -> asyncio.subprocess.Process:
    argv = [sys.executable, "-m", "gateway", "spark", "run", str(file), *options]
    return await start_process(*argv, stdout=asyncio.subprocess.PIPE, start_new_session=True)


async def _killed(file: Path, rate: int | None, rng: random.Random) -> int:
    """Start the job, kill it shortly after its first transaction, and return how many records it reported."""
    process = await _start(file, *([] if rate is None else ["--rate", str(rate)]))
    assert process.stdout is not None
    first = await process.stdout.readline()
    await asyncio.sleep(rng.uniform(0, 0.05 if rate is None else 1.5))
    with contextlib.suppress(ProcessLookupError):  # already finished
        os.killpg(process.pid, signal.SIGKILL)
    rest = await process.stdout.read()
    await process.wait()
    lines = [json.loads(line) for line in (first + rest).splitlines(keepends=True) if line.endswith(b"\n")]
    return sum(line["records"] for line in lines if line["kind"] == "replayed")


async def _finished(file: Path) -> dict[str, Any]:
    """Run the job to its end and return its summary."""
    process = await _start(file)
    out, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the replay ended with {process.returncode}")
    summary: dict[str, Any] = json.loads(out.splitlines()[-1])
    return summary


def _replayed(record: Any) -> bool:
    return any(name == "origin.replay" for name, _ in record.headers)


async def compare(bootstrap: str, topic: str, letters: dict[Origin, Content]) -> tuple[Counter[Origin], int, int]:
    """Count the occurrences of each record, the records out of order, and the records that were changed."""
    found: Counter[Origin] = Counter()
    newest: dict[int, int] = {}
    reordered = wrong = 0
    async for record in stored(bootstrap, topic, "read_committed"):
        if not _replayed(record):
            continue
        headers = dict(record.headers)
        origin = Origin(int(headers["origin.partition"]), int(headers["origin.offset"]))
        found[origin] += 1
        reordered += origin.offset < newest.get(origin.partition, -1)
        newest[origin.partition] = max(newest.get(origin.partition, -1), origin.offset)
        own = tuple(header for header in record.headers if not header[0].startswith("origin."))
        same = letters.get(origin) == Content(record.key, record.value, own, record.timestamp)
        wrong += not (same and record.partition == origin.partition and headers["origin.topic"] == topic.encode())
    return found, reordered, wrong


SCENARIOS = (Scenario("replay", "replay dead letters twice, with a job that is killed meanwhile", Plan(), run),)
