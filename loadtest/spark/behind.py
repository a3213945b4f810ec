"""Scenario `behind`: a slow job with a long backlog, beside a client of the gateway and one of Kafka.

The job must shorten its batches on its own, and neither client may be affected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.beside import beside
from loadtest.clients.joining import join
from loadtest.clients.pace import at_rate
from loadtest.clients.single import SinglePublisher
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
    """Parameters."""

    readings: int
    most: int  # the most records of a batch
    rate: int
    seconds: float


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


async def run(bootstrap: str, directory: Path, plan: Plan, gateway: GatewayProcess | None) -> int:
    """Measure alone and beside the job; 0 if its batches became short, and no client was affected."""
    own = None if gateway else GatewayProcess(directory, bootstrap)
    if own is not None:
        await own.start()
    served = own or gateway
    assert served is not None
    topics, beside_it = await make_topics(bootstrap), await make_topics(bootstrap)
    await fill(bootstrap, topics.source, 3, in_turn(plan.readings, SENSORS, 20))
    file = directory / "slow.py"
    file.write_text(
        JOB.format(
            source=topics.source, target=topics.target, letters=topics.dead_letter,
            checkpoint=directory / "checkpoint", most=plan.most,
        )
    )  # fmt: skip
    mqtt = served.address("mqtt")
    try:
        async with Job(bootstrap, topics, directory, file=file, quick_start=False) as job:
            alone = await _measured(bootstrap, mqtt, beside_it, plan.rate, asyncio.sleep(plan.seconds))
            print(f"alone: {alone}", flush=True)
            await job.start()
            await job.wait_until(lambda: len(job.batches()) > 0, DONE_S)
            with_it = await _measured(
                bootstrap, mqtt, beside_it, plan.rate, job.wait_until(lambda: _short(job), DONE_S)
            )
            print(f"beside the job: {with_it}", flush=True)
            resident, left = job.most_resident(), plan.readings - job.rows()
            code = await job.stop()
    finally:
        if own is not None:
            await own.stop()
    batches = ", ".join(f"{line['rows']:,} in {line['duration_ms'] / 1000:.0f} s" for line in job.batches())
    print(f"batches: {batches}; {left:,} records were left; JVM {resident >> 20:,} MiB at most")
    return 0 if not with_it.harmed(alone) and left > 0 and code == 0 else 1


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
