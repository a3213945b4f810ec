"""The highest temperature of each sensor over a sliding window."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_sinks.job import JobKind, JobOptions, duration, interval
from spark_sinks.progress import Progress
from spark_sinks.sinks import REAL_TIME, kafka_sink
from spark_sinks.sources import kafka_range, kafka_stream
from spark_sinks.transforms import maximum as transforms
from spark_sinks.transforms.dead_letters import dead_letters

DEAD_LETTER_QUERY = "dead-letter"


class Options(JobOptions, frozen=True, kw_only=True):
    """What the job is told; see `add_arguments` for the meaning of each."""

    source: str = "sensors"
    target: str = "maximum"
    dead_letter: str = "sensors-dlq"
    window_ms: int = 5_000
    slide_ms: int = 1_000
    watermark_ms: int = 10_000
    ahead_ms: int = 60_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.topics)) != len(self.topics):
            raise ValueError("source, target and dead-letter must be three topics")
        if self.slide_ms > self.window_ms:
            raise ValueError("slide must not be longer than window: readings between two windows would be lost")

    @property
    def topics(self) -> Sequence[str]:
        """See `JobOptions`."""
        return self.source, self.target, self.dead_letter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The job's own options."""
    add = parser.add_argument
    add("--source", default="sensors", help="topic of the readings")
    add("--target", default="maximum", help="topic of the results")
    add("--dead-letter", default="sensors-dlq", help="topic of malformed and late readings")
    add("--window", dest="window_ms", type=duration, default=5_000, help="of event time")
    add("--slide", dest="slide_ms", type=duration, default=1_000, help="from one window's start to the next")
    add("--watermark", dest="watermark_ms", type=duration, default=10_000, help="how late a reading may be")
    add(
        "--ahead", dest="ahead_ms", type=duration, default=60_000,
        help="how far a reading's time may be ahead of its arrival",
    )  # fmt: skip


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
            interval(ms) for ms in (options.window_ms, options.slide_ms, options.watermark_ms)
        )
        self._ahead = interval(options.ahead_ms)
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
        main = kafka_sink(
            transforms.as_records(results),
            options.target,
            name=self.name,
            connection=options.connection,
            checkpoint=f"{options.checkpoint}/{self.name}",
            trigger=options.trigger,
            interval=None if options.interval_ms is None else interval(options.interval_ms),
        )
        rejects = kafka_sink(
            transforms.rejected(checked),
            options.dead_letter,
            name=DEAD_LETTER_QUERY,
            connection=options.connection,
            checkpoint=f"{options.checkpoint}/{DEAD_LETTER_QUERY}",
            interval="1 second",
            output_mode="append",
        )
        self.queries: Sequence[StreamingQuery] = (main, rejects)
        self.real_time = frozenset({self.name} if options.trigger == REAL_TIME else ())

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
                letters = dead_letters(late).write.format("kafka").option("topic", options.dead_letter)
                letters.options(**{f"kafka.{key}": value for key, value in options.connection.items()}).save()
        finally:
            late.unpersist()
        return msgspec.structs.replace(progress, late_readings=count)


def slots(options: Options, partitions: Mapping[str, int], shuffle: int) -> int:
    """The tasks of the two stages of the maximum, and one of the dead letters."""
    return partitions[options.source] + shuffle + 1


JOB = JobKind(
    name=MaxTemperature.name,
    summary="the maximum of each sensor over a sliding window",
    options=Options,
    add_arguments=add_arguments,
    start=MaxTemperature,
    slots=slots,
)
