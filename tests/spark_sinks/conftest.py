"""One Spark session for the whole test run, and helpers that run jobs in it on real topics."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from pyspark.sql import SparkSession

from gateway.embedded.class_archive import archive_options, archive_path
from gateway.embedded.jars import cache_directory, ensure_jars
from gateway.embedded.java import find_java
from spark_sinks.jobs.max_temperature import MaxTemperature
from spark_sinks.jobs.max_temperature import Options as MaxTemperatureOptions
from spark_sinks.run import runner
from spark_sinks.run.declared import DeclaredOptions, flow
from spark_sinks.run.job import Flow
from spark_sinks.run.job_file import read
from spark_sinks.run.metrics import JobMetrics
from spark_sinks.spark.process import end_jvm
from spark_sinks.spark.progress import Examined, Progress, Totals, progress_of
from spark_sinks.spark.real_time_reads import HEARTBEAT
from spark_sinks.spark.session import session
from spark_sinks.spec.triggers import CATCH_UP

ROOT = Path(__file__).parents[2]
Read = Callable[..., Awaitable[list[Any]]]
Declare = Callable[..., DeclaredOptions]
RunOnce = Callable[[DeclaredOptions | MaxTemperatureOptions], Awaitable[list[Progress]]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()) or "run_job" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def spark_jars() -> list[Path]:
    return ensure_jars("spark")


@pytest.fixture(scope="session")
def archive(spark_jars: list[Path]) -> Path:
    """The archive of Spark's classes that `make setup` creates; another checkout may have replaced it."""
    subprocess.run([sys.executable, "-m", "tools.class_recording"], cwd=ROOT, check=True)
    return archive_path("spark", find_java(), spark_jars, cache_directory())


@pytest.fixture(scope="session")
def java_options(archive: Path) -> str:
    return shlex.join(archive_options(archive))


@pytest.fixture(scope="session")
def spark(spark_jars: list[Path], java_options: str) -> Iterator[SparkSession]:
    """A session with enough slots for a real-time query of two partitions and everything else; batches under 5 s.

    State has one partition, since each one needs a task, files and possibly a Python worker. Tests about partitioned
    state use `two_parts`. Heartbeats do not flush status data, so that no test depends on one unnoticed.
    """
    conf = {
        "spark.sql.streaming.realTimeMode.minBatchDuration": "1s", "spark.ui.liveUpdate.minFlushPeriod": "1h",
        **HEARTBEAT,
    }  # fmt: skip
    started = session(
        "tests", master="local[8]", jars=spark_jars, shuffle_partitions=1, log_level="OFF", quick_start=True,
        java_options=java_options, conf=conf,
    )  # fmt: skip
    yield started
    started.stop()
    end_jvm(4.0)


@pytest.fixture
def two_parts(spark: SparkSession) -> Iterator[None]:
    """State created by this test has two partitions, as in a real job."""
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    yield
    spark.conf.set("spark.sql.shuffle.partitions", "1")


def flow_of(spark: SparkSession, options: DeclaredOptions | MaxTemperatureOptions) -> Flow:
    return flow(spark, options) if isinstance(options, DeclaredOptions) else MaxTemperature(spark, options)


class RunningJob:
    """A job running in its own thread."""

    def __init__(self, spark: SparkSession, options: DeclaredOptions | MaxTemperatureOptions) -> None:
        self.progress: list[Progress] = []
        self.examined: list[Examined] = []
        self.said: list[str] = []
        self._events: SimpleQueue[runner.Event] = SimpleQueue()
        self._ready = asyncio.Event()
        job = flow_of(spark, options)
        self.metrics = JobMetrics(job.name)
        self.scans = job.rejects_topic is not None
        loop = asyncio.get_running_loop()
        self._ended = loop.run_in_executor(
            None,
            lambda: runner.run(
                job,
                report=lambda item: (self.progress if isinstance(item, Progress) else self.examined).append(item),
                ready=lambda: loop.call_soon_threadsafe(self._ready.set),
                events=self._events,
                say=self.said.append,
                metrics=self.metrics,
            ),
        )

    async def wait_ready(self) -> None:
        ready = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait([ready, self._ended], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._ended.done():
            await self._ended

    async def wait_for(self, condition: Callable[[list[Progress]], bool], limit_s: float = 60) -> None:
        async with asyncio.timeout(limit_s):
            while not condition(self.progress):
                if self._ended.done():
                    await self._ended
                await asyncio.sleep(0.05)

    async def stop(self) -> Totals:
        self._events.put(None)
        return await self._ended


@pytest.fixture
def declare(bootstrap: str, tmp_path: Path) -> Declare:
    """Write a job file and return its options, with its own checkpoint."""

    def options(text: str, suffix: str = ".toml", **told: Any) -> DeclaredOptions:
        path = tmp_path / f"job{suffix}"
        path.write_text(text.replace("CHECKPOINT", str(tmp_path / "checkpoint")))
        file = read(path)
        return DeclaredOptions(file=file, bootstrap_servers=bootstrap, checkpoint=file.spec.run.checkpoint, **told)

    return options


@pytest.fixture
def run_once(spark: SparkSession) -> RunOnce:
    """Run a job from its checkpoint over the records in its topics, in micro-batches of limited size."""

    def run(options: DeclaredOptions | MaxTemperatureOptions) -> list[Progress]:
        query = flow_of(spark, options).start(CATCH_UP)
        assert query.awaitTermination(300), query.status
        return [progress_of(json.loads(one.json)) for one in query.recentProgress]

    return lambda options: asyncio.to_thread(run, options)


StartJob = Callable[..., Awaitable[RunningJob]]


@pytest.fixture
async def run_job(spark: SparkSession) -> AsyncIterator[StartJob]:
    started: list[RunningJob] = []

    async def start(options: DeclaredOptions | MaxTemperatureOptions) -> RunningJob:
        job = RunningJob(spark, options)
        started.append(job)
        await job.wait_ready()
        return job

    yield start
    for job in started:
        if not job._ended.done():
            await job.stop()


@pytest.fixture
async def producer(bootstrap: str) -> AsyncIterator[AIOKafkaProducer]:
    client = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)
    await client.start()
    yield client
    await client.stop()


@pytest.fixture
async def read_until(bootstrap: str) -> AsyncIterator[Read]:
    """`await read_until(topic, condition)` returns all records of the topic as soon as condition(records) holds."""
    consumers: list[AIOKafkaConsumer] = []

    async def read(topic: str, condition: Callable[[Sequence[Any]], bool], limit_s: float = 60) -> list[Any]:
        consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
        consumers.append(consumer)
        await consumer.start()
        records: list[Any] = []
        try:
            async with asyncio.timeout(limit_s):
                while not condition(records):
                    for batch in (await consumer.getmany(timeout_ms=200)).values():
                        records.extend(batch)
        except TimeoutError:
            pytest.fail(f"{topic}: not in {limit_s} s; {len(records)} records, last {records[-3:]}")
        return records

    yield read
    for consumer in consumers:
        await consumer.stop()


def newest_results(records: Sequence[Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the last result of every sensor and window, as a reader of `maximum` would keep them."""
    results = {}
    for record in records:
        value = json.loads(record.value)
        assert record.key.decode() == value["sensor"]
        assert record.headers == (("content-type", b"application/json"),)
        results[value["sensor"], value["start"]] = value
    return results


@pytest.fixture
def newest() -> Callable[[Sequence[Any]], dict[tuple[str, int], dict[str, Any]]]:
    return newest_results


Reading = tuple[str, float, int]
"""A reading: sensor, temperature, event time in ms."""


def naive_maxima(
    readings: Sequence[Reading], window_ms: int = 5_000, slide_ms: int = 1_000
) -> dict[tuple[str, int], tuple[int, float, int]]:
    """Compute (sensor, start) -> (end, maximum, count) one reading at a time, following the definition."""
    windows: dict[tuple[str, int], list[float]] = {}
    for sensor, temperature, time in readings:
        start = time - time % slide_ms
        while start + window_ms > time:
            windows.setdefault((sensor, start), []).append(temperature)
            start -= slide_ms
    return {key: (key[1] + window_ms, max(values), len(values)) for key, values in windows.items()}


@pytest.fixture(scope="session")
def model() -> Callable[..., dict[tuple[str, int], tuple[int, float, int]]]:
    return naive_maxima
