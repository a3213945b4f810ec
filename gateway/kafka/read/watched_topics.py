"""The live reader's state: the partitions and watches of each topic, and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from aiokafka import TopicPartition

from gateway.kafka.cluster.topic_info import TopicIdentity
from gateway.kafka.contracts import Fanout, LossySubscriber, Subscriber
from gateway.kafka.read.catch_up_reader import CatchUpStatistics, Reading
from gateway.runtime.failures import failures
from mapping.record import Received
from telemetry.statistics import counter, gauge

Chosen = Collection[tuple[Subscriber | LossySubscriber, Any]]
"""Subscribers, each with the context for its offers."""


@dataclass(slots=True, eq=False)
class Watch:
    """A fan-out that watches one topic."""

    fanout: Fanout
    since: dict[int, int]  # by partition: the first offset it wants
    readings: dict[Reading, None] = field(default_factory=dict)  # of its subscribers that are behind

    def is_early(self, record: Received) -> bool:
        """Whether the record was stored before the watch started; drops the partition's mark when that is passed."""
        first = self.since.get(record.partition)
        if first is None:
            return False
        if record.offset < first:
            return True
        del self.since[record.partition]
        return False


@dataclass(slots=True, eq=False)
class WatchedPartition:
    """The positions in one partition."""

    topic: WatchedTopic
    position: int  # the offset of the next record to fan out; all below were fanned out
    fetched: int = 0  # the offset of the next record to expect from the consumer
    stored: int = 0  # the log ends here or further on, as this process's own records show
    behind: dict[Subscriber, Reading] = field(default_factory=dict)  # subscribers served by the catch-up reader
    # since when (loop time) the metadata has lacked the partition; None while it is there
    missing_since: float | None = None

    def __post_init__(self) -> None:
        self.fetched = self.position


class PendingCatchUp(msgspec.Struct, frozen=True):
    """A catch-up that waits for a leader: the subscriber will be offered everything from `offset` on first."""

    fanout: Fanout
    offset: int
    gap: Callable[[int], None] | None


@dataclass(slots=True, eq=False)
class WatchedTopic:
    """A topic's partitions and watches."""

    name: str
    identity: TopicIdentity  # of the topic to which the positions belong
    # by fan-out; changed by `add` and `remove`. There may be thousands: every AMQP receiver is one.
    watching: dict[Fanout, Watch] = field(default_factory=dict)
    _watches: tuple[Watch, ...] | None = ()
    piece: int = 1  # how many records are handed over together, adjusted to the work they cause
    partitions: dict[TopicPartition, WatchedPartition] = field(default_factory=dict)
    # partitions without a leader when their watch started, and the time (ms) since when records are wanted
    leaderless: dict[TopicPartition, int] = field(default_factory=dict)

    @property
    def watches(self) -> tuple[Watch, ...]:
        """A snapshot of the watches: a fan-out may end during an offer."""
        if self._watches is None:
            self._watches = tuple(self.watching.values())
        return self._watches

    def add(self, fanout: Fanout, since: dict[int, int]) -> None:
        """Start the watch of a fan-out."""
        self.watching[fanout] = Watch(fanout, since)
        self._watches = None

    def remove(self, fanout: Fanout) -> Watch | None:
        """End the watch of a fan-out; None when it had none."""
        watch = self.watching.pop(fanout, None)
        if watch is not None:
            self._watches = None
        return watch

    def reset(self) -> None:
        """Reset all positions to the beginning after the topic was recreated, and let fan-outs drop their offsets.

        The partitions become new objects: records that were fetched for the former ones are not fanned out any more.
        """
        for partition, part in self.partitions.items():
            fresh = self.partitions[partition] = WatchedPartition(self, 0)
            fresh.missing_since = part.missing_since
        self.leaderless = dict.fromkeys(self.leaderless, 0)
        for watch in self.watches:
            watch.since.clear()
            failures.guard("delivery", watch.fanout.topic_recreated, self.name)


class LiveStatistics(msgspec.Struct, frozen=True):
    """A snapshot of the live reader's counters."""

    positions: Annotated[
        dict[str, dict[int, int]], gauge("offset of the next record to hand out", "topic", "partition")
    ]
    lag: Annotated[dict[str, int], gauge("records stored and not handed out yet, as of the last fetch", "topic")]
    records: Annotated[int, counter("records handed out")]
    offers: Annotated[int, counter("times that a subscriber took a record")]
    dropped: Annotated[int, counter("records that subscribers at QoS 0 were too slow for")]
    fell_behind: Annotated[int, counter("how often a subscriber fell behind and moved to the catch-up reader")]
    behind: Annotated[int, gauge("pairs of subscriber and partition that are behind")]
    gaps: Annotated[int, counter("records that retention had deleted before they were read")]
    leaderless: Annotated[int, gauge("watched partitions without a leader")]
    assignments: Annotated[int, counter("how often the set of partitions was changed")]
    fetches: Annotated[int, counter("fetches that were sent to brokers")]
    named: Annotated[int, counter("partitions in these fetches; unchanged ones are not repeated")]
    catch_up: CatchUpStatistics
