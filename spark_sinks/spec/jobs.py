"""The kinds of jobs that a file may declare, with their consistency checks. Needs neither Spark nor a JVM.

A job file is TOML, or Python that creates one of these classes (`spark_sinks/run/job_file.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from spark_sinks.spec.audit import BridgeAudit
from spark_sinks.spec.backfill import Backfill
from spark_sinks.spec.parts import (
    PYTHON_DECODERS,
    REAL_TIME,
    SHORTEST_REAL_TIME_MS,
    ArchiveSink,
    Declaration,
    LastSink,
    Maintain,
    Registry,
    ResultSink,
    Run,
    Session,
    Source,
    Threshold,
    TopicSink,
    Window,
)
from spark_sinks.spec.replays import DlqReplay, Replay
from spark_sinks.spec.values import MICRO_BATCH_ONLY, NUMBERS, RECORD_COLUMNS, Aggregate, ColumnName, Duration, Term


class JobSpec(Declaration):
    """A streaming job: its source, what it computes, and its sink."""

    DEAD_LETTERS: ClassVar[bool] = True
    CLOCKS_COUNT: ClassVar[bool] = False
    """Whether a fast clock may make other readings late."""
    source: Source
    run: Run
    sink: TopicSink | ArchiveSink

    @property
    def targets(self) -> tuple[str, ...]:
        """The topics that the job writes, without dead letters."""
        return (self.sink.kafka,) if isinstance(self.sink, TopicSink) else ()

    @property
    def topics(self) -> tuple[str, ...]:
        """Every topic that must exist before the job starts."""
        return tuple(filter(None, (*self.source.topics, *self.targets, self.source.dead_letters)))

    @property
    def groups(self) -> tuple[Term, ...]:
        """The terms by which results are grouped or keyed."""
        return ()

    def lacks(self) -> Iterator[str]:
        """Yield one sentence for each contradiction between the job's sections."""
        source, run = self.source, self.run
        for target in self.targets:
            if target in source.topics:
                yield f"sink.kafka: {target} is a source of this job, which would read its own results"
        if not self.DEAD_LETTERS:
            if source.dead_letters is not None:
                yield "source.dead_letters: not used by an archive, which keeps every record with its error"
        elif source.dead_letters is None:
            yield "source.dead_letters: set a topic for records that cannot be decoded"
        elif source.dead_letters in (*source.topics, *self.targets):
            yield f"source.dead_letters: {source.dead_letters} is a source or a sink of this job"
        for term in self.groups:
            kind, name = term.parts
            if kind == "column" and name not in source.columns and RECORD_COLUMNS.get(name) is None:
                yield f"by: no column {name}; source.columns has {_listed(source.columns)}"
            elif source.decode == "senml" and name in source.columns and source.columns[name].optional:
                yield f"by: {name} is optional, but a SenML pack is accepted or rejected as a whole"
        if run.trigger == REAL_TIME and source.decode in PYTHON_DECODERS:
            yield (
                f"source.decode: {source.decode} is decoded in Python, which real time cannot run; run.trigger = "
                '"micro-batch", or json, number, csv or avro'
            )
        shortest = 0 if "spark.sql.streaming.realTimeMode.minBatchDuration" in run.conf else SHORTEST_REAL_TIME_MS
        if run.trigger == REAL_TIME and run.interval is not None and run.interval.ms < shortest:
            yield f"run.interval: {run.interval} between two checkpoints is too short for real time, which needs 5s"
        if run.trigger == REAL_TIME and isinstance(self.sink, ResultSink) and self.sink.emit == "final":
            yield 'sink.emit: real time has no final results; use emit = "updates", or run.trigger = "micro-batch"'


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"


class Grouped(JobSpec):
    """Base of the jobs whose results are grouped."""

    by: Annotated[tuple[Term, ...], Field(min_length=1)] = (Term("key"),)
    """the terms that group results and, joined by `/` (in all but the first it is written `%2F`), form their key:
    columns, `key`, `topic`, `content_type`,
    `level[2]` (of the MQTT topic), `header[unit]`"""

    @property
    def groups(self) -> tuple[Term, ...]:
        """The terms whose values each have a result."""
        return self.by

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its sections."""
        yield from super().lacks()
        names = [term.name.lower() for term in self.by]
        if len(set(names)) != len(names):
            yield "by: two terms have the same name in the results"


class Aggregated(Grouped):
    """Base of the jobs with windows."""

    CLOCKS_COUNT: ClassVar[bool] = True
    RESULTS: ClassVar[frozenset[str]] = frozenset({"start", "end"})
    aggregates: Annotated[dict[ColumnName, Aggregate], Field(min_length=1)]
    """the fields of a result: `{ maximum = "max(temperature)", p95 = "percentile(temperature, 0.95)" }`"""
    sink: ResultSink

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its sections."""
        yield from super().lacks()
        taken = {name.lower() for name in (*self.RESULTS, *(term.name for term in self.by))}
        for name, aggregate in self.aggregates.items():
            if name.lower() in taken:
                yield f"aggregates.{name}: a result already has a field of this name"
            taken.add(name.lower())
            function, column, _ = aggregate.parts
            if column is None:
                continue
            if column not in self.source.columns:
                known = _listed(self.source.columns)
                yield f"aggregates.{name}: no column {column}; source.columns has {known}"
            elif function in {"sum", "mean", "stddev", "percentile"} and self.source.type_of(column) not in NUMBERS:
                yield f"aggregates.{name}: {function} needs a number, but {column} is a {self.source.type_of(column)}"
            elif function in {"min", "max"} and self.source.type_of(column) == "boolean":
                yield f"aggregates.{name}: {function} is not defined for a boolean; use count"
        if self.run.trigger == REAL_TIME:
            for name, aggregate in self.aggregates.items():
                if aggregate.parts[0] in MICRO_BATCH_ONLY:
                    yield f'aggregates.{name}: {aggregate.parts[0]} needs run.trigger = "micro-batch"'


class WindowStats(Aggregated):
    """Statistics of each group over windows of event time."""

    SUMMARY: ClassVar[str] = "statistics of each device, or of each MQTT level, over windows of event time"
    job: Literal["window-stats"] = "window-stats"
    window: Window


class Sessionize(Aggregated):
    """Sessions of devices."""

    SUMMARY: ClassVar[str] = "sessions of each device, which end when it is silent"
    RESULTS: ClassVar[frozenset[str]] = frozenset({"start", "end", "duration_ms"})
    job: Literal["sessionize"] = "sessionize"
    session: Session
    aggregates: dict[ColumnName, Aggregate] = Field(
        default_factory=lambda: {"readings": Aggregate("count(*)")}, min_length=1
    )
    """the fields of a result, in addition to `start`, `end` (its first and last reading) and `duration_ms`"""

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its sections."""
        if self.run.trigger == REAL_TIME:
            yield 'run.trigger: real time does not support session windows; use "micro-batch"'
        if self.sink.emit == "updates":
            yield 'sink.emit: a session has a result only when it has ended; use emit = "final"'
        yield from super().lacks()


class LastKnown(Grouped):
    """The last value of each device."""

    SUMMARY: ClassVar[str] = "the last value of each device, in a compacted topic and as MQTT retained messages"
    job: Literal["last-known"] = "last-known"
    sink: LastSink


class Enrich(JobSpec):
    """Adds a registry's columns to each reading."""

    SUMMARY: ClassVar[str] = "adds the columns of a device registry to each reading"
    job: Literal["enrich"] = "enrich"
    by: Term = Term("key")
    """the term that is looked up in the registry's keys"""
    registry: Registry
    sink: TopicSink

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics it reads, with that of the registry."""
        return (*super().topics, *filter(None, [self.registry.topic]))

    @property
    def groups(self) -> tuple[Term, ...]:
        """The terms whose values each have a result."""
        return (self.by,)

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its sections."""
        yield from super().lacks()
        taken = {name.lower() for name in self.source.columns}
        for name in self.registry.columns:
            if name.lower() in taken:
                yield f"registry.columns.{name}: source.columns has the same name; rename it and set its field"
        topic = self.registry.topic
        if topic is not None and topic in {*self.source.topics, *self.targets, self.source.dead_letters}:
            yield f"registry.topic: {topic} is a source or a sink of this job"


class Anomalies(JobSpec):
    """Alarms for values beyond thresholds, or far from their device's mean."""

    SUMMARY: ClassVar[str] = "alarms for readings beyond thresholds, or far from their device's mean"
    job: Literal["anomalies"] = "anomalies"
    by: Term = Term("key")
    """the key of an alarm's record; `deviations` keeps one mean for each"""
    thresholds: Annotated[dict[ColumnName, Threshold], Field(min_length=1)]
    """thresholds by column: `{ temperature = { above = 30.0, below = -10.0, deviations = 3.0 } }`"""
    forget: Duration = Duration("24h")
    """how long a device must be silent before its mean is reset (`deviations`)"""
    sink: TopicSink

    @property
    def groups(self) -> tuple[Term, ...]:
        """The terms whose values each have a result."""
        return (self.by,)

    @property
    def has_state(self) -> bool:
        """Whether any threshold needs the mean of each device."""
        return any(threshold.deviations is not None for threshold in self.thresholds.values())

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its sections."""
        yield from super().lacks()
        for name, threshold in self.thresholds.items():
            if name not in self.source.columns:
                yield f"thresholds: no column {name}; source.columns has {_listed(self.source.columns)}"
            elif self.source.type_of(name) not in NUMBERS:
                yield f"thresholds: {name} is a {self.source.type_of(name)}, and only numbers can have thresholds"
            if threshold.deviations is not None and self.run.trigger == REAL_TIME:
                yield (
                    f"thresholds.{name}: deviations keep state in Python, which real time does not support; "
                    'use run.trigger = "micro-batch", or above and below'
                )
        if self.has_state and self.run.state_rows is not None:
            yield "run.state_rows: the means of devices are always kept on disk; remove this key"
        if "forget" in self.model_fields_set and not self.has_state:
            yield "forget: only allowed if a threshold has deviations"


class Archive(JobSpec):
    """Writes every record of the topics to files."""

    SUMMARY: ClassVar[str] = "writes every record to Parquet, Delta or Iceberg, exactly once for every reader"
    DEAD_LETTERS: ClassVar[bool] = False
    job: Literal["archive"] = "archive"
    sink: ArchiveSink
    maintain: Maintain = Maintain()

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its sections."""
        yield from super().lacks()
        if self.run.trigger == REAL_TIME:
            yield 'run.trigger: real time does not support an archive; use "micro-batch"'
        if self.source.decode == "senml":
            yield 'source.decode: an archive has one row per record, but a SenML pack is several readings; use "none"'
        if f"{self.run.checkpoint}/".startswith(f"{self.sink.archive.rstrip('/')}/"):
            yield "run.checkpoint: must not be inside the archive, whose readers would find its files"


class Transform(JobSpec):
    """A user-defined transform in Python."""

    SUMMARY: ClassVar[str] = "your own transform from DataFrame to DataFrame, in a Python file"
    CLOCKS_COUNT: ClassVar[bool] = True
    job: Literal["transform"] = "transform"
    sink: ResultSink


KINDS: Final[Mapping[str, type[Declaration]]] = {
    kind.model_fields["job"].default: kind
    for kind in (
        WindowStats,
        LastKnown,
        Archive,
        Enrich,
        Anomalies,
        Sessionize,
        Transform,
        Replay,
        DlqReplay,
        Backfill,
        BridgeAudit,
    )
}
"""The kinds of jobs, by the name that a file uses."""

NAMED: Final[Mapping[str, str]] = {"max-temperature": "the maximum of each sensor over a sliding window"}
"""The jobs that are started by name, without a file (`spark_sinks/jobs`), with a summary."""
