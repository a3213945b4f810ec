"""The job that writes an archive's records back to a topic."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spark_sinks.spec.parts import Lake
from spark_sinks.spec.replays import Between, Once, ReplayRun, ReplaySink
from spark_sinks.spec.values import TopicName


class ArchiveSource(Between, Lake):
    """The rows of an archive to replay."""

    topics: tuple[TopicName, ...] = ()
    """only records of these topics; not set: all"""


class BackfillRun(ReplayRun):
    """How a backfill runs."""

    master: str = "local[2]"
    """any Spark master. Spark reads and sorts; one process writes the records"""
    driver_memory: Annotated[str, Field(pattern=r"^\d+[mg]$")] = "1g"
    """Java heap; with a local master it is the heap of the whole job"""
    conf: dict[str, str] = Field(default_factory=dict)
    """further Spark settings"""


class Backfill(Once):
    """Replays records of an archive."""

    SUMMARY: ClassVar[str] = "records of an archive to a topic, each once, with its original time"
    SPARK: ClassVar[bool] = True
    job: Literal["backfill"] = "backfill"
    source: ArchiveSource
    sink: ReplaySink
    run: BackfillRun = BackfillRun()

    @property
    def topics(self) -> tuple[str, ...]:
        """The topic it writes."""
        return (self.sink.kafka,)

    @property
    def task(self) -> str:
        """One line that says what it does."""
        of = ", ".join(sorted(self.source.topics)) or "all topics"
        return f"backfill of {of} from {self.source.archive} to {self.sink.kafka}"
