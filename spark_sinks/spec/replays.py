"""Jobs that bring records to a topic once more, each once. They run until it is done."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from spark_sinks.replay import kafka_client
from spark_sinks.spec.declaration import Declaration
from spark_sinks.spec.parts import Section
from spark_sinks.spec.values import TopicName


def _moment(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


Moment = Annotated[datetime, AfterValidator(_moment)]
Range = Annotated[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], Field()]
Rate = Annotated[float, Field(gt=0)]


class Between(Section):
    """A time from which on, and one before which."""

    since: Moment | None = None
    """from the first record of this time on, by Kafka's timestamps; UTC without a zone. Not set: from the beginning"""
    until: Moment | None = None
    """to before the first record of this time or later. Not set: to where the topic ends when the job starts"""

    @model_validator(mode="after")
    def _ascends(self) -> Between:
        if self.since is not None and self.until is not None and self.until <= self.since:
            raise ValueError(f"until ({self.until.isoformat()}) is not after since ({self.since.isoformat()})")
        return self


class LogSource(Between):
    """A range of topics."""

    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)]
    """Kafka topics"""
    offsets: dict[TopicName, dict[Annotated[int, Field(ge=0)], Range]] = Field(default_factory=dict)
    """of a topic, the first offset of each partition and the one behind the last: `{ sensors = { 0 = [100, 250] } }`;
    its other partitions are left out. In place of `since` and `until`"""

    @model_validator(mode="after")
    def _fits(self) -> LogSource:
        if len(set(self.topics)) != len(self.topics):
            raise ValueError("topics: one is named twice")
        if self.offsets and (self.since or self.until):
            raise ValueError("offsets stand in place of since and until")
        for topic, partitions in self.offsets.items():
            if topic not in self.topics:
                raise ValueError(f"offsets.{topic}: topics does not name it")
            for partition, (first, behind) in partitions.items():
                if behind <= first:
                    raise ValueError(f"offsets.{topic}.{partition}: nothing is between {first} and {behind}")
        return self


class LetterSource(Between):
    """Topics of dead letters."""

    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)]
    """topics of dead letters, of Spark jobs or of the gateway"""
    of: tuple[TopicName, ...] = ()
    """only letters of records of these topics; not set: of any"""


class ReplaySink(Section):
    """Where replayed records go."""

    kafka: TopicName
    """topic of the replayed records"""
    timestamp: Literal["original", "now"] = "original"
    """Kafka's timestamp of a replayed record: `original`, where the topic takes it, or `now`, for a topic whose
    retention would delete it at once. The header `origin.timestamp` has the original one in any case"""


class LetterSink(Section):
    """Where replayed letters go."""

    kafka: TopicName | None = None
    """topic of the replayed records; not set: each goes where it came from, to the partition that it was in"""
    timestamp: Literal["original", "now"] = "original"
    """as of a replay"""


class KafkaRun(Section):
    """How a job without Spark finds Kafka."""

    bootstrap_servers: str = "127.0.0.1:9092"
    """Kafka, `host:port,host:port`"""
    kafka: dict[str, str] = Field(default_factory=dict)
    """further Kafka client settings by their Kafka names, such as `security.protocol`"""

    @model_validator(mode="after")
    def _fits(self) -> KafkaRun:
        try:
            kafka_client.check(self.kafka)
        except ValueError as error:
            raise ValueError(f"kafka.{error}") from None
        return self


class ReplayRun(KafkaRun):
    """How a replay runs."""

    rate: Rate | None = None
    """the most records a second; not set: as fast as it goes"""


class Once(Declaration):
    """Parts of jobs that write each record once."""

    SPARK: ClassVar[bool] = False
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """what makes it once: no record is replayed twice under the same name, however often the job is run or killed"""
    run: KafkaRun

    def lacks(self) -> Iterator[str]:
        """One sentence for each thing that cannot be, over all parts."""
        yield from ()

    @property
    def task(self) -> str:
        """What the ledger knows it by: the same name cannot be used for something else."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _whole(self) -> Once:
        if (first := next(iter(self.lacks()), None)) is not None:
            raise ValueError(first)
        return self


class Replay(Once):
    """A part of the log once more."""

    SUMMARY: ClassVar[str] = "records of a time or of offsets to another topic, each once, with its original time"
    job: Literal["replay"] = "replay"
    source: LogSource
    sink: ReplaySink
    run: ReplayRun = ReplayRun()

    @property
    def topics(self) -> tuple[str, ...]:
        """See `Declaration`."""
        return (*self.source.topics, self.sink.kafka)

    @property
    def task(self) -> str:
        """See `Once`."""
        return f"replay of {', '.join(sorted(self.source.topics))} to {self.sink.kafka}"

    def lacks(self) -> Iterator[str]:
        """See `Once`."""
        if self.sink.kafka in self.source.topics:
            yield f"sink.kafka: {self.sink.kafka} is a source of this job, which would replay its own records"


class DlqReplay(Once):
    """Dead letters once more."""

    SUMMARY: ClassVar[str] = "dead letters to where they came from, each once, as they were"
    job: Literal["dlq-replay"] = "dlq-replay"
    source: LetterSource
    sink: LetterSink = LetterSink()
    run: ReplayRun = ReplayRun()

    @property
    def topics(self) -> tuple[str, ...]:
        """See `Declaration`."""
        return (*self.source.topics, *filter(None, [self.sink.kafka]))

    @property
    def task(self) -> str:
        """See `Once`."""
        to = self.sink.kafka or "where they came from"
        return f"letters of {', '.join(sorted(self.source.topics))} to {to}"

    def lacks(self) -> Iterator[str]:
        """See `Once`."""
        if self.sink.kafka in self.source.topics:
            yield f"sink.kafka: {self.sink.kafka} is the topic of the dead letters itself"
