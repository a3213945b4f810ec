"""A slow job with a long backlog, beside a client of the gateway and one of Kafka.

The job must shorten its batches on its own, and neither client may be affected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.beside import beside
from loadtest.clients.crowd.single import SinglePublisher
from loadtest.clients.joining import join
from loadtest.clients.pace import at_rate
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.gateway import GatewayProcess
from loadtest.report import Latencies
from loadtest.spark.filling import fill, in_turn
from loadtest.spark.job import Job
from loadtest.spark.readings import Topics, make_topics

SENSORS: Final = 1_000
WANTED_S: Final = 10.0
"""The longest batch that the job aims for; it adapts when batches exceed this by half."""
SHORT: Final = 3
"""Batches in a row that must be short."""
DONE_S: Final = 600.0
BESIDE_MS: Final = {50: 5.0, 99: 50.0}
"""The allowed increase of a percentile in ms beside the job, or half of it, whichever is more."""
JOB: Final = """
from pyspark.sql import functions as F
from spark_sinks.spec.jobs import Transform
from spark_sinks.spec.parts import ResultSink, Run, Source

JOB = Transform(
    name="slow",
    source=Source(topics=("{source}",), decode="none", dead_letters="{letters}"),
    sink=ResultSink(kafka="{target}"),
    run=Run(checkpoint="{checkpoint}", max_offsets_per_trigger={most}),
)


def transform(readings):
    # Simulates a slow external service.
    a_millisecond = F.reflect(F.lit("java.lang.Thread"), F.lit("sleep"), F.lit(1).cast("bigint"))
    return readings.select("key", F.concat("key", a_millisecond).alias("value"))
"""


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        readings: of the backlog.
        most: the most records of a batch.
        rate: messages per second of each client.
        seconds: of the clients without the job.
    """

    readings: int = 400_000
    most: int = 40_000
    rate: int = 100
    seconds: float = 20.0


class Seen(NamedTuple):
    """The clients' latencies: of the gateway, and of Kafka."""

    gateway: Latencies
    kafka: Latencies

    def __str__(self) -> str:
        return ", ".join(
            f"{name} p50 {found.milliseconds(50):.1f} ms, p99 {found.milliseconds(99):.1f} ms of {found.count:,}"
            for name, found in zip(self._fields, self, strict=True)
        )

    def harmed(self, before: Seen) -> bool:
        """Return whether they are worse than before."""
        return any(
            now.milliseconds(of) > was.milliseconds(of) + max(more, was.milliseconds(of) / 2)
            for now, was in zip(self, before, strict=True)
            for of, more in BESIDE_MS.items()
        )


async def run(stand: Stand, plan: Plan) -> None:
    """Measure alone and beside the job: its batches must become short, and no client be affected."""
    async with stand.gateway() as gateway:
        await _run(stand, plan, gateway)


async def _run(stand: Stand, plan: Plan, gateway: GatewayProcess) -> None:
    bootstrap, directory = gateway.kafka, stand.directory
    topics, beside_it = await make_topics(bootstrap), await make_topics(bootstrap)
    await fill(bootstrap, topics.source, 3, in_turn(plan.readings, SENSORS, 20))
    file = directory / "slow.py"
    file.write_text(
        JOB.format(
            source=topics.source, target=topics.target, letters=topics.dead_letter,
            checkpoint=directory / "checkpoint", most=plan.most,
        )
    )  # fmt: skip
    mqtt = gateway.address("mqtt")
    async with Job(bootstrap, topics, directory, file=file, quick_start=False) as job:
        alone = await _measured(bootstrap, mqtt, beside_it, plan.rate, asyncio.sleep(plan.seconds))
        stand.row(**{"": "alone", "clients": str(alone)})
        await job.start()
        await job.wait_until(lambda: len(job.batches()) > 0, DONE_S)
        with_it = await _measured(bootstrap, mqtt, beside_it, plan.rate, job.wait_until(lambda: _short(job), DONE_S))
        left = plan.readings - job.rows()
        stand.row(**{
            "": "beside the job", "clients": str(with_it), "left": left, "JVM MiB": job.most_resident() >> 20,
            "batches": ", ".join(f"{line['rows']:,} in {line['duration_ms'] / 1000:.0f} s" for line in job.batches()),
        })  # fmt: skip
        code = await job.stop()
    stand.check(not with_it.harmed(alone), f"the clients: {alone} alone, {with_it} beside the job")
    stand.check(left > 0 and code == 0, f"{left} records were left, exit code {code}")


def _short(job: Job) -> bool:
    newest = job.batches()[-SHORT:]
    return len(newest) == SHORT and all(line["duration_ms"] < 1_500 * WANTED_S for line in newest)


async def _measured(bootstrap: str, mqtt: tuple[str, int], topics: Topics, rate: int, while_: Awaitable[None]) -> Seen:
    """Measure both clients during `while_`; ConnectionError if the gateway refused a message or closed the socket."""
    client, kafka = await join(SinglePublisher("modest"), mqtt), Latencies()
    await client.connected
    async with (
        AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer,
        beside(_publish(client, topics.source, rate), _produce(producer, topics.target, kafka, rate)),
    ):
        await while_
    if client.refused:
        raise ConnectionError(f"{client.refused} messages were refused, or the connection was lost")
    client.close()
    return Seen(client.latencies, kafka)


async def _publish(client: SinglePublisher, topic: str, rate: int) -> None:
    async for number in at_rate(rate, 0.005):
        client.publish(f"{topic}/d{number % 50}", b"{}")


async def _produce(producer: AIOKafkaProducer, topic: str, latencies: Latencies, rate: int) -> None:
    while True:
        began = time.perf_counter()
        await producer.send_and_wait(topic, b"{}")
        latencies.record(time.perf_counter() - began)
        await asyncio.sleep(1 / rate)


SCENARIOS = (Scenario("behind", "let a job fall far behind, beside a client of the gateway", Plan(), run),)
