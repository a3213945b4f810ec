"""What is told of a job in real time follows what it reads, not its checkpoints."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from pyspark.sql import SparkSession

from spark_sinks.spark.progress import offsets_sum
from spark_sinks.spark.real_time_reads import RealTimeReads
from spark_sinks.spec.triggers import REAL_TIME
from telemetry.job_figures import Figures, figures
from tests.support.waiting import wait_until

STATELESS = """
job = "anomalies"
by = "key"
source = { topics = ["SOURCE"], columns = { a = "double" }, dead_letters = "DEAD" }
thresholds = { a = { above = 0 } }
sink = { kafka = "TARGET" }
run = { checkpoint = "CHECKPOINT" }
"""
STATEFUL = """
job = "window-stats"
by = ["key"]
source = { topics = ["SOURCE"], columns = { a = "double" }, dead_letters = "DEAD" }
window = { length = "10s" }
aggregates = { n = "count(*)" }
sink = { kafka = "TARGET" }
run = { checkpoint = "CHECKPOINT" }
"""


async def send(producer: AIOKafkaProducer, topic: str, counts: dict[int, int]) -> None:
    for partition, count in counts.items():
        for number in range(count):
            await producer.send(topic, json.dumps({"a": number}).encode(), b"%d" % number, partition)
    await producer.flush()


def told(job: Any) -> Figures:
    [found] = figures(job.metrics.render().decode())
    return found


@pytest.mark.parametrize("text", [STATELESS, STATEFUL], ids=["stateless", "stateful"])
async def test_lag_and_rate_of_real_time_do_not_wait_for_a_checkpoint(
    declare: Any, run_job: Any, producer: AIOKafkaProducer, new_topic: Any, text: str
) -> None:
    source, target, dead = [await new_topic(partitions=n) for n in (3, 1, 1)]
    for name, topic in (("SOURCE", source), ("TARGET", target), ("DEAD", dead)):
        text = text.replace(name, topic)
    job = await run_job(declare(text, trigger=REAL_TIME, interval_ms=600_000))
    sent = {0: 70, 1: 200, 2: 5}
    await send(producer, source, sent)

    await wait_until(lambda: told(job).lag == 0 and told(job).rows == 275)
    assert told(job).rows_per_second > 0
    assert not job.progress  # no checkpoint was made
    assert job.metrics.statistics().position == {source: {str(part): count for part, count in sent.items()}}

    await send(producer, source, {1: 30})
    await wait_until(lambda: told(job).rows == 305 and told(job).lag == 0)


async def test_no_record_is_counted_twice_over_checkpoints(
    bootstrap: str, declare: Any, run_job: Any, producer: AIOKafkaProducer, new_topic: Any
) -> None:
    source, target, dead = [await new_topic(partitions=n) for n in (2, 1, 1)]
    text = STATELESS.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", dead)
    job = await run_job(declare(text, trigger=REAL_TIME, interval_ms=5_000))
    sent, seen = 0, [0]
    began = time.monotonic()

    def whole() -> bool:
        seen.append(told(job).rows)
        return seen[-1] >= sent

    while len(job.progress) < 2:
        assert time.monotonic() - began < 60
        await send(producer, source, {0: 9, 1: 11})
        sent += 20
        await wait_until(whole)
    await wait_until(lambda: told(job).lag == 0)
    assert seen == sorted(seen)
    assert seen[-1] == sent

    def position() -> int:
        return offsets_sum({topic: dict(parts) for topic, parts in job.metrics.statistics().position.items()})

    await wait_until(lambda: position() >= sent)  # as of the next checkpoint
    assert position() == sent
    await job.stop()
    assert told(job).rows == sent


def test_several_jobs_of_a_session_may_listen(spark: SparkSession) -> None:
    first, second = RealTimeReads(spark), RealTimeReads(spark)
    first.begin()
    second.begin()
    second.end()
    first.end()
