"""The jobs by name, their options, and the loop that runs one.

A job has one query per sink, each with a checkpoint of its own. The alternative, one query with `foreachBatch`
and two writes, would repeat both writes when one fails, would hold up results when only dead letters cannot be
written, and does not exist in real-time mode. The price is that the source is read twice. When one query
fails, the job ends (exit 1) and goes on from the checkpoints at its next start.
"""

from __future__ import annotations

import argparse
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from mapping.record import is_topic_name
from spark_sinks import transforms
from spark_sinks.process import Console, die_with_parent, end_jvm, on_stop
from spark_sinks.progress import Progress, ProgressListener, Totals
from spark_sinks.session import session
from spark_sinks.sinks import MICRO_BATCH, REAL_TIME, kafka_sink
from spark_sinks.sources import kafka_range, kafka_stream, topics_of

REAL_TIME_SLOTS = 16
"""Of the default master: enough for 13 partitions. A slot is a thread, not a core, and costs little unused."""

_DURATION = re.compile(r"([1-9][0-9]*)\s*(ms|s|m|h)")
_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is told; durations are in milliseconds. See `arguments` for the meaning of each."""

    bootstrap_servers: str
    checkpoint: str
    trigger: str = MICRO_BATCH
    interval_ms: int | None = None
    source: str = "sensors"
    target: str = "maximum"
    dead_letter: str = "sensors-dlq"
    window_ms: int = 5_000
    slide_ms: int = 1_000
    watermark_ms: int = 10_000
    ahead_ms: int = 60_000
    starting_offsets: str = "earliest"
    max_offsets_per_trigger: int = 100_000
    accept_data_loss: bool = False
    kafka: Mapping[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (self.source, self.target, self.dead_letter):
            if not is_topic_name(name):
                raise ValueError(f"not a topic name: {name!r}")
        if len({self.source, self.target, self.dead_letter}) != 3:
            raise ValueError("source, target and dead-letter must be three topics")
        if self.slide_ms > self.window_ms:
            raise ValueError("slide must not be longer than window: readings between two windows would be lost")

    @property
    def connection(self) -> dict[str, str]:
        """Kafka client settings by their Kafka names."""
        return {"bootstrap.servers": self.bootstrap_servers, **self.kafka}


class Job(Protocol):
    """A started job."""

    queries: Sequence[StreamingQuery]

    def account(self, progress: Progress) -> Progress:
        """Look after what a batch left behind, and add what is known now to its progress."""
        ...


class MaxTemperature:
    """Maximum per sensor over a sliding window, from topic to topic; malformed and late readings to a third.

    The query `max-temperature` has the trigger that was asked for. `dead-letter` is stateless and in no hurry,
    so it always runs in micro-batches, once a second; in real-time mode its progress also is what tells every
    second how far the topic has been read. Late readings are found after the batch that dropped them
    (`account`), from the offsets and the watermark in its progress.
    """

    name = "max-temperature"

    def __init__(self, spark: SparkSession, options: Options) -> None:
        self._spark = spark
        self._options = options
        self._window, self._slide, watermark = (
            _interval(ms) for ms in (options.window_ms, options.slide_ms, options.watermark_ms)
        )
        self._ahead = _interval(options.ahead_ms)
        source = kafka_stream(
            spark,
            options.source,
            connection=options.connection,
            starting_offsets=options.starting_offsets,
            max_offsets_per_trigger=None if options.trigger == REAL_TIME else options.max_offsets_per_trigger,
            fail_on_data_loss=not options.accept_data_loss,
        )
        checked = transforms.parsed(source, self._ahead)
        results = transforms.maxima(transforms.readings(checked), self._window, self._slide, watermark)
        self._main = kafka_sink(
            transforms.as_records(results),
            options.target,
            name=self.name,
            connection=options.connection,
            checkpoint=f"{options.checkpoint}/{self.name}",
            trigger=options.trigger,
            interval=None if options.interval_ms is None else _interval(options.interval_ms),
        )
        self._rejects = kafka_sink(
            transforms.rejected(checked),
            options.dead_letter,
            name="dead-letter",
            connection=options.connection,
            checkpoint=f"{options.checkpoint}/dead-letter",
            interval="1 second",
            output_mode="append",
        )
        self.queries: Sequence[StreamingQuery] = (self._main, self._rejects)

    def account(self, progress: Progress) -> Progress:
        """Send the readings that a batch dropped as late to the dead-letter topic, and count them.

        Spark only counts what it drops, after it has merged it. The batch's offsets and watermark say exactly
        which readings those were, so they are read again, only when there are any. What a job that dies
        between a batch and this step dropped is in Spark's count, and not in the dead-letter topic.
        """
        if progress.late_rows == 0 or progress.start is None or progress.watermark_ms is None:
            return progress
        options = self._options
        start, end = (msgspec.json.encode(offsets).decode() for offsets in (progress.start, progress.end))
        records = kafka_range(self._spark, options.source, start, end, connection=options.connection)
        late = transforms.late(
            transforms.parsed(records, self._ahead), self._window, self._slide, progress.watermark_ms
        ).cache()
        try:
            count = late.count()
            if count:
                letters = transforms.dead_letters(late).write.format("kafka").option("topic", options.dead_letter)
                letters.options(**{f"kafka.{key}": value for key, value in options.connection.items()}).save()
        finally:
            late.unpersist()
        return msgspec.structs.replace(progress, late_readings=count)


JOBS: Mapping[str, Callable[[SparkSession, Options], Job]] = {MaxTemperature.name: MaxTemperature}


def run(
    spark: SparkSession,
    start: Callable[[SparkSession, Options], Job],
    options: Options,
    *,
    report: Callable[[Progress], None],
    ready: Callable[[], None],
    stop_asked: SimpleQueue[Progress | None],
) -> dict[str, Totals]:
    """Start a job and run it until None is put into `stop_asked`, or a query fails (its exception is raised).

    Args:
        spark: the session; stays open.
        start: of `JOBS`.
        options: the job's.
        report: gets each batch's progress.
        ready: called once when every query has begun to read.
        stop_asked: the queue that progress and the wish to stop come through.

    Returns:
        The totals of each query.
    """
    ended: SimpleQueue[str] = SimpleQueue()
    listener = ProgressListener(stop_asked.put, ended.put)
    spark.streams.addListener(listener)
    totals: dict[str, Totals] = {}
    job: Job | None = None

    def account(progress: Progress) -> None:
        if job is None or progress.run not in {query.runId for query in job.queries}:
            return  # of another job in the same session
        done = job.account(progress)
        totals.setdefault(done.query, Totals()).add(done)
        report(done)

    try:
        job = start(spark, options)
        waiting = list(job.queries)
        while True:
            try:
                item = stop_asked.get(timeout=0.05 if waiting else 0.25)
            except Empty:
                pass
            else:
                if item is None:
                    break
                account(item)
            for query in job.queries:
                if not query.isActive:
                    raise query.exception() or RuntimeError(f"query {query.name} ended by itself")
            if waiting:
                waiting = [query for query in waiting if not _reads(spark, query, options)]
                if not waiting:
                    ready()
    finally:
        for query in () if job is None else job.queries:
            query.stop()
        _wait_ended(() if job is None else job.queries, ended)
        spark.streams.removeListener(listener)
    while not stop_asked.empty():
        if (item := stop_asked.get()) is not None:
            account(item)
    return totals


def _wait_ended(queries: Sequence[StreamingQuery], ended: SimpleQueue[str], limit_s: float = 2.0) -> None:
    """Wait until the listener was told of every query's end, hence of all its progress before; at most `limit_s`."""
    missing = {query.runId for query in queries}
    deadline = time.monotonic() + limit_s
    while missing and (left := deadline - time.monotonic()) > 0:
        try:
            missing.discard(ended.get(timeout=left))
        except Empty:
            return


def _reads(spark: SparkSession, query: StreamingQuery, options: Options) -> bool:
    """Whether a query has begun to read: what is sent from now on is processed without start-up delay."""
    status = query.status
    if status["message"].startswith("Waiting") or query.lastProgress is not None:
        return True
    if query.name == "dead-letter" or options.trigger != REAL_TIME or not status["isTriggerActive"]:
        return False
    tracker = spark.sparkContext.statusTracker()
    infos = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return len(infos) >= 2 and all(info is not None and info.numActiveTasks == info.numTasks for info in infos)


def wait_for_topics(
    spark: SparkSession, options: Options, say: Callable[[str], None], stop_asked: SimpleQueue[Progress | None]
) -> bool:
    """Wait until Kafka answers and has the three topics, saying every 5 s what is missing.

    Returns:
        False: the wish to stop came first.

    Raises:
        ValueError: real-time mode, and the local master has too few slots for the source's partitions.
    """
    names = (options.source, options.target, options.dead_letter)
    said = 0.0
    while True:
        known = topics_of(spark, names, options.connection)
        missing = [name for name in names if known is None or name not in known]
        if known is not None and not missing:
            break
        if time.monotonic() - said > 5:
            said = time.monotonic()
            if known is None:
                say(f"waiting for Kafka: {options.bootstrap_servers} does not answer")
            else:
                say(f"waiting for topic {', '.join(missing)} on {options.bootstrap_servers}: create it")
        try:
            if stop_asked.get(timeout=0.5) is None:
                return False
        except Empty:
            continue
    context = spark.sparkContext
    needed = known[options.source] + int(spark.conf.get("spark.sql.shuffle.partitions", "2") or 2) + 1
    slots = context.defaultParallelism
    if options.trigger == REAL_TIME and str(context.master).startswith("local") and slots < needed:
        raise ValueError(
            f"real-time mode runs all tasks at once: {known[options.source]} partitions of {options.source} "
            f"need {needed} slots and {context.master} has {slots}; use --master 'local[{needed}]'"
        )
    return True


def _interval(ms: int) -> str:
    return f"{ms} milliseconds"


def duration(text: str) -> int:
    """Milliseconds of `500ms`, `5s`, `10m`, `1h`; raises argparse's error otherwise."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"a duration such as 500ms, 5s, 10m or 1h, not {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"NAME=VALUE, not {text!r}")
    return name, value


def arguments() -> argparse.ArgumentParser:
    """The command line of `python -m spark_sinks`."""
    parser = argparse.ArgumentParser(prog="spark_sinks", description="Run a streaming job on Kafka topics.")
    add = parser.add_argument
    add("job", choices=sorted(JOBS))
    add("--bootstrap-servers", required=True, help="Kafka, host:port,...")
    add("--checkpoint", required=True, help="directory (or URL) that makes a restart go on where this run ended")
    add("--trigger", choices=(MICRO_BATCH, REAL_TIME), default=MICRO_BATCH)
    add("--interval", type=duration, help="of micro-batches (default: one after the other) or of real-time "
        "checkpoints (default: 5m; not below 5s)")  # fmt: skip
    add("--source", default="sensors", help="topic of the readings")
    add("--target", default="maximum", help="topic of the results")
    add("--dead-letter", default="sensors-dlq", help="topic of malformed and late readings")
    add("--window", type=duration, default=5_000)
    add("--slide", type=duration, default=1_000)
    add("--watermark", type=duration, default=10_000, help="how late a reading may be")
    add("--ahead", type=duration, default=60_000, help="how far a reading's time may be ahead of its arrival")
    add("--starting-offsets", choices=("earliest", "latest"), default="earliest", help="of the first start")
    add("--max-offsets-per-trigger", type=int, default=100_000, help="records of one micro-batch at most")
    add("--accept-data-loss", action="store_true", help="go on when the broker lost records not yet read")
    add("--kafka", type=_pair, action="append", default=[], metavar="NAME=VALUE", help="Kafka client setting")
    add("--master", help="any Spark master (default: local, with the slots that the trigger needs)")
    add("--jars", default="", help="the connector's jars, separated by commas")
    add("--shuffle-partitions", type=int, default=2)
    add("--driver-memory", default="1g")
    add("--quick-start", action="store_true", help="a driver that starts sooner and is slower afterwards")
    add("--conf", type=_pair, action="append", default=[], metavar="NAME=VALUE", help="Spark setting")
    add("--ui", action="store_true", help="serve Spark's web pages")
    add("--log-level", default="WARN", help="of Spark's log")
    add("--log-file", type=Path, help="where Spark's log goes (default: spark.log in a local checkpoint)")
    add("--ready-file", type=Path, help="written once the job has begun to read")
    add("--die-with-parent", action="store_true", help="stop when the starting process ends, however it ends")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a job as this process: progress as JSON lines on the standard output, a summary line at the end.

    SIGTERM and SIGINT stop the queries, the session and the JVM.

    Returns:
        0 after a stop that was asked for, 1 when the job failed, with one line on the standard error and the
        whole story in the log. (A wrong command line exits with 2.)
    """
    parser = arguments()
    given = parser.parse_args(argv)
    try:
        options = Options(
            **{
                name: getattr(given, name)
                for name in (
                    "bootstrap_servers", "checkpoint", "trigger", "source", "target", "dead_letter",
                    "starting_offsets", "max_offsets_per_trigger", "accept_data_loss",
                )
            },
            interval_ms=given.interval, window_ms=given.window, slide_ms=given.slide,
            watermark_ms=given.watermark, ahead_ms=given.ahead, kafka=dict(given.kafka),
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    if given.die_with_parent:
        die_with_parent()
    console = Console()
    log_file = given.log_file
    if log_file is None and "://" not in options.checkpoint:
        log_file = Path(options.checkpoint) / "spark.log"
    if log_file is not None:
        console.divert(log_file)
    try:
        _run_process(given, options, console)
    except Exception as error:  # the last one who can say it
        traceback.print_exc()
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        console.say(f"{given.job} failed: {first}" + (f" (see {log_file})" if log_file else ""))
        return 1
    finally:
        end_jvm()
        console.close()
    return 0


def _run_process(given: argparse.Namespace, options: Options, console: Console) -> None:
    def stop_now() -> None:
        raise SystemExit(0)

    on_stop(stop_now)  # while the JVM starts nothing is there to be stopped in order
    slots = REAL_TIME_SLOTS if options.trigger == REAL_TIME else max(2, os.cpu_count() or 2)
    spark = session(
        f"trivium {given.job}",
        master=given.master or f"local[{slots}]",
        jars=[Path(jar) for jar in given.jars.split(",") if jar],
        driver_memory=given.driver_memory,
        shuffle_partitions=given.shuffle_partitions,
        log_level=given.log_level,
        ui=given.ui,
        quick_start=given.quick_start,
        conf=dict(given.conf),
    )
    events: SimpleQueue[Progress | None] = SimpleQueue()
    on_stop(lambda: events.put(None))
    encode = msgspec.json.encode

    def ready() -> None:
        console.report(encode({"kind": "ready", "job": given.job, "trigger": options.trigger}))
        if given.ready_file is not None:
            written = given.ready_file.with_suffix(".tmp")
            written.write_bytes(encode({"job": given.job, "trigger": options.trigger, "pid": os.getpid()}))
            written.replace(given.ready_file)

    try:
        if wait_for_topics(spark, options, console.say, events):
            totals = run(
                spark, JOBS[given.job], options,
                report=lambda progress: console.report(encode(progress)), ready=ready, stop_asked=events,
            )  # fmt: skip
            console.report(encode({"kind": "summary", "queries": totals}))
    finally:
        spark.stop()
