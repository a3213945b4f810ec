"""Turns a job file into a job that `spark_sinks.run.runner` can run: one flow from its topics to its sink.

The single query of a stateless job writes both results and dead letters, each record with its topic. For a stateful
job, `spark_sinks/run/reject_scanner.py` finds the records that its results omit by reading finished batches again.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.conf import RuntimeConfig
from pyspark.sql.streaming.query import StreamingQuery

from spark_sinks.archive.lake import table_of
from spark_sinks.archive.parquet import ParquetArchive
from spark_sinks.archive.rows import checkpoint_id, rows
from spark_sinks.read import decode, registry
from spark_sinks.read.records import records, term
from spark_sinks.read.sources import Broker
from spark_sinks.run.job import LIMITS_S, SHORTEST_BEHIND_S, Flow, JobKind, JobOptions
from spark_sinks.run.job_file import JobFile
from spark_sinks.spark.checkpoint import JobCheckpoint
from spark_sinks.spark.plan import stateful_steps
from spark_sinks.spec import jobs as spec
from spark_sinks.spec import meaning
from spark_sinks.spec.parts import ArchiveSink, Session, Window
from spark_sinks.spec.triggers import REAL_TIME, Trigger
from spark_sinks.spec.values import Term
from spark_sinks.transforms import enrich, last, results, thresholds, windows
from spark_sinks.transforms.record_size import KAFKA_HEADERS

REGISTRY_MS: Final = 10_000
"""How often a registry's topic is read in real time, unless the job file sets an interval."""
BATCH_BYTES: Final = 64 << 20
"""About the most bytes of a table's batch, as stored in the log: what a killed job writes once more."""
NO_DATA_BATCHES: Final = "spark.sql.streaming.noDataMicroBatches.enabled"
SEVERAL_STEPS: Final = "spark.sql.streaming.statefulOperator.allowMultiple"
"""Whether each stateful step has a watermark of its own. With one for all, a step drops as late what the step before it
has just made. A query with one step has the same watermark either way, and its state without it (`session.py`)."""


class DeclaredOptions(JobOptions, frozen=True, kw_only=True):
    """A declared job's file, and the options that the command line overrides."""

    file: JobFile

    def __post_init__(self) -> None:
        super().__post_init__()
        run: dict[str, Any] = {"trigger": self.trigger, "checkpoint": self.checkpoint}
        if self.interval_ms is not None:
            run["interval"] = f"{self.interval_ms}ms"
        self.file.running_with(run)  # raises for a contradiction

    @property
    def topics(self) -> Sequence[str]:
        """The topics that its file names."""
        return self.file.streaming.topics


def kind_of(file: JobFile) -> JobKind:
    """Return the job of a file as a kind that is started by the file's path."""
    run = file.streaming.run
    defaults = {
        **dict(run),  # its keys are the names of the command line's options
        "file": file,
        "interval_ms": None if run.interval is None else run.interval.ms,
        "kafka": list(run.kafka.items()),
        "conf": list(run.conf.items()),
    }

    return JobKind(
        name=file.spec.title,
        summary=type(file.spec).SUMMARY,
        options=DeclaredOptions,
        add_arguments=lambda parser: parser.set_defaults(**defaults),
        flow=flow,
        file=file.path,
    )


def flow(spark: SparkSession, options: DeclaredOptions) -> DeclaredJob:
    """Return the flow of a job file."""
    declared = options.file.streaming
    has_means = isinstance(declared, spec.Anomalies) and declared.has_state
    return AnomaliesWithMeans(spark, options) if has_means else _JOBS[declared.job](spark, options)


class DeclaredJob(Flow):
    """Common parts of all kinds of jobs; a kind turns readings into results."""

    def __init__(self, spark: SparkSession, options: DeclaredOptions) -> None:
        declared = options.file.streaming
        source = declared.source
        super().__init__(spark, options, name=declared.title, topics=source.topics, rejects_topic=source.dead_letters)
        self.declared: Any = declared

    def left_out(self, source: DataFrame, watermark_ms: Column) -> DataFrame:
        """Return the records that cannot be decoded, with the reason."""
        return self.checked(source).where(F.col("error").isNotNull()).select("record.*", "error")

    def grouped_meaning(self, by: Sequence[Term], *columns: str) -> dict[str, str]:
        """Return the meaning of a state of groups, made from these columns."""
        terms = [what for kind, what in (of.parts for of in by) if kind == "column"]
        return {"job": self.declared.job, "by": ", ".join(by)} | meaning.of_source(
            self.declared.source, [*terms, *columns]
        )

    def checked(self, source: DataFrame) -> DataFrame:
        """Decode the source's records into readings."""
        needed = [(str(of), term(of)) for of in self.declared.groups]
        return decode.readings(records(source), self.declared.source, needed)

    def readings(self, trigger: Trigger) -> DataFrame:
        """Return the readings, good and bad ones, as a stream."""
        return self.checked(self.stream(trigger))


class Windowed(DeclaredJob):
    """Statistics over windows or sessions."""

    declared: spec.WindowStats | spec.Sessionize

    @property
    def window(self) -> Window | Session:
        """The job's window or session."""
        return self.declared.window if isinstance(self.declared, spec.WindowStats) else self.declared.session

    @property
    def behind_s(self) -> float:
        """Well below the watermark's delay, so that readings do not become late."""
        return min(SHORTEST_BEHIND_S, self.window.watermark.ms / 2_000)

    @property
    def meaning(self) -> dict[str, str]:
        """The window and the results: not their names, but their order, since Spark's state has no names."""
        window, aggregates = self.window, self.declared.aggregates.values()
        if isinstance(window, Session):
            times = {"session.gap": f"{window.gap.ms} ms"}
        else:
            slide = window.slide or window.length
            times = {"window.length": f"{window.length.ms} ms", "window.slide": f"{slide.ms} ms"}
        used = [column for of in aggregates if (column := of.parts[1]) is not None]
        return self.grouped_meaning(self.declared.by, *used) | times | {"aggregates": ", ".join(map(str, aggregates))}

    def left_out(self, source: DataFrame, watermark_ms: Column) -> DataFrame:
        """Also include the readings that Spark drops as late."""
        rejected = windows.left_out(self.checked(source), self.window, watermark_ms)
        packs = self.declared.source.decode == "senml"  # several readings of one record may be late
        return rejected.dropDuplicates(["topic", "partition", "offset"]) if packs else rejected

    def start(self, trigger: Trigger) -> StreamingQuery:
        """Start the query of the aggregates."""
        declared, window = self.declared, self.window
        good = results.good(self.readings(trigger))
        old = JobCheckpoint(self.spark, self.checkpoint).lacks_in_state(windows.WITHIN_LONG)
        sums = F.sum if old else F.try_sum
        if isinstance(window, Session):
            made = windows.sessions(good, declared.by, window, declared.aggregates, sums=sums)
        else:
            made = windows.statistics(good, declared.by, window, declared.aggregates, sums=sums)
        final = declared.sink.emit == "final"
        made = results.json_records(made, [of.name for of in declared.by], final=final)
        return self.to_kafka(made, [declared.sink.kafka], trigger, final=final)


class LastKnownJob(DeclaredJob):
    """The last values."""

    declared: spec.LastKnown

    @property
    def meaning(self) -> dict[str, str]:
        """The groups."""
        return self.grouped_meaning(self.declared.by)

    def start(self, trigger: Trigger) -> StreamingQuery:
        """Start the query of the last values."""
        made = last.newest(results.good(self.readings(trigger)), self.declared.by)
        topics = [self.declared.sink.kafka]
        if self.declared.sink.retained:
            made = last.as_retained(made, self.declared.sink.kafka)
            topics.append(last.RETAINED)
        return self.to_kafka(made, topics, trigger, final=False)


class Stateless(DeclaredJob):
    """Base of the jobs whose single query writes results and dead letters."""

    STAGES = 1

    def __init__(self, spark: SparkSession, options: DeclaredOptions) -> None:
        super().__init__(spark, options)
        self.rejects_topic = None

    def routed(self, checked: DataFrame, made: Column, trigger: Trigger) -> StreamingQuery:
        """Start the query, which writes the records made from good readings and the dead letters."""
        declared = self.declared
        limits = self.limits(declared.sink.kafka, self.letters_topic)
        placed = results.routed(checked, made, declared.sink.kafka, self.letters_topic, limits)
        return self.write(placed, limits, trigger, final=trigger.mode != REAL_TIME)


class EnrichJob(Stateless):
    """Readings with the columns of a registry."""

    declared: spec.Enrich

    @property
    def trigger(self) -> Trigger:
        """In real time the registry's topic is read again at each checkpoint."""
        made = super().trigger
        reads_topic = made.mode == REAL_TIME and self.declared.registry.topic is not None
        return replace(made, interval_ms=REGISTRY_MS) if reads_topic and made.interval_ms is None else made

    def start(self, trigger: Trigger) -> StreamingQuery:
        """Start the query of the joined readings."""
        declared = self.declared
        known = registry.read(self.spark, declared.registry, self.options.connection)
        checked = enrich.enriched(self.readings(trigger), declared.by, known)
        columns = [*declared.source.columns, *declared.registry.columns]
        return self.routed(checked, enrich.enriched_records(declared.by, columns), trigger)


class AnomaliesJob(Stateless):
    """Alarms by fixed thresholds."""

    declared: spec.Anomalies

    def start(self, trigger: Trigger) -> StreamingQuery:
        """Start the query of the alarms."""
        declared = self.declared
        made = thresholds.alarms(declared.by, declared.thresholds, packs=declared.source.decode == "senml")
        return self.routed(self.readings(trigger), made, trigger)


class AnomaliesWithMeans(DeclaredJob):
    """Alarms by fixed thresholds and by distance from the device's mean."""

    declared: spec.Anomalies

    @property
    def meaning(self) -> dict[str, str]:
        """The thresholds that keep a state."""
        kept = [name for name, threshold in self.declared.thresholds.items() if threshold.deviations is not None]
        return self.grouped_meaning([self.declared.by], *kept)

    def start(self, trigger: Trigger) -> StreamingQuery:
        """Start the query of the alarms with deviations."""
        # Spark gives the Python process that this starts ten seconds, however busy the machine is. Importing its module
        # here first has it compiled and in the page cache.
        importlib.import_module("pyspark.sql.streaming.transform_with_state_driver_worker")
        declared, conf = self.declared, self.spark.conf
        made = thresholds.with_means(
            results.good(self.readings(trigger)),
            declared.by,
            declared.thresholds,
            declared.forget.ms,
            packs=declared.source.decode == "senml",
        )
        with _setting(conf, NO_DATA_BATCHES, "false"):  # else state with a time-to-live runs empty batches forever
            return self.to_kafka(made, [declared.sink.kafka], trigger, final=False)


class TransformJob(DeclaredJob):
    """The records that a Python file makes from the readings."""

    declared: spec.Transform
    ACCOUNTS = False

    @property
    def meaning(self) -> dict[str, str]:
        """The code, if it has state."""
        if not stateful_steps(self._made(self.trigger)):
            return {}
        used = meaning.of_source(self.declared.source, list(self.declared.source.columns))
        return {"job": self.declared.job, "transform": f"code {meaning.of_code(self.options.file.path)}"} | used

    def _made(self, trigger: Trigger) -> DataFrame:
        function = self.options.file.transform
        assert function is not None  # `job_file.read`
        made: DataFrame = function(results.good(self.readings(trigger)).drop("record", "error"))
        return made

    def start(self, trigger: Trigger) -> StreamingQuery:
        """Start the function's query; ValueError if its records have no key or value."""
        made = self._made(trigger)
        if not {"key", "value"}.issubset(made.columns):
            raise ValueError(f"transform: the records need columns key and value, not only {', '.join(made.columns)}")
        headers = F.col("headers") if "headers" in made.columns else F.array()
        made = made.select(
            F.col("key").cast("binary").alias("key"),
            F.col("value").cast("binary").alias("value"),
            headers.cast(KAFKA_HEADERS).alias("headers"),
        )
        final = self.declared.sink.emit == "final"
        if stateful_steps(made) < 2:
            return self.to_kafka(made, [self.declared.sink.kafka], trigger, final=final)
        with _setting(self.spark.conf, SEVERAL_STEPS, "true"):
            return self.to_kafka(made, [self.declared.sink.kafka], trigger, final=final)


class ToArchive(DeclaredJob):
    """Every record, written to files."""

    declared: spec.Archive
    STAGES = 1
    SIZED = False

    def start(self, trigger: Trigger) -> StreamingQuery:
        """Start the query that archives; ArchiveError if the archive belongs to another job."""
        declared = self.declared
        if declared.sink.format != "parquet":
            trigger = replace(trigger, most=self._most(trigger))
        archived = rows(self.readings(trigger), declared.source)
        writer = (
            archived.writeStream.queryName(self.name)
            .option("checkpointLocation", self.checkpoint)
            .foreachBatch(self._writing(archived, declared.sink))
        )
        return trigger.start(writer)

    def _most(self, trigger: Trigger) -> int:
        """Return the most records of a table's batch; of large records fewer."""
        most: int = self.options.max_offsets_per_trigger if trigger.most is None else trigger.most
        with Broker(self.spark, self.options.connection, LIMITS_S) as broker:
            size = broker.record_bytes(self.topics)
        return most if size is None else min(most, max(1, int(BATCH_BYTES / size)))

    def _writing(self, archived: DataFrame, sink: ArchiveSink) -> Callable[[DataFrame, int], None]:
        """Claim the archive for this checkpoint, and return the function that adds a batch of `rows`."""
        if sink.format == "parquet":
            return ParquetArchive(
                self.spark, sink.archive, self.checkpoint, files=sink.files, segment=sink.segment
            ).write
        from spark_sinks.archive.tables import TableArchive  # noqa: PLC0415 - needs pyarrow, of the extra `lake`

        table = TableArchive(table_of(sink, checkpoint_id(self.spark, self.checkpoint)), sink.files)
        table.drop_planned(archived, JobCheckpoint(self.spark, self.checkpoint))
        return table.write


@contextlib.contextmanager
def _setting(conf: RuntimeConfig, name: str, value: str) -> Iterator[None]:
    """Have a query that starts in this context get a setting, and other queries of the session what they had."""
    before = conf.get(name)
    conf.set(name, value)
    try:
        yield
    finally:
        conf.set(name, before or "")


_JOBS: Final[Mapping[str, type[DeclaredJob]]] = {
    "window-stats": Windowed,
    "sessionize": Windowed,
    "last-known": LastKnownJob,
    "enrich": EnrichJob,
    "anomalies": AnomaliesJob,
    "archive": ToArchive,
    "transform": TransformJob,
}
