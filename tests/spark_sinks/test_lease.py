"""Two drivers on one checkpoint: Kafka's fence ends the earlier one, and the results are those of one job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from spark_sinks.spark.checkpoint import HELD
from spark_sinks.spark.lease import PREFIX, LeaseError
from tests.spark_sinks.test_edited_jobs import START_MS, STATS, Job
from tests.spark_sinks.test_edited_jobs import job as job  # noqa: PLC0414 - a fixture
from tests.support.secured import secured_broker as secured_broker  # noqa: PLC0414 - a fixture
from tests.support.topics import read_all

ROOT = Path(__file__).parents[2]


async def send(producer: AIOKafkaProducer, topic: str, count: int) -> None:
    """Send readings of one window."""
    for number in range(count):
        await producer.send(topic, json.dumps({"a": number, "b": 1, "at": START_MS + 1}).encode(), b"k")
    await producer.flush()


async def counts(bootstrap: str, topic: str) -> list[int]:
    """The counts of the newest window in the order of their results."""
    values = [json.loads(record.value) for record in await read_all(bootstrap, topic)]
    return [value["n"] for value in values if value["start"] == START_MS]


async def test_a_second_driver_takes_over_and_the_first_one_ends(
    run_job: Any, job: Job, producer: AIOKafkaProducer, bootstrap: str
) -> None:
    options = job.options(STATS)
    first = await run_job(options)
    await send(producer, job.topics["SOURCE"], 10)
    await first.wait_for(lambda done: sum(one.rows for one in done) == 10, 120)
    second = await run_job(options)
    with pytest.raises(LeaseError, match=f"another driver has taken over the checkpoint .{PREFIX}"):
        await first.wait_for(lambda _: False, 120)
    await send(producer, job.topics["SOURCE"], 10)
    await second.wait_for(lambda done: sum(one.rows for one in done) == 10, 120)
    await second.stop()
    found = await counts(bootstrap, job.topics["TARGET"])
    assert found == sorted(found)
    assert found[-1] == 20
    assert any("did not give up the checkpoint" in text for text in second.said)
    held = Path(options.checkpoint) / "window-stats" / HELD
    assert not held.exists()
    third = await run_job(options)
    await third.stop()
    assert third.said == []  # the second driver ended in order: nothing to wait for
