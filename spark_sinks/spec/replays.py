"""Jobs that write existing records to a topic again, each once, and then end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from spark_sinks.spec import kafka_client
from spark_sinks.spec.parts import Declaration, Section
from spark_sinks.spec.values import TopicName


def _moment(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


Moment = Annotated[datetime, AfterValidator(_moment)]
Range = Annotated[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], Field()]
Rate = Annotated[float, Field(gt=0)]


class Between(Section):
    """A time range, from `since` (inclusive) to `until` (exclusive)."""

    since: Moment | None = None
    """the first timestamp (Kafka's) to include; UTC without a zone. Not set: from the beginning"""
    until: Moment | None = None
    """the first timestamp to exclude. Not set: up to the end of the topic when the job starts"""

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        if self.since is not None and self.until is not None and self.until <= self.since:
            yield f"until ({self.until.isoformat()}) is not after since ({self.since.isoformat()})"


class LogSource(Between):
    """Topics, and the range of each to replay."""

    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)]
    """Kafka topics"""
    offsets: dict[TopicName, dict[Annotated[int, Field(ge=0)], Range]] = Field(default_factory=dict)
    """for each topic, the first offset of each partition and the one after the last: `{ sensors = { 0 = [100, 250] }
    }`; its other partitions are skipped. Replaces `since` and `until`"""

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        yield from super().lacks()
        if len(set(self.topics)) != len(self.topics):
            yield "topics: a topic is listed twice"
        if self.offsets and (self.since or self.until):
            yield "offsets cannot be combined with since and until"
        for topic, partitions in self.offsets.items():
            if topic not in self.topics:
                yield f"offsets.{topic}: the topic is not listed in topics"
            for partition, (first, behind) in partitions.items():
                if behind <= first:
                    yield f"offsets.{topic}.{partition}: the range from {first} to {behind} is empty"


class LetterSource(Between):
    """The dead letters to replay."""

    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)]
    """dead-letter topics, of Spark jobs or of the gateway"""
    of: tuple[TopicName, ...] = ()
    """only dead letters whose record came from these topics; not set: all"""


class ReplaySink(Section):
    """The topic for replayed records."""

    kafka: TopicName
    """topic of the replayed records"""
    timestamp: Literal["original", "now"] = "original"
    """Kafka's timestamp of a replayed record: `original` if the topic accepts it, or `now` for a topic whose retention
    would delete it immediately. The header `origin.timestamp` always has the original one"""


class LetterSink(Section):
    """The topic for replayed dead letters."""

    kafka: TopicName | None = None
    """topic of the replayed records; not set: each record's original topic and partition"""
    timestamp: Literal["original", "now"] = "original"
    """as for `replay`"""


class KafkaRun(Section):
    """How a job without Spark connects to Kafka."""

    bootstrap_servers: str = "127.0.0.1:9092"
    """Kafka, `host:port,host:port`"""
    kafka: dict[str, str] = Field(default_factory=dict)
    """more Kafka client settings by their Kafka names, such as `security.protocol`"""

    @property
    def connection(self) -> dict[str, str]:
        """All Kafka client settings by their Java names."""
        return {"bootstrap.servers": self.bootstrap_servers, **self.kafka}

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        try:
            kafka_client.check(self.kafka)
        except ValueError as error:
            yield f"kafka.{error}"


class ReplayRun(KafkaRun):
    """How a replay runs."""

    rate: Rate | None = None
    """the most records per second; not set: no limit"""


class Once(Declaration):
    """Base of the jobs that write each record once."""

    SPARK: ClassVar[bool] = False
    WORK: ClassVar[str]
    """The kind of work, in the ledger."""
    source: Any
    sink: Any
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """identifies the task: no record is replayed twice under one name, however often the job is run or killed"""
    run: KafkaRun

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics it reads and writes."""
        return (*self.source.topics, *filter(None, [self.sink.kafka]))

    @property
    def task(self) -> str:
        """The task as the ledger stores it, so that no other task can use the same name."""
        return f"{self.WORK} of {', '.join(sorted(self.source.topics))} to {self.sink.kafka or 'where they came from'}"


class Replay(Once):
    """Replays a range of topics."""

    SUMMARY: ClassVar[str] = "writes a range of topics to another topic, each record once, with its original time"
    job: Literal["replay"] = "replay"
    WORK: ClassVar[str] = "replay"
    source: LogSource
    sink: ReplaySink
    run: ReplayRun = ReplayRun()

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        if self.sink.kafka in self.source.topics:
            yield f"sink.kafka: {self.sink.kafka} is a source of this job, which would replay its own records"


class DlqReplay(Once):
    """Replays dead letters."""

    SUMMARY: ClassVar[str] = "writes dead letters back to their original topics, each once, unchanged"
    job: Literal["dlq-replay"] = "dlq-replay"
    WORK: ClassVar[str] = "letters"
    source: LetterSource
    sink: LetterSink = LetterSink()
    run: ReplayRun = ReplayRun()

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        if self.sink.kafka in self.source.topics:
            yield f"sink.kafka: {self.sink.kafka} is also the source of the dead letters"
