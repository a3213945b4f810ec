"""The highest temperature of each sensor over a sliding window."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_sinks.job import Flow, JobKind, JobOptions, duration
from spark_sinks.reject_scanner import Rejects
from spark_sinks.sinks import kafka_sink
from spark_sinks.spec.jobs import NAMED
from spark_sinks.transforms import maximum as transforms
from spark_sinks.transforms import results
from spark_sinks.transforms.windows import interval
from spark_sinks.triggers import REAL_TIME, Trigger

NAME = "max-temperature"
UPDATES = "updates"
FINAL = "final"


class Options(JobOptions, frozen=True, kw_only=True):
    """The job's options; `add_arguments` explains each."""

    source: str = "sensors"
    target: str = "maximum"
    dead_letter: str = "sensors-dlq"
    window_ms: int = 5_000
    slide_ms: int = 1_000
    watermark_ms: int = 10_000
    ahead_ms: int = 60_000
    emit: str = UPDATES

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.topics)) != len(self.topics):
            raise ValueError("source, target and dead-letter must be three different topics")
        if self.slide_ms > self.window_ms:
            raise ValueError("slide must not be longer than window: readings between two windows would be lost")
        if self.emit == FINAL and self.trigger == REAL_TIME:
            raise ValueError("real time has no final results: emit updates, or use the trigger micro-batch")

    @property
    def topics(self) -> Sequence[str]:
        """See `JobOptions`."""
        return self.source, self.target, self.dead_letter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this job."""
    add = parser.add_argument
    add("--source", default="sensors", help="topic of the readings")
    add("--target", default="maximum", help="topic of the results")
    add("--dead-letter", default="sensors-dlq", help="topic of malformed and late readings")
    add("--window", dest="window_ms", type=duration, default=5_000, help="length of a window of event time")
    add("--slide", dest="slide_ms", type=duration, default=1_000, help="from one window's start to the next")
    add("--watermark", dest="watermark_ms", type=duration, default=10_000, help="how late a reading may be")
    add(
        "--ahead", dest="ahead_ms", type=duration, default=60_000,
        help="how far a reading's time may be ahead of its arrival",
    )  # fmt: skip
    add(
        "--emit", choices=(UPDATES, FINAL), default=UPDATES,
        help="updates: a result each time its window changes; final: one result, with header emit = final, when the "
        "watermark has closed the window (micro-batches only)",
    )  # fmt: skip


def flow(spark: SparkSession, options: Options) -> Flow:
    """Write each sensor's maximum over a sliding window to one topic, malformed and late readings to another."""
    window, slide, watermark, ahead = (
        interval(ms) for ms in (options.window_ms, options.slide_ms, options.watermark_ms, options.ahead_ms)
    )
    checkpoint = f"{options.checkpoint}/{NAME}"

    def start(trigger: Trigger) -> StreamingQuery:
        source = options.stream(spark, [options.source], trigger, headers=False)
        made = transforms.maxima(results.good(transforms.parsed(source, ahead)), window, slide, watermark)
        return kafka_sink(
            results.json_records(made, ["sensor"], final=options.emit == FINAL),
            options.target,
            name=NAME,
            connection=options.connection,
            checkpoint=checkpoint,
            trigger=trigger,
            output_mode="append" if options.emit == FINAL else "update",
        )

    def rejects(records: DataFrame, watermark_ms: Column) -> DataFrame:
        return transforms.rejected(transforms.parsed(records, ahead), options.window_ms, options.slide_ms, watermark_ms)

    return Flow(
        name=NAME,
        topics=[options.source],
        checkpoint=checkpoint,
        trigger=Trigger(options.trigger, options.interval_ms),
        start=start,
        rejects=Rejects(options.dead_letter, rejects, options.max_offsets_per_trigger),
        behind_s=min(5.0, options.watermark_ms / 2000),
    )


def slots(options: Options, partitions: Mapping[str, int], shuffle: int) -> int:
    """Return how many tasks run at once: both stages of the maximum, and one that scans for dead letters."""
    return partitions[options.source] + shuffle + 1


JOB = JobKind(
    name=NAME,
    summary=NAMED[NAME],
    options=Options,
    add_arguments=add_arguments,
    flow=flow,
    slots=slots,
)
