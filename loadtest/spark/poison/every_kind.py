"""A job of each kind, with each trigger, under a stream of everything that a topic can hold.

Two devices have clocks that are 50 s and ten minutes fast. Every reading of a good device, and of these two, must be
counted; none may be a dead letter; the job must end with 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import duckdb
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.spark.job import Job
from loadtest.spark.lakes import FORMATS
from loadtest.spark.poison.jobs import GOOD, IN_REAL_TIME, KINDS, LAKES, counted, job_file, suffix
from loadtest.spark.poison.records import ANY_TIME, LIMIT, Record, arbitrary, extremes, fast, good, send
from loadtest.spark.readings import SLIDE_MS, WINDOW_MS, Topics
from loadtest.verify import stored

MAX_TEMPERATURE: Final = "max-temperature"
EACH_KIND: Final = (*KINDS, MAX_TEMPERATURE, *LAKES)
TICK_S: Final = 0.5
SETTLE_S: Final = 120.0


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        kind: only this kind; repeatable.
        trigger: only this one; otherwise both.
        ticks: readings of each device, half a second apart.
    """

    kind: tuple[str, ...] = ()
    trigger: Literal["micro-batch", "real-time"] | None = None
    ticks: int = 20


async def run(stand: Stand, plan: Plan) -> None:
    """Run the jobs one after the other: each must count every reading and end with 0."""
    for trigger in (plan.trigger,) if plan.trigger else ("micro-batch", "real-time"):
        for kind in plan.kind or EACH_KIND:
            if trigger == "micro-batch" or kind in (*IN_REAL_TIME, MAX_TEMPERATURE):
                place = stand.directory / f"{kind}-{trigger}"
                place.mkdir()
                await _one(stand, place, kind, trigger, plan.ticks)


async def _one(stand: Stand, directory: Path, kind: str, trigger: str, ticks: int) -> None:
    """Run a job, and check it."""
    bootstrap = await stand.kafka()
    topics = await _make_topics(bootstrap)
    real_time = trigger == "real-time"
    options = ["--trigger", trigger, *(["--interval", "5s"] if real_time else [])]
    file = None
    if kind != MAX_TEMPERATURE:
        file = directory / f"job{suffix(kind)}"
        file.write_text(job_file(kind, topics, directory, real_time=real_time))
    async with Job(bootstrap, topics, directory, *options, file=file) as job:
        await job.start()
        await _stream(bootstrap, topics.source, ticks, field=b"temperature" if file is None else b"x")
        found = await _settled(bootstrap, topics, directory, kind, ticks)
        code = await job.stop()
    letters = [record.key async for record in stored(bootstrap, topics.dead_letter)]
    wrong = sum(key is not None and key.decode(errors="replace") in GOOD for key in letters)
    wanted = _wanted(kind, ticks)
    stand.row(job=kind, trigger=trigger, counted=found, readings=wanted, letters=len(letters), wrong=wrong)
    right = found == wanted and not wrong and code == 0
    stand.check(right, f"{kind}, {trigger}: {found} of {wanted}, {wrong} dead letters of good readings, exit {code}")


def _wanted(kind: str, ticks: int) -> int:
    """Return how many readings the results count in all: each is in several windows of max-temperature."""
    return len(GOOD) * ticks * (WINDOW_MS // SLIDE_MS if kind == MAX_TEMPERATURE else 1)


async def _make_topics(bootstrap: str) -> Topics:
    name = f"poison-{time.time_ns()}"
    topics = Topics(name, f"{name}-results", f"{name}-dlq")
    limit = {"max.message.bytes": str(LIMIT)}
    configs = {topics.source: ANY_TIME, topics.target: limit, topics.dead_letter: limit}
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1, topic_configs=config) for topic, config in configs.items()])
    finally:
        await admin.close()
    return topics


async def _stream(bootstrap: str, topic: str, ticks: int, *, field: bytes) -> None:
    """Send the readings of each tick, and a part of everything else between them."""
    others = [*extremes(), *arbitrary(ticks)]
    for tick in range(ticks):
        part = others[tick * len(others) // ticks : (tick + 1) * len(others) // ticks]
        readings = [*good(tick), *part, *fast(tick, round(time.time() * 1_000))]
        await send(bootstrap, topic, _with_field(readings, field))
        await asyncio.sleep(TICK_S)


def _with_field(records: Sequence[Record], field: bytes) -> list[Record]:
    return [{**one, "value": one["value"] and one["value"].replace(b'"x"', b'"%s"' % field)} for one in records]


async def _settled(bootstrap: str, topics: Topics, directory: Path, kind: str, ticks: int) -> int:
    """Return the readings that the results count: all, or those that they count after `SETTLE_S`.

    Meanwhile another device goes on sending, so that windows and sessions close.
    """
    deadline = time.monotonic() + SETTLE_S
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        while True:
            found = await _found(bootstrap, topics, directory, kind, ticks)
            if found == _wanted(kind, ticks) or time.monotonic() > deadline:
                return found
            await producer.send_and_wait(topics.source, b'{"n": 1, "x": 1, "temperature": 1, "s": ""}', b"closes")
            await asyncio.sleep(TICK_S)


async def _found(bootstrap: str, topics: Topics, directory: Path, kind: str, ticks: int) -> int:
    if kind in LAKES:
        return await asyncio.to_thread(_good_rows, [str(path) for path in FORMATS[kind](directory / kind).files()])
    counts = await counted(bootstrap, topics.target)
    if kind == "last-known":  # its newest result has the last reading
        return ticks * sum(count > 0 for count in counts.values())
    return sum(counts.values())


def _good_rows(files: list[str]) -> int:
    """Return the rows of good devices without an error, in the files of an archive."""
    if not files:
        return 0
    wanted = ", ".join(f"'{device}'::BLOB" for device in GOOD)
    rows = duckdb.sql(
        f"SELECT count(*) FROM read_parquet({files}, union_by_name = true) WHERE key IN ({wanted}) AND error IS NULL"
    )
    [(count,)] = rows.fetchall()  # type: ignore[union-attr]  # a SELECT returns a relation
    return int(count)


SCENARIOS = (Scenario("poison", "jobs of each kind under everything that a topic can hold", Plan(), run),)
