"""What a group reader keeps: its partitions, deliveries that are not settled, subscribers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from flowcontrol.checkpoint import Checkpoint
from flowcontrol.demand import Taker, TakerPool, surplus
from flowcontrol.offsets import OffsetSet, read_ledger, write_ledger
from gateway.kafka.contracts import Subscriber
from gateway.kafka.read.catch_up_reader import Reading
from mapping.record import Received

Condition = Callable[[Received], bool]

Tries = tuple[int, int]  # attempts, and how many of them failed
UNTRIED: Final[Tries] = (0, 0)
TRIES: Final = 10_000
"""Of so many unselected records of a partition it is remembered how often they were given out."""


class Selector(Protocol):
    """Tells which of a group's subscription filters a record is for (`gateway.mqtt.routing.shared_groups`)."""

    def select(self, record: Received) -> Collection[Hashable]:
        """The names of the subscription filters that the record matches; one without members is ignored."""
        ...

    def forget(self, name: Hashable) -> None:
        """A subscription filter has no members any more, and nothing is kept for it."""
        ...


class SubscriptionFilter(NamedTuple):
    """What some subscribers of a group want of its topics, instead of everything.

    Each record that a subscription filter matches goes to one of the subscribers that joined with it.
    """

    selector: Selector
    name: Hashable


class Delivery(msgspec.Struct, eq=False):
    """A record for one pool, not settled: with a member, ready for one, or waiting for its next attempt."""

    record: Received
    assigned: AssignedPartition
    pool: Pool
    attempts: int = 0  # that came back
    failures: int = 0  # of these
    returns: int = 0  # with a back-off, which grows with them
    kept: bool = False  # not settled when everybody has declined
    declined: set[Member] | frozenset[Member] = frozenset()  # who does not want it, as far as anybody was asked

    def decline(self, member: Member) -> None:
        """The record is not for a member."""
        if isinstance(self.declined, frozenset):
            self.declined = set()
        self.declined.add(member)


class AssignedPartition:
    """A partition while it is ours, which it may stay over many assignments.

    What is open in it is in one of three places: with somebody here (`checkpoint`), held for nobody (`unselected`), or
    not read yet though a former owner has read it (`ledger`).

    Attributes:
        unselected: what was read and no subscriber here selects: the log keeps it for whoever comes. It is settled for
            the checkpoint.
    """

    __slots__ = (
        "_base", "_passed", "checkpoint", "committed", "copies", "in_flight", "ledger", "ours", "partition", "position",
        "preferred", "stalled", "tries", "unselected",
    )  # fmt: skip

    def __init__(self, partition: TopicPartition, position: int | None, committed: OffsetAndMetadata | None) -> None:
        self.partition = partition
        self.checkpoint = Checkpoint()  # what was read of it and is not settled
        self.unselected = OffsetSet()
        self.in_flight: set[int] = set()  # of these, what subscribers have been offered again
        # of these, how often some were given out before, and how many of the attempts failed
        self.tries: dict[int, Tries] = {}
        # what the last owner has told about settled records; None once all of them are passed
        self.ledger = None if committed is None else read_ledger(committed.offset, committed.metadata)
        # by offset, for records that more than one pool wants, how many of them have not settled it
        self.copies: dict[int, int] = {}
        self.position = position  # the offset of the next record to read; None while Kafka has not told where to begin
        self._base = position
        self._passed = 0  # up to here records were left out as settled
        self.committed = committed  # what Kafka has, as far as we know
        # the member that gets its records while it has capacity (pools without a subscription filter)
        self.preferred: Member | None = None
        self.ours = True  # whether it still is
        self.stalled = False  # not read on, since too much lies behind a record that is not settled

    @property
    def span(self) -> int:
        """What its open records cost: in records that are kept since a first one is open, or blocks of offsets."""
        return self.checkpoint.span + self.unselected.blocks

    def unsettled(self, records: Sequence[Received]) -> Sequence[Received]:
        """The records that were read without those that the ledger knows to be settled."""
        ledger = self.ledger
        if ledger is None or not records:
            return records
        end, opened = ledger.end, ledger.open
        passed = self._passed = records[-1].offset + 1
        found = [record for record in records if record.offset >= end or record.offset in opened]
        opened.discard_range(opened.first or 0, passed)
        if passed >= end:
            self.ledger = None
        return found

    def leave(self, offset: int, tries: Tries) -> None:
        """Leave a record that no subscriber here selects to others."""
        if offset in self.in_flight:
            self.in_flight.remove(offset)
        else:
            self.checkpoint.settle(offset)
            self.unselected.add(offset)
        if tries != UNTRIED and len(self.tries) < TRIES:
            self.tries[offset] = tries

    def finish(self, offset: int) -> None:
        """A pool's record is settled for good; where others have one too, the record is when all are."""
        copies = self.copies
        if offset in copies:
            copies[offset] -= 1
            if copies[offset]:
                return
            del copies[offset]
        if offset in self.in_flight:
            self.in_flight.remove(offset)
            self.unselected.discard(offset)
            self.tries.pop(offset, None)
        else:
            self.checkpoint.settle(offset)

    def gone(self, begin: int, end: int) -> int:
        """There are no records at these offsets any more; how many of them were kept for somebody."""
        count = self.unselected.discard_range(begin, end)
        if count:
            self.in_flight.difference_update([offset for offset in self.in_flight if offset not in self.unselected])
        return count

    def committable(self, settled: Collection[int] = ()) -> OffsetAndMetadata | None:
        """What to commit: the first open offset, and what is settled behind it; None when nothing has begun.

        `settled` are offsets that are open, and are to be taken for settled.
        """
        checkpoint = self.checkpoint
        if settled or self.unselected or self.ledger is not None or checkpoint.span > checkpoint.outstanding:
            return self._with_ledger(settled)
        lowest = checkpoint.committable
        if lowest is None:
            lowest = self._base
        if lowest is not None and lowest < self._passed:
            if checkpoint.span:  # what was left out as settled lies behind what is open
                return self._with_ledger(settled)
            lowest = self._passed
        return None if lowest is None else OffsetAndMetadata(lowest, "")

    def _with_ledger(self, settled: Collection[int]) -> OffsetAndMetadata:
        opened = self.unselected.copy()
        for offset in self.checkpoint.open:
            opened.add(offset)
        for offset in settled:
            opened.discard(offset)
        end = max(self.position or 0, self.checkpoint.end)
        ledger = self.ledger
        if ledger is not None:
            end = max(end, ledger.end)
            for begin, until in ledger.open.runs():
                opened.add_range(begin, until)
        first = opened.first
        return OffsetAndMetadata(end, "") if first is None else OffsetAndMetadata(first, write_ledger(opened, end))


class Member(Taker["Pool"]):
    """A subscriber in the reader.

    Attributes:
        held: deliveries that it has not settled, by the record's identity (the delivery keeps the record alive), in the
            order in which they were offered.
    """

    __slots__ = ("_in_runs", "behind", "catching", "held", "subscriber", "wants")

    def __init__(self, subscriber: Subscriber, wants: Condition | None = None) -> None:
        super().__init__()
        self.subscriber = subscriber
        self.wants = wants  # tells which of them it selects; None is all
        self.held: dict[int, Delivery] = {}
        # by partition that it is behind on, the reading that brings it what was unselected before
        self.behind: dict[AssignedPartition, Reading] = {}
        self.catching: Subscriber | None = None  # the subscriber of these readings; None when it never was behind
        self._in_runs = wants is None and hasattr(subscriber, "offer_run")

    def delivery(self, record: Received) -> Delivery | None:
        """The delivery of a record that it holds; None when the record is no longer its own."""
        return self.held.get(id(record))

    def demand(self, partitions: int) -> int | None:
        """How many more records it would take; None: all that it may have is in the log, of so many partitions here."""
        return None if self.behind and len(self.behind) >= partitions else self.subscriber.demand

    @property
    def takes_runs(self) -> bool:
        """Whether it takes any records of a pool as they come, several at once (`contracts.RunSubscriber`)."""
        return self._in_runs and not self.behind

    def selects(self, delivery: Delivery) -> bool:
        """Whether it may be offered a record now: it wants it, and is not to be brought it by a reading."""
        if self in delivery.declined:
            return False
        if self.behind:
            reading = self.behind.get(delivery.assigned)
            if reading is not None and reading.position <= delivery.record.offset:
                return False
        if self.wants is None or self.wants(delivery.record):
            return True
        delivery.decline(self)
        return False


class Pool(TakerPool[Member]):
    """Members that want the same records, and the records that wait for one of them."""

    __slots__ = ("keeps", "name", "ready", "topics", "wanted")

    def __init__(self, name: Hashable, topics: Collection[str], *, keeps: bool) -> None:
        super().__init__()
        self.name = name  # a topic's, whose records they want all, or a subscription filter's
        self.keeps = keeps  # whether a partition's records with a key keep to one member while that has capacity
        self.topics = frozenset(topics)  # the Kafka topics that hold such records
        # of these, those that the dispatch counts for it: none while it has no members
        self.wanted: frozenset[str] = frozenset()
        self.ready: deque[Delivery] = deque()  # deliveries to be offered

    def balance(self, assignment: Iterable[AssignedPartition]) -> None:
        """Take partitions from members that have more than their share; the next record chooses another member."""
        if self.keeps:
            own = [assigned for assigned in assignment if assigned.partition.topic in self.topics]
            for position in surplus([assigned.preferred for assigned in own], len(self.members)):
                own[position].preferred = None

    def has_preferred(self, delivery: Delivery) -> bool:
        """Whether a record goes where its partition's go; one sender's without a key may all lie in one partition."""
        return self.keeps and (delivery.record.key is not None or len(self.members) == 1)


NOBODY: Final = Pool("", (), keeps=False)
