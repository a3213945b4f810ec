"""The description of a job. A new job is only a module in `spark_sinks/jobs` with a `JOB` of type `JobKind`.

A job is one flow: a query with its own checkpoint from a source to a sink. Records that its results omit go to a
dead-letter topic (`Rejects`, `RejectScanner`), which requires reading the source twice.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from mapping.record import is_topic_name
from spark_sinks import jobs
from spark_sinks.reject_scanner import Rejects
from spark_sinks.sources import kafka_stream
from spark_sinks.spec.values import Duration, Listen
from spark_sinks.triggers import MICRO_BATCH, Trigger

DRIVER_MB: Final = 1024
"""Java heap that a job needs besides its state; with a local master it is the heap of the whole job."""


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every job; a job adds its own fields. Durations are in milliseconds."""

    bootstrap_servers: str  # Kafka
    checkpoint: str  # directory (or URL) with the checkpoint of each query
    trigger: str = MICRO_BATCH  # `triggers.MICRO_BATCH` or `triggers.REAL_TIME`
    interval_ms: int | None = None  # of micro-batches, or of real-time checkpoints; None: the trigger's default
    starting_offsets: str = "earliest"  # earliest or latest; only for the first start
    max_offsets_per_trigger: int = 100_000  # the most records of one micro-batch
    accept_data_loss: bool = False  # continue when Kafka has deleted unread records
    kafka: Mapping[str, str] = msgspec.field(default_factory=dict)  # more Kafka client settings by Kafka name

    def __post_init__(self) -> None:
        for name in self.topics:
            if not is_topic_name(name):
                raise ValueError(f"not a topic name: {name!r}")

    @property
    def topics(self) -> Sequence[str]:
        """The topics that must exist before the job starts; each job defines them."""
        raise NotImplementedError

    @property
    def connection(self) -> dict[str, str]:
        """Kafka client settings by their Kafka names."""
        return {"bootstrap.servers": self.bootstrap_servers, **self.kafka}

    def stream(
        self, spark: SparkSession, topics: Sequence[str], trigger: Trigger, *, headers: bool = True
    ) -> DataFrame:
        """Return the records of these topics as a stream for a query with this trigger; see `kafka_stream`."""
        return kafka_stream(
            spark,
            ",".join(topics),
            connection=self.connection,
            starting_offsets=self.starting_offsets,
            max_offsets_per_trigger=trigger.most_of(self.max_offsets_per_trigger),
            fail_on_data_loss=not self.accept_data_loss,
            headers=headers,
        )


@dataclass(frozen=True, slots=True)
class Flow:
    """The query of a job. The runner starts it again when it changes between catching up and real time.

    Attributes:
        name: name of the query.
        topics: its source.
        checkpoint: the query's own directory (or URL).
        trigger: the trigger it is meant to run with.
        start: starts the query on its checkpoint with the given trigger. The source has a limit per batch
            (`max_offsets_per_trigger`), except in real time.
        rejects: how to find the records that its results omit. None if there are none.
        behind_s: how many seconds it may be behind in real time; beyond that it catches up in micro-batches. It must be
            well below the watermark's delay, or readings become late.
        stages: stages that run at once in real time: two with state, else one.
        sized: whether long micro-batches are made smaller; False where few and large files are wanted.
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
    """A job that can be started by name.

    Attributes:
        name: its name on the command line.
        summary: one line for `--help`.
        options: a `JobOptions`; a ValueError from it means a wrong command line.
        add_arguments: adds the job's own options to a parser, each with a field of `options` as its `dest`.
        flow: returns the flow without starting it.
        slots: returns how many tasks run at once in real-time mode, from the options, the number of partitions of each
            topic and the number of shuffle partitions.
        title: name for people and as a label of metrics; empty means `name`.
        file: the file that declares it, which also sets the common options, so that the command line need not.
    """

    name: str
    summary: str
    options: type[JobOptions]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    flow: Callable[[SparkSession, Any], Flow]
    slots: Callable[[Any, Mapping[str, int], int], int]
    title: str = ""
    file: Path | None = None


def known_jobs() -> dict[str, JobKind]:
    """Return the `JOB` of every module in `spark_sinks/jobs`, by name."""
    modules = (
        importlib.import_module(f"{jobs.__name__}.{found.name}") for found in pkgutil.iter_modules(jobs.__path__)
    )
    kinds: list[JobKind] = [module.JOB for module in modules]
    return {kind.name: kind for kind in sorted(kinds, key=lambda kind: kind.name)}


def duration(text: str) -> int:
    """Parse `500ms`, `5s`, `10m` or `1h` to milliseconds; raises argparse's error otherwise."""
    try:
        return Duration.parse(text).ms
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a duration such as 500ms, 5s, 10m or 1h, not {text!r}") from error


def listen(text: str) -> Listen:
    """Parse a listen address, `HOST:PORT`; raises argparse's error otherwise."""
    try:
        return Listen.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not {text!r}") from error
