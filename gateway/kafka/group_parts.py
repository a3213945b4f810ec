"""What a group reader keeps: partitions that are ours, deliveries that are not settled, outlets; and its statistics."""

from __future__ import annotations

import msgspec
from aiokafka import TopicPartition

from flowcontrol.checkpoint import Checkpoint
from gateway.kafka.contracts import Outlet
from mapping.record import Received


class Delivery:
    """A record that is not settled: with an outlet, ready for one, or waiting for its next attempt."""

    __slots__ = ("attempts", "owner", "part", "record")

    def __init__(self, record: Received, part: Part) -> None:
        self.record = record
        self.part = part
        self.owner: Member | None = None
        self.attempts = 0


class Part:
    """A partition while it is ours; a new object with every assignment, so that old deliveries are told apart."""

    __slots__ = ("checkpoint", "committed", "deliveries", "fetched", "home", "ours", "partition")

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.checkpoint = Checkpoint()
        self.deliveries: dict[int, Delivery] = {}
        self.home: Member | None = None
        self.committed: int | None = None
        self.fetched: int | None = None
        self.ours = True


class Member:
    """An outlet in the reader; `full` from "no room" until it is woken."""

    __slots__ = ("full", "outlet")

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet
        self.full = False


class GroupStatistics(msgspec.Struct, frozen=True):
    """A snapshot of one reader.

    Attributes:
        group: the consumer group.
        topics: what is subscribed to.
        outlets: outlets that share the reader.
        positions: per topic and partition that is ours, the offset after the last record read.
        committed: likewise, the offset last committed by us.
        lag: per topic, records stored and not read yet, as of the last fetch.
        unsettled: records read and not settled.
        waiting: of these, how many wait for their next attempt.
        commits: commit requests answered, ever.
        redelivered: records offered again, ever.
        late: settlements of records that were no longer the outlet's, ever.
        rebalances: assignments received, ever.
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
