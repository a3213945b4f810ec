"""The description of a job. A new job is only a module in `spark_sinks/jobs` with a `JOB` of type `JobKind`.

A job is one flow: a query with its own checkpoint from a source to a sink. Records that its results omit go to a
dead-letter topic (`RejectScanner`), which requires reading the source twice.
"""

from __future__ import annotations

import abc
import argparse
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from mapping.record import is_topic_name
from spark_sinks.read.sources import MAX_REQUEST, Broker, kafka_stream, producer_settings
from spark_sinks.spec.triggers import MICRO_BATCH, Trigger
from spark_sinks.spec.values import Duration, Listen
from spark_sinks.transforms.record_size import fitting

DRIVER_MB: Final = 1024
"""Java heap that a job needs besides its state; with a local master it is the heap of the whole job."""
SHORTEST_BEHIND_S: Final = 5.0
LIMITS_S: Final = 60.0
"""How long Kafka may take to tell the limits of topics."""


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


class Flow(abc.ABC):
    """The query of a job. The runner starts it again when it changes between catching up and real time.

    Attributes:
        name: name of the job and of the query.
        topics: its source.
        rejects_topic: where `RejectScanner` writes what `left_out` finds. None if the query itself writes dead letters,
            or has none.
        letters_topic: where dead letters go, whoever writes them; empty if there are none.
        checkpoint: the query's own directory (or URL).
        STAGES: stages that run at once in real time: two with state, else one.
        ACCOUNTS: whether every reading that a result omits becomes a dead letter. Otherwise the job tells the
            first time that Spark drops a row as late, and only counts the others.
        SIZED: whether long micro-batches are made smaller; False where few and large files are wanted.
    """

    STAGES: ClassVar[int] = 2
    SIZED: ClassVar[bool] = True
    ACCOUNTS: ClassVar[bool] = True

    def __init__(
        self, spark: SparkSession, options: Any, *, name: str, topics: Sequence[str], rejects_topic: str | None
    ) -> None:
        self.spark = spark
        self.options: Any = options  # the `JobOptions` of its kind
        self.name = name
        self.topics = topics
        self.rejects_topic = rejects_topic
        self.letters_topic = rejects_topic or ""
        self._limits: dict[str, int] = {}
        self.checkpoint = f"{options.checkpoint}/{name}"

    @property
    def trigger(self) -> Trigger:
        """The trigger it is meant to run with."""
        return Trigger(self.options.trigger, self.options.interval_ms)

    @property
    def meaning(self) -> dict[str, str]:
        """What the state in its checkpoint means, by the keys of the job file; empty without state (ADR 0102)."""
        return {}

    @property
    def behind_s(self) -> float:
        """How many seconds it may be behind in real time; beyond that it catches up in micro-batches.

        It must be well below the watermark's delay, or readings become late.
        """
        return SHORTEST_BEHIND_S

    def slots(self, partitions: Mapping[str, int], shuffle: int) -> int:
        """Return how many tasks run at once in real time: all stages, and one that scans for dead letters."""
        return sum(partitions[topic] for topic in self.topics) + (self.STAGES - 1) * shuffle + 1

    @abc.abstractmethod
    def left_out(self, source: DataFrame, watermark_ms: Column) -> DataFrame:
        """Return the source's records that no result counts, with its columns and the reason in `error`.

        Args:
            source: the source's records.
            watermark_ms: the watermark (epoch ms) that Spark applied to each record.
        """

    @abc.abstractmethod
    def start(self, trigger: Trigger) -> StreamingQuery:
        """Start the query on its checkpoint."""

    def stream(self, trigger: Trigger, *, headers: bool = True) -> DataFrame:
        """Return the records of the source for a query with this trigger; see `kafka_stream`."""
        return kafka_stream(
            self.spark,
            ",".join(self.topics),
            connection=self.options.connection,
            starting_offsets=self.options.starting_offsets,
            max_offsets_per_trigger=trigger.most_of(self.options.max_offsets_per_trigger),
            fail_on_data_loss=not self.options.accept_data_loss,
            headers=headers,
        )

    def limits(self, *topics: str) -> dict[str, int]:
        """Return the most bytes of a record of each topic, as of the first call; TimeoutError if Kafka does not answer.

        The connection's `max.request.size`, if it is set and smaller, is the limit of all topics.
        """
        if missing := [topic for topic in topics if topic not in self._limits]:
            with Broker(self.spark, self.options.connection, LIMITS_S) as broker:
                asked = broker.limits(missing)
            if asked is None:
                raise TimeoutError(f"Kafka: {self.options.bootstrap_servers} did not answer for {LIMITS_S:.0f} s")
            most = self.options.connection.get(MAX_REQUEST)
            self._limits |= {topic: limit if most is None else min(limit, int(most)) for topic, limit in asked.items()}
        return {topic: self._limits[topic] for topic in topics}

    def to_kafka(self, records: DataFrame, topics: Sequence[str], trigger: Trigger, *, final: bool) -> StreamingQuery:
        """Start the query that writes `records`, and as dead letters those that are too large for their topic.

        Args:
            records: columns key and value (binary), headers (array of key and value); with several topics also `topic`.
            topics: the Kafka topics, which must exist.
            trigger: see `write`.
            final: see `write`.
        """
        if len(topics) == 1:
            records = records.withColumn("topic", F.lit(topics[0]))
        limits = self.limits(*topics, self.letters_topic)
        return self.write(fitting(records, limits, self.letters_topic), limits, trigger, final=final)

    def write(self, records: DataFrame, limits: Mapping[str, int], trigger: Trigger, *, final: bool) -> StreamingQuery:
        """Start the query that writes `records`, each to its topic.

        At least once: a batch that was written but not checkpointed when the job died is written again. A repeated
        micro-batch has the same content, because the checkpoint fixes its offset range. Real time fixes the range only
        at the batch's end, so counts already written start again from the last checkpoint: for up to one interval a
        reader sees windows go back and then forward again.

        Args:
            records: columns topic, key and value (binary), headers (array of key and value).
            limits: by topic, the most bytes of a record.
            trigger: when it reads. Real time holds a slot for every task of every stage.
            final: write each record once, when its result can no longer change. Stateless queries do so.
        """
        writer = (
            records.writeStream.queryName(self.name)
            .format("kafka")
            .options(**producer_settings(self.options.connection, limits))
            .option("checkpointLocation", self.checkpoint)
            .outputMode("append" if final else "update")
        )
        return trigger.start(writer)


@dataclass(frozen=True, slots=True)
class JobKind:
    """A job that can be started.

    Attributes:
        name: its name for people and as a label of metrics, and, without a file, on the command line.
        summary: one line for `--help`.
        options: a `JobOptions`; a ValueError from it means a wrong command line.
        add_arguments: adds the job's own options to a parser, each with a field of `options` as its `dest`.
        flow: returns the flow without starting it.
        file: the file that declares it, which also sets the common options, so that the command line need not.
    """

    name: str
    summary: str
    options: type[JobOptions]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    flow: Callable[[SparkSession, Any], Flow]
    file: Path | None = None

    @property
    def command(self) -> str:
        """The JOB argument of the command line."""
        return self.name if self.file is None else str(self.file)


JOBS: Final = "spark_sinks.jobs"
"""The package of the jobs, which import this module: looked up by name."""


def known_jobs() -> dict[str, JobKind]:
    """Return the `JOB` of every module in `spark_sinks/jobs`, by name."""
    jobs = importlib.import_module(JOBS)
    modules = (importlib.import_module(f"{JOBS}.{member.name}") for member in pkgutil.iter_modules(jobs.__path__))
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
