"""What a group reader keeps: partitions that are ours, deliveries that are not settled, outlets; and its statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from typing import NamedTuple, Protocol

import msgspec
from aiokafka import TopicPartition

from flowcontrol.checkpoint import Checkpoint
from gateway.kafka.contracts import Outlet
from mapping.record import Received


class Selector(Protocol):
    """Tells which of a group's interests a record is for; one for each group (`gateway.mqtt.sharing`)."""

    def select(self, record: Received) -> Collection[Hashable]:
        """The names of the interests that the record matches; one without members is ignored."""
        ...

    def forget(self, name: Hashable) -> None:
        """An interest has no members any more, and nothing is kept for it."""
        ...


class Interest(NamedTuple):
    """What some outlets of a group want of its topics, instead of everything.

    Each record that an interest matches goes to one of the outlets that joined with it.
    """

    selector: Selector
    name: Hashable


class Delivery(msgspec.Struct, eq=False):
    """A record for one pool, not settled: with a member, ready for one, or waiting for its next attempt."""

    record: Received
    part: Part
    pool: Pool
    attempts: int = 0  # that came back
    failures: int = 0  # of these
    returns: int = 0  # with a back-off, which grows with them
    kept: bool = False  # not settled when everybody has declined
    declined: tuple[Member, ...] = ()


class Part:
    """A partition while it is ours, which it may stay over many assignments.

    Attributes:
        partition: which one.
        checkpoint: what was read of it and is not settled.
        copies: by offset, for records that more than one pool wants, how many of them have not settled it.
        position: the offset of the next record to read; None while Kafka has not told where to begin.
        start: where the group begins here, when it had committed nothing; committed until something is settled.
        committed: what Kafka has, as far as we know.
        home: the member that gets its records while it has room (pools without an interest).
        ours: whether it still is.
        stalled: not read on, since too much lies behind a record that is not settled.
    """

    __slots__ = ("checkpoint", "committed", "copies", "home", "ours", "partition", "position", "stalled", "start")

    def __init__(self, partition: TopicPartition, position: int | None, committed: int | None) -> None:
        self.partition = partition
        self.checkpoint = Checkpoint()
        self.copies: dict[int, int] = {}
        self.position = position
        self.start = position if committed is None else None
        self.committed = committed
        self.home: Member | None = None
        self.ours = True
        self.stalled = False

    @property
    def committable(self) -> int | None:
        """The offset to commit: the settled prefix, or where the group begins."""
        settled = self.checkpoint.committable
        return self.start if settled is None else settled


class Member:
    """An outlet in the reader.

    Attributes:
        outlet: the outlet.
        pools: whose records it gets.
        held: what it has and has not settled, by the record's identity; in the order in which it was offered.
        full: from "no room" until it is woken.
        served: its place among all members in the order of their last record.
    """

    __slots__ = ("full", "held", "outlet", "pools", "served")

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet
        self.pools: list[Pool] = []
        self.held: dict[int, Delivery] = {}
        self.full = False
        self.served = 0


class Pool:
    """Members that want the same records, and the records that wait for one of them.

    Attributes:
        name: a topic's, whose records they want all, or an interest's.
        keeps: whether a partition keeps to one member while that has room.
        topics: the Kafka topics that hold such records.
        members: all of them.
        free: those not full, in the order of their turn.
        ready: deliveries to be offered.
    """

    __slots__ = ("free", "keeps", "members", "name", "ready", "topics")

    def __init__(self, name: Hashable, topics: Collection[str], *, keeps: bool) -> None:
        self.name = name
        self.keeps = keeps
        self.topics = frozenset(topics)
        self.members: dict[Member, None] = {}
        self.free: dict[Member, None] = {}
        self.ready: deque[Delivery] = deque()

    def next(self, declined: Collection[Member]) -> Member | None:
        """Whose turn it is."""
        for member in self.free:
            if member not in declined:
                return member
        return None


class GroupStatistics(msgspec.Struct, frozen=True):
    """A snapshot of one reader.

    Attributes:
        group: the consumer group.
        topics: what is subscribed to.
        outlets: outlets that share the reader.
        positions: per topic and partition that is ours, the offset of the next record to read.
        committed: likewise, the offset committed.
        lag: per topic, records stored and not read yet, as of the last fetch.
        unsettled: records read and not settled.
        waiting: of these, how many wait for their next attempt.
        commits: commit requests answered, ever.
        redelivered: records offered again, ever.
        late: settlements of records that were no longer the outlet's, ever.
        rebalances: assignments received, ever.
        unwanted: records settled since no outlet here wants them, ever.
        stalled: partitions not read on, since too much lies behind a record that is not settled.
    """

    group: str
    topics: tuple[str, ...]
    outlets: int
    positions: dict[str, dict[int, int]]
    committed: dict[str, dict[int, int]]
    lag: dict[str, int]
    unsettled: int
    waiting: int
    commits: int
    redelivered: int
    late: int
    rebalances: int
    unwanted: int = 0
    stalled: int = 0
