"""What a job is: a module of `spark_sinks/jobs` with a `JOB` of this kind, and nothing anywhere else.

A job is one flow or several, each a query with a checkpoint of its own from a source to a sink. What a flow's results
leave out goes to a dead-letter topic beside it (`Rejects`, `RejectScanner`), at the price that the source is read
twice.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from mapping.record import is_topic_name
from spark_sinks import jobs
from spark_sinks.reject_scanner import Rejects
from spark_sinks.spec.values import Duration, Listen
from spark_sinks.triggers import MICRO_BATCH, Trigger


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What every job is told; a job adds fields of its own. Durations are in milliseconds."""

    bootstrap_servers: str  # Kafka
    checkpoint: str  # directory (or URL) below which each query has its checkpoint
    trigger: str = MICRO_BATCH  # `triggers.MICRO_BATCH` or `triggers.REAL_TIME`
    interval_ms: int | None = None  # of micro-batches, or of real-time checkpoints; None: the trigger's default
    starting_offsets: str = "earliest"  # earliest or latest, at the first start
    max_offsets_per_trigger: int = 100_000  # the most records of one micro-batch
    accept_data_loss: bool = False  # go on when Kafka lost records that were not read yet
    kafka: Mapping[str, str] = msgspec.field(default_factory=dict)  # further Kafka client settings by their Kafka names

    def __post_init__(self) -> None:
        for name in self.topics:
            if not is_topic_name(name):
                raise ValueError(f"not a topic name: {name!r}")

    @property
    def topics(self) -> Sequence[str]:
        """The topics that must exist before the job starts; the job's own class names them."""
        raise NotImplementedError

    @property
    def connection(self) -> dict[str, str]:
        """Kafka client settings by their Kafka names."""
        return {"bootstrap.servers": self.bootstrap_servers, **self.kafka}


@dataclass(frozen=True, slots=True)
class Flow:
    """One query of a job, that the runner starts: again and again where it changes between catching up and real time.

    Attributes:
        name: the query's.
        topics: its source.
        checkpoint: directory (or URL) of this query alone.
        trigger: what it is to run with.
        start: begins it, on its checkpoint, with the trigger given. A source in real time has no bound on a batch;
            otherwise it has one (`max_offsets_per_trigger`).
        rejects: what its results leave out; None: nothing.
        behind_s: in real time, how far behind it may be; beyond that it catches up in micro-batches. Well below the
            watermark's delay, else readings count as late.
        stages: that run at once in real time: two with state, else one.
        sized: whether micro-batches that take long become smaller; not where few and large files are wanted.
    """

    name: str
    topics: Sequence[str]
    checkpoint: str
    trigger: Trigger
    start: Callable[[Trigger], StreamingQuery]
    rejects: Rejects | None = None
    behind_s: float = 5.0
    stages: int = 2
    sized: bool = True


@dataclass(frozen=True, slots=True)
class JobKind:
    """A job that can be started by its name.

    Attributes:
        name: on the command line.
        summary: one line for `--help`.
        options: a `JobOptions`; ValueError from it is a wrong command line.
        add_arguments: adds the job's own options to a parser, each with a field of `options` as its `dest`.
        flows: what it consists of; starts nothing.
        slots: how many tasks run at once in real-time mode, of the options, the partitions of each topic and
            the number of shuffle partitions.
        driver_mb: Java heap that it needs beside its state; with a local master the heap of everything.
        declared: common options that are said already, by their `dest`; the command line need not say them.
        title: its name for people and as a label of metrics; empty: `name`.
        file: that declares it.
    """

    name: str
    summary: str
    options: type[JobOptions]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    flows: Callable[[SparkSession, Any], Sequence[Flow]]
    slots: Callable[[Any, Mapping[str, int], int], int]
    driver_mb: int = 1024
    declared: Collection[str] = ()
    title: str = ""
    file: Path | None = None


def known_jobs() -> dict[str, JobKind]:
    """The `JOB` of every module in `spark_sinks/jobs`, by name."""
    modules = (
        importlib.import_module(f"{jobs.__name__}.{found.name}") for found in pkgutil.iter_modules(jobs.__path__)
    )
    kinds: list[JobKind] = [module.JOB for module in modules]
    return {kind.name: kind for kind in sorted(kinds, key=lambda kind: kind.name)}


def duration(text: str) -> int:
    """Milliseconds of `500ms`, `5s`, `10m`, `1h`; raises argparse's error otherwise."""
    try:
        return Duration.parse(text).ms
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a duration such as 500ms, 5s, 10m or 1h, not {text!r}") from error


def listen(text: str) -> Listen:
    """An address to listen on, `HOST:PORT`; raises argparse's error otherwise."""
    try:
        return Listen.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not {text!r}") from error


def interval(ms: int) -> str:
    """A duration as Spark's SQL has it."""
    return f"{ms} milliseconds"
