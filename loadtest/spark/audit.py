"""Scenario `audit`: a million records, and a gateway that reports one more acknowledged record than exists.

The audit must name its topic, partition and minute, and nothing else: no transaction marker, no aborted record, and no
record of another writer.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from aiohttp import web
from aiokafka import AIOKafkaProducer

from loadtest.gateway import children_cpu
from loadtest.spark.readings import make_topics
from loadtest.start import start_process
from loadtest.verify import stored

PARTITIONS: Final = 4
BATCH: Final = 2_000
BEGIN_MS: Final = 1_700_000_040_000  # a full minute
HEADERS: Final = [("gw.protocol", b"mqtt5")]
FILE: Final = """
job = "bridge-audit"
name = "{topic}"
source = {{ topics = ["{topic}"], gateways = ["{gateway}"] }}
sink = {{ kafka = "{audit}" }}
run = {{ bootstrap_servers = "{bootstrap}" }}
"""


class Plan(NamedTuple):
    """Parameters."""

    records: int
    minutes: int
    seed: int


class Figures:
    """The metrics of a simulated gateway: per partition the count, the first offset, and the offset after the last."""

    def __init__(self, topic: str) -> None:
        self.places: dict[int, list[int]] = {}
        self._topic = topic

    def stored(self, partition: int, base: int, count: int) -> None:
        """Record an acknowledged batch."""
        place = self.places.setdefault(partition, [0, base, base])
        place[0] += count
        place[2] = base + count

    async def answer(self, _: web.Request) -> web.Response:
        """Serve `/metrics`."""
        lines = ["process_start_time_seconds 1.0"]
        for partition, values in self.places.items():
            labels = f'{{topic="{self._topic}",partition="{partition}"}}'
            for name, value in zip(("stored_total", "first_offset", "next_offset"), values, strict=True):
                lines.append(f"trivium_publisher_{name}{labels} {value}")
        return web.Response(text="\n".join([*lines, ""]))


async def run(bootstrap: str, directory: Path, plan: Plan) -> int:
    """Store, audit, compare; 0 if exactly the missing record was found."""
    rng = random.Random(plan.seed)
    topics = await make_topics(bootstrap, PARTITIONS)
    figures = Figures(topics.source)
    app = web.Application()
    app.router.add_get("/metrics", figures.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    file = directory / "audit.toml"
    gateway = f"http://{host}:{port}"
    file.write_text(FILE.format(topic=topics.source, audit=topics.target, gateway=gateway, bootstrap=bootstrap))
    lost = rng.randrange(plan.minutes), rng.randrange(PARTITIONS)
    cpu = 0.0
    began = time.monotonic()
    async with (
        AIOKafkaProducer(bootstrap_servers=bootstrap, max_batch_size=1 << 20) as producer,
        AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=topics.source) as foreign,
    ):
        for minute in range(plan.minutes):
            await _minute(producer, topics.source, figures, plan.records // plan.minutes, BEGIN_MS + minute * 60_000)
            await _others(foreign, topics.source)
            if minute == lost[0]:
                figures.places[lost[1]][0] += 1
            await _minute(
                producer, topics.source, figures, PARTITIONS, BEGIN_MS + minute * 60_000
            )  # with markers in between
            before = children_cpu()
            code = await _look(file)
            cpu += children_cpu() - before
            if code != (minute == lost[0]):
                print(f"minute {minute}: the audit ended with {code}")
                return 1
    await runner.cleanup()
    await asyncio.sleep(1)  # Kafka acknowledges a commit before readers see it
    found = [json.loads(record.value) async for record in stored(bootstrap, topics.target, "read_committed")]
    bad = [one for one in found if one["verdict"] != "whole"]
    total = sum(one["stored"] for one in found)
    print(
        f"{total:,} records in {plan.minutes} minutes and {PARTITIONS} partitions, one more acknowledged: "
        f"{time.monotonic() - began:.0f} s, {total / cpu:,.0f} records per CPU second of the audit, its starts included"
    )
    for one in bad:
        print(f"{one['verdict']}: {one['missing']} of {one['topic']}-{one['partition']}, {', '.join(one['minutes'])}")
    lost_at = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(BEGIN_MS / 1000 + 60 * lost[0]))
    right = [(one["topic"], one["partition"], list(one["minutes"]), one["missing"]) for one in bad]
    return 0 if right == [(topics.source, lost[1], [lost_at], 1)] else 1


async def _minute(producer: AIOKafkaProducer, topic: str, figures: Figures, count: int, at: int) -> None:
    """Send the records of a minute to all partitions."""
    sent: list[tuple[int, int, Any]] = []
    for partition in range(PARTITIONS):
        left = count // PARTITIONS
        while left:
            batch = producer.create_batch()
            number = 0
            while number < min(left, BATCH) and batch.append(
                key=None, value=b"21.5", timestamp=at + number % 60_000, headers=HEADERS
            ):
                number += 1
            batch.close()
            sent.append((partition, number, await producer.send_batch(batch, topic, partition=partition)))
            left -= number
    for partition, number, future in sent:
        figures.stored(partition, (await future).offset, number)


async def _others(producer: AIOKafkaProducer, topic: str) -> None:
    """Send what must not disturb: another writer's transaction, and an aborted one with a gateway's headers."""
    async with producer.transaction():
        for partition in range(PARTITIONS):
            await producer.send(topic, b"of others", partition=partition)
    await producer.begin_transaction()
    for partition in range(PARTITIONS):
        await producer.send_and_wait(topic, b"aborted", partition=partition, headers=HEADERS)
    await producer.abort_transaction()


async def _look(file: Path) -> int:
    argv = [sys.executable, "-m", "gateway", "spark", "run", str(file), "--once"]
    process = await start_process(*argv, stdout=asyncio.subprocess.DEVNULL)
    return await process.wait()
