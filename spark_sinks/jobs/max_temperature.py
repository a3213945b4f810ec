"""The highest temperature of each sensor over a sliding window."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_sinks.run.job import SHORTEST_BEHIND_S, Flow, JobKind, JobOptions, duration
from spark_sinks.spec.jobs import NAMED
from spark_sinks.spec.parts import Window
from spark_sinks.spec.triggers import REAL_TIME, Trigger
from spark_sinks.spec.values import Duration
from spark_sinks.transforms import maximum as transforms
from spark_sinks.transforms import results
from spark_sinks.transforms.windows import interval

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
        """The topics it reads and writes."""
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


class MaxTemperature(Flow):
    """Each sensor's maximum over a sliding window, to one topic; malformed and late readings to another."""

    options: Options

    def __init__(self, spark: SparkSession, options: Options) -> None:
        super().__init__(spark, options, name=NAME, topics=[options.source], rejects_topic=options.dead_letter)

    @property
    def meaning(self) -> dict[str, str]:
        """The window, which its state was made with."""
        return {"--window": f"{self.options.window_ms} ms", "--slide": f"{self.options.slide_ms} ms"}

    @property
    def window(self) -> Window:
        """The job's window."""
        options = self.options
        length, slide, watermark = (
            Duration(f"{ms}ms") for ms in (options.window_ms, options.slide_ms, options.watermark_ms)
        )
        return Window(length=length, slide=slide, watermark=watermark)

    @property
    def behind_s(self) -> float:
        """At most half of the watermark."""
        return min(SHORTEST_BEHIND_S, self.options.watermark_ms / 2_000)

    def left_out(self, source: DataFrame, watermark_ms: Column) -> DataFrame:
        """Return the records that are no readings, with the reason."""
        options = self.options
        parsed = transforms.parsed(source, interval(options.ahead_ms))
        return transforms.rejected(parsed, self.window, watermark_ms)

    def start(self, trigger: Trigger) -> StreamingQuery:
        """Start the query of the maxima."""
        options = self.options
        parsed = transforms.parsed(self.stream(trigger, headers=False), interval(options.ahead_ms))
        made = transforms.maxima(results.good(parsed), self.window)
        final = options.emit == FINAL
        made = results.json_records(made, ["sensor"], final=final)
        return self.to_kafka(made, [options.target], trigger, final=final)


JOB = JobKind(NAME, NAMED[NAME], Options, add_arguments, MaxTemperature)
