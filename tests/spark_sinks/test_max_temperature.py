"""The job on a real Kafka: complete over restarts, malformed and late readings dead-lettered, both triggers."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from pyspark.sql import SparkSession

from spark_sinks import runner
from spark_sinks.job import known_jobs
from spark_sinks.jobs.max_temperature import Options
from spark_sinks.progress import Progress
from spark_sinks.sinks import REAL_TIME
from spark_sinks.sources import topics_of

BATCH_MS = 2_000  # of the real-time trigger

Model = Callable[..., dict[tuple[str, int], tuple[int, float, int]]]


class Readings:
    """Readings of a few sensors on their way to the source topic, in the order of their time."""

    def __init__(self, producer: AIOKafkaProducer, topic: str) -> None:
        self.all: list[tuple[str, float, int]] = []
        self._producer = producer
        self._topic = topic
        self._chance = random.Random(5)
        self.time = int(time.time() * 1000) - 60_000

    async def send(self, count: int) -> None:
        for _ in range(count):
            self.time += self._chance.randint(1, 400)
            sensor, temperature = f"room-{self._chance.randint(0, 3)}", round(self._chance.uniform(-20, 40), 2)
            await self.send_one(sensor, temperature, self.time)
            self.all.append((sensor, temperature, self.time))

    async def send_one(self, sensor: str, temperature: float, at: int, **fields: Any) -> None:
        value = json.dumps({"temperature": temperature, "time": at, **fields}).encode()
        await self._producer.send_and_wait(self._topic, value, sensor.encode())


def as_model(results: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[tuple[str, int], tuple[int, float, int]]:
    return {key: (value["end"], value["maximum"], value["count"]) for key, value in results.items()}


def processed(progress: Progress, topic: str) -> int:
    """Records of the topic before the windows' end offsets."""
    if progress.query != "max-temperature" or progress.end is None:
        return 0
    return sum(progress.end[topic].values())


@pytest.fixture
async def options(bootstrap: str, new_topic: Any, tmp_path: Path) -> Options:
    return Options(
        bootstrap_servers=bootstrap,
        checkpoint=str(tmp_path),
        source=await new_topic(partitions=2),
        target=await new_topic(partitions=2),
        dead_letter=await new_topic(partitions=1),
        watermark_ms=30_000,
    )


async def test_nothing_is_lost_over_a_restart(
    *, run_job: Any, producer: AIOKafkaProducer, read_until: Any, newest: Any, model: Model, options: Options
) -> None:
    readings = Readings(producer, options.source)
    await readings.send(40)
    job = await run_job(options)
    await readings.send(40)
    await job.wait_for(lambda done: sum(p.rows for p in done if p.query == "max-temperature") >= 40)
    first = await job.stop()
    await readings.send(40)  # nobody is there
    job = await run_job(options)
    await readings.send(20)
    expected = model(readings.all)
    records = await read_until(options.target, lambda records: as_model(newest(records)) == expected)
    await job.wait_for(lambda done: any(processed(p, options.source) == 140 for p in done))
    second = await job.stop()
    assert as_model(newest(records)) == expected
    assert first["max-temperature"].late_rows == second["max-temperature"].late_rows == 0
    assert 60 <= second["max-temperature"].rows <= 100  # not all from the start


async def test_malformed_and_late_readings_are_dead_lettered(
    *, run_job: Any, producer: AIOKafkaProducer, read_until: Any, newest: Any, options: Options
) -> None:
    await producer.send_and_wait(options.source, b"hot", b"oven", headers=[("trace", b"\x01"), ("null", None)])
    await producer.send_and_wait(options.source, None, b"tombstone")
    readings = Readings(producer, options.source)
    job = await run_job(options)
    now = readings.time
    await readings.send_one("oven", 200.0, now)
    # The watermark is drawn after the batch that saw `now`, so late means: in a batch after that one.
    await read_until(options.target, lambda records: len(newest(records)) == 5)
    await job.wait_for(lambda done: any((p.watermark_ms or 0) >= now - 30_000 for p in done))
    await readings.send_one("oven", 999.0, now - 90_000, note="too late")
    await readings.send_one("oven", 999.0, now - 91_000)
    await readings.send_one("oven", 210.0, now - 20_000)  # late, but not too late
    letters = await read_until(options.dead_letter, lambda records: len(records) == 4)
    records = await read_until(options.target, lambda records: len(newest(records)) == 10)
    await job.wait_for(lambda done: sum(p.late_readings for p in done) == 2)
    totals = await job.stop()

    assert {value["maximum"] for value in newest(records).values()} == {200.0, 210.0}
    assert totals["max-temperature"].late_readings == 2
    assert 5 <= totals["max-temperature"].late_rows <= 10  # (sensor, window) pairs, merged per partition and batch
    reasons = {}
    for letter in letters:
        headers = dict(letter.headers)
        assert headers["origin.topic"] == options.source.encode()
        assert headers["origin.partition"] in (b"0", b"1")
        assert headers["origin.offset"].isdigit()
        reasons[letter.value] = headers["error"].decode()
    [malformed] = [letter for letter in letters if letter.value == b"hot"]
    assert malformed.key == b"oven"
    assert malformed.headers[:2] == (("trace", b"\x01"), ("null", None))
    assert [reason.split(":")[0].split(" is ")[0] for reason in reasons.values()].count("late") == 2
    assert [reason for reason in reasons.values() if reason.startswith("the value")] == [reasons[b"hot"]] * 2


async def test_real_time_results_come_at_once_and_late_readings_at_the_checkpoint(
    *, run_job: Any, producer: AIOKafkaProducer, read_until: Any, newest: Any, model: Model, options: Options
) -> None:
    options = msgspec.structs.replace(options, trigger=REAL_TIME, interval_ms=BATCH_MS)
    readings = Readings(producer, options.source)
    await producer.send_and_wait(options.source, b"hot", b"oven")
    job = await run_job(options)
    await readings.send(20)
    expected = model(readings.all)
    records = await read_until(options.target, lambda records: as_model(newest(records)) == expected)
    assert as_model(newest(records)) == expected
    await job.wait_for(lambda done: any((p.watermark_ms or 0) > 0 for p in done))
    await readings.send_one("oven", 999.0, readings.time - 90_000)
    letters = await read_until(options.dead_letter, lambda records: len(records) == 2)
    await job.wait_for(lambda done: sum(p.late_readings for p in done) == 1)
    await job.stop()
    assert sorted(dict(letter.headers)["error"][:4] for letter in letters) == [b"late", b"the "]
    assert all("oven" not in key for key, _ in newest(records))


async def test_real_time_goes_on_from_its_checkpoint(
    *, run_job: Any, producer: AIOKafkaProducer, read_until: Any, newest: Any, model: Model, options: Options
) -> None:
    options = msgspec.structs.replace(options, trigger=REAL_TIME, interval_ms=BATCH_MS)
    readings = Readings(producer, options.source)
    job = await run_job(options)
    await readings.send(20)
    await job.wait_for(lambda done: any(p.query == "max-temperature" for p in done))
    await readings.send(20)  # in a batch that is never finished
    await job.stop()
    await readings.send(20)
    await run_job(options)
    expected = model(readings.all)
    records = await read_until(options.target, lambda records: as_model(newest(records)) == expected)
    assert as_model(newest(records)) == expected


def test_a_kafka_that_does_not_answer_is_no_topic_list(spark: SparkSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        servers = f"127.0.0.1:{silent.getsockname()[1]}"
        assert topics_of(spark, ["sensors"], {"bootstrap.servers": servers}, 3) is None


async def test_a_slow_kafka_is_given_more_time_each_time(
    spark: SparkSession, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "FIRST_ANSWER_S", 0.001)  # less than any Kafka takes, as 3 s on a busy machine
    kind = known_jobs()["max-temperature"]
    said: list[str] = []
    waiting = asyncio.to_thread(runner.wait_for_topics, spark, kind, options, said.append, SimpleQueue())
    assert await asyncio.wait_for(waiting, 60)
    assert said == [f"waiting for Kafka: {options.bootstrap_servers} does not answer"] * len(said)
