"""Scenario `rates`: measures records per CPU second of a job in steps, so that differences are the cost of a step.

The CPU time is that of the JVM, its Python workers and the driver's Python.

The steps take turns, and each starts with a smaller topic that does not count (Java compiles). CPU time is measured
instead of wall time, so a busy machine changes little. A step that reaches its time limit is stopped, and its rate is
that of the records read so far. Each query is planned and compiled anew: the steady rate is that of the second half of
a step, and what the whole took longer than at this rate is its start.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from gateway.embedded.jars import ensure_jars
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.gateway import process_cpu
from loadtest.spark.readings import Topics, make_topics
from spark_sinks.jobs import max_temperature
from spark_sinks.read.sources import kafka_stream
from spark_sinks.run import declared
from spark_sinks.run.job_file import read
from spark_sinks.spark.session import session
from spark_sinks.spec.triggers import CATCH_UP
from spark_sinks.transforms import maximum
from spark_sinks.transforms.results import good

SENSORS: Final = 1_000
STEP_MS: Final = 20
PARTITIONS: Final = 3
BATCH_BYTES: Final = 1 << 19
HEADERS: Final = [("content-type", b"application/json"), ("mqtt-topic", b"sensors/a"), ("mqtt-qos", b"1")]
"""Similar to the gateway's."""
AT_ONCE: Final = 100_000  # the most records of a micro-batch
WARM_UP: Final = 200_000
LOOK_S: Final = 0.2
"""How often a step is asked whether half of it is done."""
WHOLE_HEAP: Final = "-Xms2g -XX:+AlwaysPreTouch"
"""The heap that a job has after a while. Otherwise each collection between steps would shrink it, and the first access
to its pages costs nearly as much as parsing a reading."""
PLAIN: Final = "struct<temperature: double, time: bigint, sensor: string, sent: bigint>"
WINDOW_STATS: Final = """
job = "window-stats"
by = ["key"]
source = {{ topics = ["{source}"], columns = {{ temperature = "double" }}, time = "time", dead_letters = "{letters}" }}
window = {{ length = "1m", slide = "1m", watermark = "10s" }}
aggregates = {{ count = "count(*)", mean = "mean(temperature)", maximum = "max(temperature)" }}
sink = {{ kafka = "{target}" }}
run = {{ checkpoint = "{directory}/checkpoint", max_offsets_per_trigger = {at_once} }}
"""
ARCHIVE: Final = """
job = "archive"
source = {{ topics = ["{source}"], decode = "none" }}
sink = {{ SINK }}
run = {{ checkpoint = "{directory}/checkpoint", max_offsets_per_trigger = {at_once} }}
"""
LAKES: Final = {
    "archive": 'archive = "{directory}/lake"',
    "archive in Delta": 'archive = "{directory}/lake", format = "delta"',
    "archive in Iceberg": (
        'archive = "load.sensors", format = "iceberg", options = {{ type = "sql", '
        'uri = "sqlite:///{directory}/catalog.db", warehouse = "file://{directory}/lake" }}'
    ),
}


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        readings: of each step; ten million take 2 GB of disk.
        rounds: of each step; the median counts.
        step_limit: seconds after which a step is stopped.
        step: only this step; repeatable.
        least: STEP=RATE, the records per CPU second that a step must reach; repeatable.
    """

    readings: int = 400_000
    rounds: int = 3
    step_limit: float = 600.0
    step: tuple[str, ...] = ()
    least: tuple[str, ...] = ()


class Measured(NamedTuple):
    """What a step has read, and the CPU time that it took; 0 for the first half of a step of a single batch."""

    rows: int
    seconds: float
    first_rows: int
    first_seconds: float
    whole: bool  # finished within its time limit

    @property
    def rate(self) -> float:
        """Records per CPU second."""
        return self.rows / self.seconds

    @property
    def steady(self) -> float:
        """Records per CPU second of the second half."""
        return (self.rows - self.first_rows) / (self.seconds - self.first_seconds)

    @property
    def start_s(self) -> float:
        """The CPU seconds that the step took longer than at its steady rate."""
        return self.seconds - self.rows / self.steady


Start = Callable[[Topics, Path], StreamingQuery]


async def run(stand: Stand, plan: Plan) -> None:
    """Fill two topics, run the steps in turn; every step must read all that its time allows, and be fast enough."""
    bootstrap = await stand.kafka()
    warm, topics = await make_topics(bootstrap, PARTITIONS), await make_topics(bootstrap, PARTITIONS)
    began = time.monotonic()
    for topic, count in ((warm.source, min(WARM_UP, plan.readings)), (topics.source, plan.readings)):
        await fill(bootstrap, topic, count)
    stand.say(f"filled with {plan.readings:,} readings in {time.monotonic() - began:.0f} s")
    spark = session(
        "rates", master="local[2]", jars=ensure_jars("spark"), log_level="ERROR", driver_memory="2g",
        conf={"spark.sql.streaming.numRecentProgressUpdates": "10000"}, java_options=WHOLE_HEAP,
    )  # fmt: skip
    steps = {name: step for name, step in _steps(spark, bootstrap).items() if not plan.step or name in plan.step}
    measured: dict[str, list[Measured]] = {name: [] for name in steps}
    least = {step: float(rate) for step, _, rate in (one.rpartition("=") for one in plan.least)}
    stand.check(steps.keys() >= set(plan.step), f"the steps are {', '.join(_steps(spark, bootstrap))}")
    for turn in range(plan.rounds):
        for name, step in steps.items():
            if not turn:
                _run(spark, step, warm, plan)
            began = time.monotonic()
            one = _run(spark, step, topics, plan)
            wall = time.monotonic() - began
            measured[name].append(one)
            read_all = one.rows > 0 and (not one.whole or one.rows == plan.readings)
            stand.check(read_all, f"{name}: {one.rows:,} records of {plan.readings:,}")
            note = "" if one.whole else f", stopped after {plan.step_limit:g} s"
            stand.say(
                f"{name}: {one.rows:,} records, {one.seconds:.1f} CPU s ({one.start_s:.1f} of them to start), "
                f"{one.steady:,.0f} per CPU second then, {wall:.1f} s{note}"
            )
    for name, of_step in measured.items():
        found = [one.rate for one in of_step]
        stand.row(**{
            "step": name, "records per CPU second": round(median(found)), "least": round(min(found)),
            "most": round(max(found)), "CPU s to start": median(one.start_s for one in of_step),
            "then": round(median(one.steady for one in of_step)),
        })  # fmt: skip
        wanted = least.get(name, 0)
        stand.check(median(found) >= wanted, f"{name}: {median(found):,.0f}, at least {wanted:,.0f} were expected")
    spark.stop()


async def fill(bootstrap: str, topic: str, count: int) -> None:
    """Write readings of the sensors in turn, the last one now, in batches: single sends would take minutes."""
    begin = int(time.time() * 1000) - count * STEP_MS
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, max_batch_size=BATCH_BYTES, acks=1) as producer:
        for partition in range(PARTITIONS):
            batch = producer.create_batch()
            for number in (one for one in range(count) if one % SENSORS % PARTITIONS == partition):
                at, key = begin + number * STEP_MS, b"s%d" % (number % SENSORS)
                value = b'{"temperature": %.1f, "time": %d, "sent": %d}' % (number % 61 / 2, at, at + 3)
                while batch.append(key=key, value=value, timestamp=at, headers=HEADERS) is None:
                    await producer.send_batch(batch, topic, partition=partition)
                    batch = producer.create_batch()
            if batch.record_count():
                await producer.send_batch(batch, topic, partition=partition)
        await producer.flush()


def _steps(spark: SparkSession, bootstrap: str) -> dict[str, Start]:
    """Return the steps by name."""

    def source(topics: Topics, *, headers: bool) -> DataFrame:
        return kafka_stream(
            spark,
            topics.source,
            connection={"bootstrap.servers": bootstrap},
            max_offsets_per_trigger=AT_ONCE,
            headers=headers,
        )

    def drain(made: Callable[[Topics], DataFrame]) -> Start:
        def start(topics: Topics, directory: Path) -> StreamingQuery:
            writer = made(topics).writeStream.format("noop").option("checkpointLocation", str(directory))
            return writer.trigger(availableNow=True).start()

        return start

    def plain(topics: Topics) -> DataFrame:
        fields = F.from_json(F.col("value").cast("string"), PLAIN).alias("fields")
        return source(topics, headers=False).select("key", fields, "timestamp")

    def declared_job(text: str) -> Start:
        def start(topics: Topics, directory: Path) -> StreamingQuery:
            path = directory / "job.toml"
            path.write_text(
                text.format(
                    source=topics.source,
                    target=topics.target,
                    letters=topics.dead_letter,
                    directory=directory,
                    at_once=AT_ONCE,
                )
            )
            file = read(path)
            options = declared.DeclaredOptions(
                file=file, bootstrap_servers=bootstrap, checkpoint=file.spec.run.checkpoint
            )
            return declared.flow(spark, options).start(CATCH_UP)

        return start

    def max_temperature_job(topics: Topics, directory: Path) -> StreamingQuery:
        options = max_temperature.Options(
            bootstrap_servers=bootstrap,
            checkpoint=str(directory),
            source=topics.source,
            target=topics.target,
            dead_letter=topics.dead_letter,
            max_offsets_per_trigger=AT_ONCE,
        )
        return max_temperature.MaxTemperature(spark, options).start(CATCH_UP)

    return {
        "source": drain(lambda topics: source(topics, headers=False)),
        "source with headers": drain(lambda topics: source(topics, headers=True)),
        "plain from_json": drain(plain),
        "decode": drain(
            lambda topics: good(maximum.parsed(source(topics, headers=False))).select(
                "sensor", "temperature", "time", "sent"
            )
        ),
        "max-temperature": max_temperature_job,
        "window-stats": declared_job(WINDOW_STATS),
        **{name: declared_job(ARCHIVE.replace("SINK", sink)) for name, sink in LAKES.items()},
    }


def _run(spark: SparkSession, step: Start, topics: Topics, plan: Plan) -> Measured:
    """Run a step, on all that its time limit allows."""
    with tempfile.TemporaryDirectory() as name:
        spark.sparkContext._jvm.System.gc()  # type: ignore[union-attr]  # a step must not pay for the previous step's garbage
        before, until = _cpu_s(), time.monotonic() + plan.step_limit
        query = step(topics, Path(name))
        first_rows, first_s = 0, 0.0
        while not (whole := bool(query.awaitTermination(LOOK_S))) and time.monotonic() < until:  # type: ignore[arg-type]
            batches = 0 if first_rows or not (progress := query.lastProgress) else progress["batchId"] + 1
            if 2 * AT_ONCE * batches >= plan.readings:
                first_rows, first_s = _rows(query), _cpu_s() - before
        rows = _rows(query)
        query.stop()
        spark.sparkContext._jvm.System.gc()  # type: ignore[union-attr]  # its own
        return Measured(rows, _cpu_s() - before, first_rows, first_s, whole)


def _rows(query: StreamingQuery) -> int:
    return sum(progress["numInputRows"] for progress in query.recentProgress)


def _cpu_s() -> float:
    """The CPU seconds that the session's JVM, its Python workers and this process have used so far."""
    tree = _tree(SparkContext._gateway.proc.pid)  # type: ignore[union-attr]
    return time.process_time() + sum(process_cpu(pid, ended_children=True) for pid in tree)


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and its living descendants."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            for child in (thread / "children").read_text().split():
                yield from _tree(int(child))


SCENARIOS = (Scenario("rates", "measure records per CPU second: bare source, decoding, windows, archive", Plan(), run),)
