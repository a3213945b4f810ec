"""A million records, and a gateway that reports one more acknowledged record than exists.

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

from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
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
    """Parameters: how many records, in how many minutes of their time; the seed chooses the lost one."""

    records: int = 1_000_000
    minutes: int = 10
    seed: int = 0


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


async def run(stand: Stand, plan: Plan) -> None:
    """Store, audit, compare: exactly the missing record must be found."""
    bootstrap, directory = await stand.kafka(), stand.directory
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
            stand.check(code == (minute == lost[0]), f"minute {minute}: the audit ended with {code}")
    await runner.cleanup()
    await asyncio.sleep(1)  # Kafka acknowledges a commit before readers see it
    found = [json.loads(record.value) async for record in stored(bootstrap, topics.target, "read_committed")]
    bad = [one for one in found if one["verdict"] != "whole"]
    total = sum(one["stored"] for one in found)
    stand.row(
        records=total, minutes=plan.minutes, partitions=PARTITIONS, s=round(time.monotonic() - began),
        **{"records per CPU second, starts included": round(total / cpu)},
    )  # fmt: skip
    lost_at = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(BEGIN_MS / 1000 + 60 * lost[0]))
    right = [(one["topic"], one["partition"], list(one["minutes"]), one["missing"]) for one in bad]
    stand.check(right == [(topics.source, lost[1], [lost_at], 1)], f"the audit found {right}")


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


SCENARIOS = (Scenario("audit", "hide one record of a million", Plan(), run),)
