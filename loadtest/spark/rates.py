"""Scenario `rates`: records per CPU second of the JVM, step by step, so that what a step costs is the difference.

The steps take turns, the first round is not counted (Java compiles), and the processor's time is counted, not the
clock's: so a busy machine changes little.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
from aiokafka import AIOKafkaProducer
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from gateway.embedded.jars import ensure_jars
from loadtest.spark.readings import make_topics
from spark_sinks.jobs.max_temperature import Options, flows
from spark_sinks.session import session
from spark_sinks.sources import kafka_stream
from spark_sinks.transforms import maximum
from spark_sinks.triggers import CATCH_UP

SENSORS = 1_000
STEP_MS = 20
PLAIN = "struct<temperature: double, time: bigint, sensor: string, sent: bigint>"


async def run(bootstrap: str, readings: int, rounds: int) -> int:
    """Fill a topic, take turns, print the medians."""
    topics = await make_topics(bootstrap)
    begin = int(time.time() * 1000) - readings * STEP_MS
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=50) as producer:
        for number in range(readings):
            at = begin + number * STEP_MS
            value = b'{"temperature": %.1f, "time": %d, "sent": %d}' % (number % 61 / 2, at, at + 3)
            # As the gateway writes one: a handful of headers.
            headers = [("content-type", b"application/json"), ("mqtt-topic", b"sensors/a"), ("mqtt-qos", b"1")]
            await producer.send(topics.source, value, f"s{number % SENSORS}".encode(), headers=headers)
        await producer.flush()
    spark = session("rates", master="local[2]", jars=ensure_jars("spark"), log_level="ERROR")
    connection = {"bootstrap.servers": bootstrap}
    options = Options(
        bootstrap_servers=bootstrap, checkpoint="", source=topics.source, target=topics.target,
        dead_letter=topics.dead_letter, max_offsets_per_trigger=100_000,
    )  # fmt: skip

    def source(*, headers: bool) -> DataFrame:
        return kafka_stream(
            spark, topics.source, connection=connection, max_offsets_per_trigger=100_000, headers=headers
        )

    def plain(records: DataFrame) -> DataFrame:
        return records.select("key", F.from_json(F.col("value").cast("string"), PLAIN).alias("fields"), "timestamp")

    def job() -> None:
        with tempfile.TemporaryDirectory() as directory:
            [flow] = flows(spark, msgspec.structs.replace(options, checkpoint=directory))
            flow.start(CATCH_UP).awaitTermination()

    steps: dict[str, Callable[[], None]] = {
        "source": lambda: _drain(source(headers=False)),
        "source with headers": lambda: _drain(source(headers=True)),
        "plain from_json": lambda: _drain(plain(source(headers=False))),
        "decode": lambda: _drain(maximum.readings(maximum.parsed(source(headers=False)))),
        "the job": job,
    }
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            began = _cpu_s(spark)
            step()
            if turn:
                rates[name].append(readings / (_cpu_s(spark) - began))
    for name, found in rates.items():
        print(f"{name:20} {median(found):10,.0f} records per CPU second ({min(found):,.0f} to {max(found):,.0f})")
    spark.stop()
    return 0


def _drain(frame: DataFrame) -> None:
    with tempfile.TemporaryDirectory() as directory:
        writer = frame.writeStream.format("noop").option("checkpointLocation", directory)
        writer.trigger(availableNow=True).start().awaitTermination()


def _cpu_s(spark: SparkSession) -> float:
    """Processor seconds of the session's JVM so far."""
    spark.sparkContext._jvm.System.gc()  # type: ignore[union-attr]  # garbage of one step is not the next one's
    fields = Path(f"/proc/{SparkContext._gateway.proc.pid}/stat").read_text().rpartition(")")[2].split()  # type: ignore[union-attr]
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
