"""A checkpoint whose job or topics have changed: refused with the reason, or right."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from pyspark.sql import SparkSession

from spark_sinks.run.declared import DeclaredOptions
from spark_sinks.run.job_file import read
from spark_sinks.spark.session import IN_LOCAL_FILES
from spark_sinks.spec.triggers import MICRO_BATCH, REAL_TIME
from tests.support.topics import read_all, remake

START_MS = 1_700_000_000_000
STATS = """
job = "window-stats"
by = ["key"]
source = { topics = ["SOURCE"], columns = { a = "double", b = "double" }, time = "at", dead_letters = "DEAD" }
window = { length = "4s", slide = "2s", watermark = "1m" }
sink = { kafka = "TARGET" }
run = { checkpoint = "CHECKPOINT" }
aggregates = { highest = "max(a)", n = "count(*)" }
"""


class Job:
    """A job file with topics of its own, which may be edited and started again on its checkpoint."""

    def __init__(self, bootstrap: str, directory: Path, topics: dict[str, str]) -> None:
        self._bootstrap = bootstrap
        self._directory = directory
        self.topics = topics

    def options(self, text: str, *edit: str, suffix: str = ".toml", **told: Any) -> DeclaredOptions:
        for name, topic in {**self.topics, "CHECKPOINT": str(self._directory / "checkpoint")}.items():
            text = text.replace(name, topic)
        if edit:
            assert edit[0] in text
            text = text.replace(*edit)
        path = self._directory / f"job{suffix}"
        path.write_text(text)
        file = read(path)
        checkpoint = file.streaming.run.checkpoint
        return DeclaredOptions(file=file, bootstrap_servers=self._bootstrap, checkpoint=checkpoint, **told)


@pytest.fixture
async def job(bootstrap: str, tmp_path: Path, new_topic: Any) -> Job:
    return Job(bootstrap, tmp_path, {name: await new_topic(partitions=1) for name in ("SOURCE", "TARGET", "DEAD")})


async def send(producer: AIOKafkaProducer, topic: str, count: int) -> None:
    for number in range(count):
        value = {"a": 1000 + number, "b": number, "at": START_MS + number}
        await producer.send(topic, json.dumps(value).encode(), b"k")
    await producer.flush()


async def run(run_job: Any, options: DeclaredOptions, rows: int) -> None:
    running = await run_job(options)
    await running.wait_for(lambda done: sum(one.rows for one in done) == rows, 120)
    await running.stop()


async def test_an_edited_job_does_not_go_on_with_the_state_of_its_old_meaning(
    run_job: Any, job: Job, producer: AIOKafkaProducer, bootstrap: str
) -> None:
    await send(producer, job.topics["SOURCE"], 10)
    await run(run_job, job.options(STATS), 10)
    edits = {
        ("max(a)", "max(b)"): r"aggregates was max\(a\), count\(\*\), and is max\(b\), count\(\*\)",
        ('highest = "max(a)", n = "count(*)"', 'n = "count(*)", highest = "max(a)"'): "aggregates was",
        ('["key"]', '["topic"]'): "by was key, and is topic",
        ('a = "double"', 'a = { field = "b" }'): "source.columns.a was the double a, and is the double b",
        ('length = "4s"', 'length = "6s"'): "window.length was 4000 ms, and is 6000 ms",
        ('slide = "2s"', 'slide = "1s"'): "window.slide was 2000 ms, and is 1000 ms",
        ('time = "at"', 'time = "b"'): "source.time was at, and is b",
    }
    for edit, told in edits.items():
        with pytest.raises(
            ValueError, match=f"window-stats was edited: .*{told}.*mix both.*or start once with --fresh"
        ):
            await run_job(job.options(STATS, *edit))
    await send(producer, job.topics["SOURCE"], 5)
    same = STATS.replace('b = "double"', 'b = "double", c = { optional = true }').replace("highest =", "top =")
    await run(run_job, job.options(same, '"4s"', '"4000ms"'), 5)
    last = json.loads((await read_all(bootstrap, job.topics["TARGET"]))[-1].value)
    assert (last["top"], last["n"]) == (1009, 15)  # the state of before, under its new name


@pytest.mark.parametrize("stays", [True, False], ids=["with more records", "with fewer records"])
async def test_a_topic_that_was_deleted_and_made_again_is_not_read_from_the_old_offset(
    *, run_job: Any, job: Job, producer: AIOKafkaProducer, admin: AIOKafkaAdminClient, bootstrap: str, stays: bool
) -> None:
    await send(producer, job.topics["SOURCE"], 100)
    options = job.options(STATS)
    await run(run_job, options, 100)
    await remake(admin, job.topics["SOURCE"], 1)
    again = 300 if stays else 50
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as fresh:
        await send(fresh, job.topics["SOURCE"], again)
    with pytest.raises(ValueError, match=f"topic {job.topics['SOURCE']} was deleted and made again"):
        await run_job(options)
    await run(run_job, job.options(STATS, accept_data_loss=True), again)
    counts: Counter[int] = Counter()
    for record in await read_all(bootstrap, job.topics["TARGET"]):
        value = json.loads(record.value)
        counts[value["start"]] = value["n"]
    assert set(counts.values()) == {100 + again}
    await run(run_job, options, 0)


@pytest.fixture
def as_on_a_cluster(spark: SparkSession) -> Iterator[None]:
    """Checkpoints have Spark's own files, with checksums, as with a master that is not local."""
    for name in IN_LOCAL_FILES:
        spark.conf.unset(name)
    yield
    for name, value in IN_LOCAL_FILES.items():
        spark.conf.set(name, value)


@pytest.mark.usefixtures("as_on_a_cluster")
@pytest.mark.parametrize("trigger", [MICRO_BATCH, REAL_TIME])
@pytest.mark.parametrize("again", [300, 50])
async def test_with_accepted_loss_a_topic_that_was_made_again_is_read_from_its_beginning_and_that_is_told(
    *, run_job: Any, job: Job, producer: AIOKafkaProducer, admin: AIOKafkaAdminClient, bootstrap: str, trigger: str,
    again: int,
) -> None:  # fmt: skip
    told: dict[str, Any] = {"trigger": trigger, "interval_ms": 2_000 if trigger == REAL_TIME else None}
    short = 'run = { conf = { "spark.sql.streaming.realTimeMode.minBatchDuration" = "1s" },'
    options = job.options(STATS, "run = {", short, accept_data_loss=True, **told)
    await send(producer, job.topics["SOURCE"], 100)
    await run(run_job, options, 100)
    assert list((Path(options.checkpoint) / "window-stats" / "offsets").glob("*.crc")), "Spark's own checksums"
    await remake(admin, job.topics["SOURCE"], 1)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as fresh:
        await send(fresh, job.topics["SOURCE"], again)
    second = await run_job(options)
    await second.wait_for(lambda done: sum(one.rows for one in done) >= again, 120)
    await second.stop()
    name = job.topics["SOURCE"]
    assert second.said[:1] == [f"topic {name} was deleted and made again: window-stats reads it from its beginning"]
    assert sum(one.rows for one in second.progress) == again
    values = [json.loads(record.value) for record in await read_all(bootstrap, job.topics["TARGET"])]
    counts = {value["start"]: value["n"] for value in values}
    assert set(counts.values()) == {100 + again}


STEPS = """
from pyspark.sql import functions as F

from spark_sinks.spec.jobs import Transform
from spark_sinks.spec.parts import Column, ResultSink, Run, Source

JOB = Transform(
    source=Source(topics=("LEFT", "RIGHT"), columns={"a": Column()}, time="at", dead_letters="DEAD"),
    sink=ResultSink(kafka="TARGET", emit="final"),
    run=Run(checkpoint="CHECKPOINT"),
)


def transform(readings):
    timed = readings.withWatermark("time", "1 second").withColumn("window", F.window("time", "1 second"))
    left = timed.where(F.col("topic") == "LEFT").select("key", "window", "time")
    right = timed.where(F.col("topic") == "RIGHT").select("key", "window")
    joined = left.join(right, ["key", "window"])
    counted = joined.groupBy(F.window("window", "1 second").alias("second"), "key").agg(F.count("*").alias("n"))
    counted = counted.groupBy(F.window("second", "2 seconds").alias("of"), "key").agg(F.sum("n").alias("n"))
    value = F.struct("key", F.unix_millis("of.start").alias("start"), "n")
    return counted.select("key", F.to_json(value).alias("value"))
"""


async def test_two_stateful_steps_of_a_transform_lose_no_result(
    *, run_job: Any, job: Job, producer: AIOKafkaProducer, new_topic: Any, bootstrap: str
) -> None:
    """A join of two topics, counts of it, and sums of them. Each second has two readings of each key on each side."""
    job.topics |= {"LEFT": await new_topic(partitions=1), "RIGHT": await new_topic(partitions=1)}
    running = await run_job(job.options(STEPS, suffix=".py"))
    rows = 0
    for second in range(0, 8, 2):  # two in a batch
        for topic, key, step in itertools.product(("LEFT", "RIGHT"), ("k", "l"), (100, 600, 1_100, 1_600)):
            value = {"a": 1, "at": START_MS + 1_000 * second + step}
            await producer.send(job.topics[topic], json.dumps(value).encode(), key.encode())
            rows += 1
        await producer.flush()
        await running.wait_for(lambda done: sum(one.rows for one in done) // 2 >= rows, 120)  # noqa: B023
    assert running.said == []
    late = json.dumps({"a": 1, "at": START_MS}).encode()
    for topic in ("LEFT", "RIGHT"):
        await producer.send_and_wait(job.topics[topic], late, b"k")
    await running.wait_for(lambda done: sum(one.late_rows for one in done) >= 2, 120)
    values = [json.loads(record.value) for record in await read_all(bootstrap, job.topics["TARGET"])]
    totals = await running.stop()
    assert totals.late_rows == 2
    assert [text for text in running.said if "dropped" in text and "as late" in text] == running.said
    found = {(value["key"], (value["start"] - START_MS) // 2_000): value["n"] for value in values}
    assert found == dict.fromkeys(itertools.product("kl", range(len(found) // 2)), 8)
    assert len(found) >= 2 * 2
