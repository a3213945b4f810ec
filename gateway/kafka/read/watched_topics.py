"""What the live reader keeps of each watched topic's partitions and watchers, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any

import msgspec
from aiokafka import TopicPartition

from gateway.failures import failures
from gateway.kafka.cluster.topic_info import TopicIdentity
from gateway.kafka.contracts import Fanout, LossySubscriber, Subscriber
from gateway.kafka.read.catch_up_reader import CatchUpStatistics, Reading
from gateway.statistics import counter, gauge
from mapping.record import Received

Chosen = Collection[tuple[Subscriber | LossySubscriber, Any]]
"""Subscribers, each with the context of what it is to be offered."""


class Watch:
    """A fan-out on one topic."""

    __slots__ = ("fanout", "readings", "select", "select_run", "since")

    def __init__(self, fanout: Fanout, since: dict[int, int]) -> None:
        self.fanout = fanout
        self.select: Callable[[Received], Chosen] = fanout.select
        self.select_run: Callable[[list[Received], int], tuple[Chosen, int]] | None
        self.select_run = getattr(fanout, "select_run", None)
        self.since = since  # partitions of which it wants only what lies at or after an offset
        self.readings: dict[Reading, None] = {}  # of its subscribers that are behind

    def is_early(self, record: Received) -> bool:
        """Whether the record was stored before the watch began; forgets the mark once it is passed."""
        first = self.since.get(record.partition)
        if first is None:
            return False
        if record.offset < first:
            return True
        del self.since[record.partition]
        return False


class Partition:
    """Positions in one partition."""

    __slots__ = ("behind", "fetched", "missing_since", "position", "stored", "topic")

    def __init__(self, topic: Topic, position: int) -> None:
        self.topic = topic
        # when (loop time) the metadata lacked the partition first; None while it is there
        self.missing_since: float | None = None
        self.position = position  # the offset of the next record to fan out; all below it was fanned out
        self.fetched = position  # the offset of the next record to expect from the consumer
        self.stored = 0  # the log reaches to here at least, by this process's own records
        self.behind: dict[Subscriber, tuple[Watch, Reading]] = {}  # the subscribers that are fed by the catch-up reader


class Later:
    """Where a catch-up ends when its watch begins further on than the live reader is."""

    __slots__ = ("_part", "_since")

    def __init__(self, part: Partition, since: int) -> None:
        self._part = part
        self._since = since

    @property
    def position(self) -> int:
        """The offset of the first record that is not caught up on."""
        return max(self._part.position, self._since)


class Waiting(msgspec.Struct, frozen=True):
    """What a subscriber is to be offered first of a partition, when somebody leads it: everything from an offset on."""

    fanout: Fanout
    offset: int
    gap: Callable[[int], None] | None


class Topic:
    """Who watches a topic, and its partitions."""

    __slots__ = ("_watches", "identity", "leaderless", "name", "partitions", "piece", "watching")

    def __init__(self, name: str, identity: bytes) -> None:
        self.name = name
        self.identity = TopicIdentity(identity)  # of the topic that the positions are of
        # by fan-out; changed by `add` and `remove`. There may be thousands: every receiver of AMQP is one.
        self.watching: dict[Fanout, Watch] = {}
        self._watches: tuple[Watch, ...] | None = ()
        self.piece = 1  # records that are handed over together, as many as were little work so far
        self.partitions: dict[TopicPartition, Partition] = {}
        # partitions that had no leader when their watch began, and since when (ms) what is stored is wanted
        self.leaderless: dict[TopicPartition, int] = {}

    @property
    def watches(self) -> tuple[Watch, ...]:
        """All of them, as of now: a fan-out may end during an offer."""
        if self._watches is None:
            self._watches = tuple(self.watching.values())
        return self._watches

    def add(self, fanout: Fanout, since: dict[int, int]) -> None:
        """Let a fan-out watch."""
        self.watching[fanout] = Watch(fanout, since)
        self._watches = None

    def remove(self, fanout: Fanout) -> Watch | None:
        """It does not watch any more; None when it did not."""
        watch = self.watching.pop(fanout, None)
        if watch is not None:
            self._watches = None
        return watch

    def begin_anew(self) -> None:
        """All positions are the beginning, and fan-outs forget theirs.

        The partitions are other objects then: what was fetched for those before is not fanned out any more.
        """
        for partition, part in self.partitions.items():
            fresh = self.partitions[partition] = Partition(self, 0)
            fresh.missing_since = part.missing_since
        self.leaderless = dict.fromkeys(self.leaderless, 0)
        for watch in self.watches:
            watch.since.clear()
            made_anew = getattr(watch.fanout, "made_anew", None)
            if made_anew is not None:
                failures.guard("delivery", made_anew, self.name)


class LiveStatistics(msgspec.Struct, frozen=True):
    """A snapshot."""

    positions: Annotated[
        dict[str, dict[int, int]], gauge("offset of the next record to hand out", "topic", "partition")
    ]
    lag: Annotated[dict[str, int], gauge("records stored and not handed out yet, as of the last fetch", "topic")]
    records: Annotated[int, counter("records handed out")]
    offers: Annotated[int, counter("times that a subscriber took a record")]
    dropped: Annotated[int, counter("records that subscribers at QoS 0 were too slow for")]
    fell_behind: Annotated[int, counter("how often a subscriber went over to the catch-up reader")]
    behind: Annotated[int, gauge("pairs of subscriber and partition that are behind")]
    gaps: Annotated[int, counter("records that retention had deleted before they were read")]
    leaderless: Annotated[int, gauge("watched partitions that nobody leads now")]
    assignments: Annotated[int, counter("how often the set of partitions was changed")]
    fetches: Annotated[int, counter("fetches that were sent to brokers")]
    named: Annotated[int, counter("partitions in these fetches: what stays as it was is not named again")]
    catch_up: CatchUpStatistics
