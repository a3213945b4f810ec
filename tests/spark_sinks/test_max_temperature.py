"""The job on a real Kafka: complete results across restarts, dead letters for bad and late readings, both triggers."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_sinks.jobs.max_temperature import MaxTemperature, Options
from spark_sinks.read.sources import Broker
from spark_sinks.run import runner
from spark_sinks.spark.checkpoint import JobCheckpoint
from spark_sinks.spark.progress import Progress, offsets_sum
from spark_sinks.spec.triggers import CATCH_UP, CATCHING_UP, REAL_TIME, Trigger
from tests.support.waiting import wait_until

BATCH_MS = 2_000  # batch duration of the real-time trigger

Model = Callable[..., dict[tuple[str, int], tuple[int, float, int]]]


class Readings:
    """Sends readings of a few sensors to the source topic, in order of their time."""

    def __init__(self, producer: AIOKafkaProducer, topic: str) -> None:
        self.all: list[tuple[str, float, int]] = []
        self._producer = producer
        self._topic = topic
        self._chance = random.Random(5)
        self.time = int(time.time() * 1000) - 60_000

    async def send(self, count: int) -> None:
        """Send all at once. Sent one at a time, each would be its own batch, which takes a third of a second."""
        for _ in range(count):
            self.time += self._chance.randint(1, 400)
            sensor, temperature = f"room-{self._chance.randint(0, 3)}", round(self._chance.uniform(-20, 40), 2)
            await self._producer.send(self._topic, reading(temperature, self.time), sensor.encode())
            self.all.append((sensor, temperature, self.time))
        await self._producer.flush()

    async def send_one(self, sensor: str, temperature: float, at: int, **fields: Any) -> None:
        await self._producer.send_and_wait(self._topic, reading(temperature, at, **fields), sensor.encode())


def reading(temperature: float, at: int, **fields: Any) -> bytes:
    return json.dumps({"temperature": temperature, "time": at, **fields}).encode()


def watermark(query: StreamingQuery) -> float:
    """The watermark of the query's newest batch, epoch seconds."""
    progress = query.lastProgress
    return datetime.fromisoformat(progress.eventTime["watermark"]).timestamp() if progress else 0


def as_model(results: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[tuple[str, int], tuple[int, float, int]]:
    return {key: (value["end"], value["maximum"], value["count"]) for key, value in results.items()}


def processed(progress: Progress, topic: str) -> int:
    """Return the records of the topic before the windows' end offsets."""
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


@pytest.mark.usefixtures("two_parts")
async def test_nothing_is_lost_across_a_restart(
    *, run_job: Any, producer: AIOKafkaProducer, read_until: Any, newest: Any, model: Model, options: Options
) -> None:
    readings = Readings(producer, options.source)
    await readings.send(40)
    job = await run_job(options)
    await readings.send(40)
    await job.wait_for(lambda done: sum(p.rows for p in done if p.query == "max-temperature") >= 40)
    first = await job.stop()
    await readings.send(40)  # no job is running
    job = await run_job(options)
    await readings.send(20)
    expected = model(readings.all)
    records = await read_until(options.target, lambda records: as_model(newest(records)) == expected)
    await job.wait_for(lambda done: any(processed(p, options.source) == 140 for p in done))
    second = await job.stop()
    assert as_model(newest(records)) == expected
    assert first.late_rows == second.late_rows == 0
    assert 60 <= second.rows <= 100  # it does not start from the beginning


async def test_malformed_and_late_readings_are_dead_lettered(
    *, run_job: Any, producer: AIOKafkaProducer, read_until: Any, newest: Any, options: Options
) -> None:
    await producer.send_and_wait(options.source, b"hot", b"oven", headers=[("trace", b"\x01"), ("null", None)])
    await producer.send_and_wait(options.source, None, b"tombstone")
    readings = Readings(producer, options.source)
    job = await run_job(options)
    now = readings.time
    await readings.send_one("oven", 200.0, now)
    # The watermark advances after the batch with `now`, so a late reading must be in a later batch.
    await read_until(options.target, lambda records: len(newest(records)) == 5)
    await job.wait_for(lambda done: any((p.watermark_ms or 0) >= now - 30_000 for p in done))
    await readings.send_one("oven", 999.0, now - 90_000, note="too late")
    await readings.send_one("oven", 999.0, now - 91_000)
    await readings.send_one("oven", 210.0, now - 20_000)  # out of order, but before the watermark
    letters = await read_until(options.dead_letter, lambda records: len(records) == 4)
    records = await read_until(options.target, lambda records: len(newest(records)) == 10)
    await job.wait_for(lambda _: sum(found.late for found in job.examined) == 2)
    totals = await job.stop()

    assert {value["maximum"] for value in newest(records).values()} == {200.0, 210.0}
    assert (totals.late_readings, totals.malformed) == (2, 2)
    assert 5 <= totals.late_rows <= 10  # (sensor, window) pairs, merged per partition and batch
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


@pytest.mark.usefixtures("two_parts")
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
    await job.stop()
    assert sorted(dict(letter.headers)["error"][:4] for letter in letters) == [b"late", b"the "]
    assert all("oven" not in key for key, _ in newest(records))


async def test_a_final_result_comes_once_when_its_window_is_closed(
    *, run_job: Any, producer: AIOKafkaProducer, read_until: Any, model: Model, options: Options
) -> None:
    options = msgspec.structs.replace(options, emit="final", watermark_ms=1_000)
    readings = Readings(producer, options.source)
    await readings.send(
        40
    )  # before the job starts: in two batches, readings of one partition may be late in the second
    job = await run_job(options)
    done = model(readings.all)
    watermark_ms = max(time for _, _, time in readings.all) - options.watermark_ms
    closed = {key: window for key, window in done.items() if window[0] <= watermark_ms}
    records = await read_until(options.target, lambda records: len(records) >= len(closed))
    await job.stop()
    assert {record.headers[1:] for record in records} == {(("emit", b"final"),)}
    values = [json.loads(record.value) for record in records]
    assert sorted((value["sensor"], value["start"]) for value in values) == sorted(closed)
    assert {
        (value["sensor"], value["start"]): (value["end"], value["maximum"], value["count"]) for value in values
    } == closed


async def test_real_time_goes_on_from_its_checkpoint(
    *, run_job: Any, producer: AIOKafkaProducer, read_until: Any, newest: Any, model: Model, options: Options
) -> None:
    options = msgspec.structs.replace(options, trigger=REAL_TIME, interval_ms=BATCH_MS)
    readings = Readings(producer, options.source)
    job = await run_job(options)
    await readings.send(20)
    await job.wait_for(lambda done: any(p.query == "max-temperature" for p in done))
    await readings.send(20)  # these are in a batch that never finishes
    await job.stop()
    await readings.send(20)
    await run_job(options)
    expected = model(readings.all)
    records = await read_until(options.target, lambda records: as_model(newest(records)) == expected)
    assert as_model(newest(records)) == expected


@pytest.mark.usefixtures("two_parts")
async def test_a_backlog_is_caught_up_in_bounded_batches_before_real_time(
    *, run_job: Any, producer: AIOKafkaProducer, read_until: Any, newest: Any, model: Model, options: Options
) -> None:
    options = msgspec.structs.replace(
        options, trigger=REAL_TIME, interval_ms=BATCH_MS, max_offsets_per_trigger=1_000, slide_ms=5_000
    )
    readings = Readings(producer, options.source)
    readings.time -= 3_600_000
    await readings.send(2_500)
    job = await run_job(options)
    await job.wait_for(lambda done: any(p.trigger == REAL_TIME for p in done))
    caught_up = [p for p in job.progress if p.trigger == CATCHING_UP]
    assert sum(p.rows for p in caught_up) >= 2_500
    assert max(p.rows for p in caught_up) <= 1_000
    await readings.send(20)
    expected = model(readings.all, slide_ms=5_000)
    await read_until(options.target, lambda records: as_model(newest(records)) == expected)
    totals = await job.stop()
    assert (totals.late_rows, totals.late_readings) == (0, 0)


async def test_the_next_run_reports_late_readings_of_a_killed_run(
    *,
    spark: SparkSession,
    run_job: Any,
    producer: AIOKafkaProducer,
    admin: AIOKafkaAdminClient,
    read_until: Any,
    options: Options,
) -> None:
    readings = Readings(producer, options.source)
    await readings.send_one("oven", 200.0, readings.time)
    found = MaxTemperature(spark, options)
    query = found.start(Trigger())  # only the query; nothing observes its batches
    await wait_until(lambda: watermark(query) > 0, 60)
    await readings.send_one("oven", 999.0, readings.time - 90_000)
    await producer.send_and_wait(options.source, b"hot", b"oven")
    checkpoint = JobCheckpoint(spark, found.checkpoint)
    await wait_until(lambda: offsets_sum(checkpoint.position() or {}) == 3, 60)
    await asyncio.to_thread(query.stop)
    await admin.create_partitions({options.source: NewPartitions(3)})
    job = await run_job(options)
    letters = await read_until(options.dead_letter, lambda records: len(records) == 2)
    assert sorted(dict(letter.headers)["error"][:4] for letter in letters) == [b"late", b"the "]
    await job.wait_for(lambda _: sum(found.late for found in job.examined) == 1)
    totals = await job.stop()
    assert (totals.late_readings, totals.malformed) == (1, 1)
    again = await run_job(options)
    await readings.send_one("oven", 999.0, readings.time - 90_000)
    await read_until(options.dead_letter, lambda records: len(records) == 3)
    await again.wait_for(lambda _: sum(found.late for found in again.examined) == 1)  # not the earlier ones
    await again.stop()


async def test_an_old_checkpoint_says_why_it_cannot_change_to_real_time(
    *, spark: SparkSession, run_job: Any, producer: AIOKafkaProducer, options: Options
) -> None:
    version = "spark.sql.streaming.stateStore.checkpointFormatVersion"
    await Readings(producer, options.source).send(1)
    spark.conf.set(version, "1")
    try:
        query = MaxTemperature(spark, options).start(CATCH_UP)
        assert await asyncio.to_thread(query.awaitTermination, 60)
    finally:
        spark.conf.set(version, "2")
    with pytest.raises(ValueError, match=r"max-temperature was created with state that real time cannot use"):
        await run_job(msgspec.structs.replace(options, trigger=REAL_TIME, interval_ms=BATCH_MS))
    job = await run_job(options)  # it continues in micro-batches
    await job.stop()


@pytest.mark.parametrize("has_finished", [False, True])
async def test_micro_batches_go_on_where_real_time_ended(
    *,
    has_finished: bool,
    run_job: Any,
    producer: AIOKafkaProducer,
    read_until: Any,
    newest: Any,
    model: Model,
    options: Options,
) -> None:
    readings = Readings(producer, options.source)
    commits = Path(options.checkpoint, "max-temperature", "commits")
    for trigger, interval_ms in ((REAL_TIME, BATCH_MS if has_finished else 600_000), ("micro-batch", BATCH_MS)):
        job = await run_job(msgspec.structs.replace(options, trigger=trigger, interval_ms=interval_ms))
        await readings.send(20)
        expected = model(readings.all)
        records = await read_until(options.target, lambda records, wanted=expected: as_model(newest(records)) == wanted)
        assert as_model(newest(records)) == expected
        if has_finished or trigger != REAL_TIME:
            await wait_until((commits / "0").exists)
        await job.stop()
        assert (commits / "0").exists() == (has_finished or trigger != REAL_TIME)
        if not has_finished:  # as if it was stopped while Spark wrote a log
            (commits.parent / "offsets" / ".0.stopped.tmp").touch()


def test_an_unresponsive_kafka_is_reported(spark: SparkSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        servers = f"127.0.0.1:{silent.getsockname()[1]}"
        with Broker(spark, {"bootstrap.servers": servers}, 3) as broker:
            assert broker.partitions(["sensors"]) is None


async def test_missing_topics_are_named_and_a_stop_ends_the_waiting(spark: SparkSession, options: Options) -> None:
    options = msgspec.structs.replace(options, target="not-there", dead_letter=f"{options.source}-dlq")
    said: list[str] = []
    stop: SimpleQueue[runner.Event] = SimpleQueue()
    waiting = asyncio.create_task(
        asyncio.to_thread(runner.wait_for_topics, MaxTemperature(spark, options), said.append, stop)
    )
    # On a busy machine Kafka may answer late; then the message that Kafka does not answer comes first.
    await wait_until(lambda: bool(said) and not said[-1].startswith("waiting for Kafka"), 60)
    stop.put(None)
    assert not await asyncio.wait_for(waiting, 60)
    missing = f"not-there, {options.dead_letter} on {options.bootstrap_servers}"
    assert said[-1] == f"waiting for topic {missing}: create it"


async def test_a_slow_kafka_is_given_more_time_each_time(
    spark: SparkSession, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "FIRST_ANSWER_S", 0.001)  # shorter than any response, like 3 s on a busy machine
    said: list[str] = []
    waiting = asyncio.to_thread(runner.wait_for_topics, MaxTemperature(spark, options), said.append, SimpleQueue())
    assert await asyncio.wait_for(waiting, 60)
    assert said == [f"waiting for Kafka: {options.bootstrap_servers} does not answer"] * len(said)
