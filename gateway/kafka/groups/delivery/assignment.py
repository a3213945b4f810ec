"""The state of a group reader: its partitions, unsettled deliveries and members."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import msgspec
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from flowcontrol.checkpoint import Checkpoint
from flowcontrol.marks import TRIES_LIMIT, UNTRIED, Marks, Tries, read_marks, write_marks
from flowcontrol.offsets import LEDGER, LEDGER_LIMIT, Ledger, OffsetSet, read_ledger, write_ledger
from gateway.kafka.contracts import Subscriber
from gateway.kafka.read.catch_up_reader import Reading
from mapping.record import Received

Condition = Callable[[Received], bool]

EARLIEST: Final = 0
"""The turn of records that are older than those that are being read: they come first, in the order of their offsets."""


class Selector(Protocol):
    """Decides which of a group's subscription filters a record matches (`gateway.mqtt.routing.shared_groups`)."""

    def select(self, record: Received) -> Collection[Hashable]:
        """Return the names of the subscription filters that the record matches; names without members are ignored."""
        ...

    def forget(self, name: Hashable) -> None:
        """Drop a subscription filter that has neither members nor kept records."""
        ...


class SubscriptionFilter(NamedTuple):
    """Selects the records of a group's topics for some of its subscribers, in place of all records.

    Each record that a subscription filter matches goes to one of the subscribers that joined with the filter.
    """

    selector: Selector
    name: Hashable


class GivenBack(msgspec.Struct, frozen=True, eq=False):
    """How often a delivery was given back without a pause by members that settled nothing in between."""

    member: Member  # the last one that gave it back
    settled: int  # how many records that one had settled by then
    count: int


class Delivery(msgspec.Struct, eq=False):
    """An unsettled record for one pool: held by a member, ready for one, or waiting for its next attempt."""

    record: Received
    assigned: AssignedPartition
    pool: Pool
    turn: int = EARLIEST  # its place among all deliveries of the group, in the order in which they were read
    attempts: int = 0  # how often it came back
    failures: int = 0  # how many of these failed
    returns: int = 0  # how often it waited for a back-off, which grows with this count
    given_back: GivenBack | None = None  # without a pause
    kept: bool = False  # stays in the log when all members have declined it
    declined: set[Member] | None = None  # the members known not to want it

    def count(self, *, failed: bool) -> None:
        """Count an attempt, for the next owner of the partition as well."""
        self.attempts += 1
        self.failures += failed
        self.assigned.note_tries(self.record.offset, (self.attempts, self.failures))

    def decline(self, member: Member) -> None:
        """Note that a member does not want the record."""
        if self.declined is None:
            self.declined = set()
        self.declined.add(member)


@dataclass(slots=True, eq=False)
class AssignedPartition:
    """A partition while it is assigned to this process, perhaps over many assignments.

    Each open record is in one of three places: delivered or ready here (`checkpoint`), left in the log because no
    member selects it (`unselected`), or not yet read here, though a former owner has read it (`ledger`).
    """

    partition: TopicPartition
    position: int | None  # the offset of the next record to read; None until Kafka has said where to start
    committed: OffsetAndMetadata | None  # the offset in Kafka, as far as we know
    checkpoint: Checkpoint = field(default_factory=Checkpoint)  # records that were read and are not settled
    # records that were read and that no subscriber here selects. The log keeps them for subscribers that come later;
    # the checkpoint treats them as settled
    unselected: OffsetSet = field(default_factory=OffsetSet)
    in_flight: set[int] = field(default_factory=set)  # the unselected offsets that were offered to subscribers again
    tries: dict[int, Tries] = field(default_factory=dict)  # attempts at open records that came back, or may have
    marked: int = 0  # below this offset records may have been handed out by a former owner
    # members that must not be offered an unselected record again; at most `TRIES_LIMIT` records
    declined: dict[int, set[Member]] = field(default_factory=dict)
    ledger: Ledger | None = None  # the previous owner's list of settled records; None once all of them are passed
    # for each offset that several pools want: how many of them have not settled it
    copies: dict[int, int] = field(default_factory=dict)
    # the member that gets the partition's records while it has capacity (pools without a subscription filter)
    preferred: Member | None = None
    ours: bool = True  # still assigned to this process
    _base: int | None = None  # the first position
    _passed: int = 0  # below this offset records were skipped as settled
    _crashed: range = range(0)  # offsets that a former owner had handed out when it committed for the last time

    def __post_init__(self) -> None:
        self._base = self.position
        if self.committed is not None:
            first, text = self.committed.offset, self.committed.metadata
            self.ledger = read_ledger(first, text)
            marks = read_marks(first, text)
            self.tries = dict(marks.tries)
            self._crashed = range(marks.begin, marks.end)
            self.marked = max(marks.end, 1 + max(self.tries, default=-1))

    @property
    def span(self) -> int:
        """The cost of the open records: records tracked since the first open one, plus blocks of offsets."""
        return self.checkpoint.span + self.unselected.blocks

    def unsettled(self, records: Sequence[Received]) -> Sequence[Received]:
        """Return the records that the ledger does not list as settled."""
        ledger = self.ledger
        if ledger is None or not records:
            return records
        end, opened = ledger.end, ledger.open
        before, passed = self._passed, records[-1].offset + 1
        records_left = [record for record in records if record.offset >= end or record.offset in opened]
        opened.discard_range(before, passed)
        self._passed = passed
        if passed >= end:
            self.ledger = None
        return records_left

    def note_tries(self, offset: int, tries: Tries) -> None:
        """Remember the attempts at an open record."""
        if offset in self.tries or len(self.tries) < TRIES_LIMIT:
            self.tries[offset] = tries

    def tries_before(self, offset: int) -> Tries:
        """Return the attempts of former owners at a record that is read for the first time here."""
        attempts, failures = self.tries.get(offset, UNTRIED)
        if offset in self._crashed:
            attempts += 1
            self.note_tries(offset, (attempts, failures))
        return attempts, failures

    def leave(self, offset: int, declined: set[Member] | None = None) -> None:
        """Leave a record that no subscriber here selects in the log, for others than those that have declined it."""
        if offset in self.in_flight:
            self.in_flight.remove(offset)
        else:
            self.checkpoint.settle(offset)
            self.unselected.add(offset)
        if declined and len(self.declined) < TRIES_LIMIT:
            self.declined[offset] = declined

    def finish(self, offset: int) -> None:
        """Settle a record for one pool; it is settled for good when all pools with a copy have settled it."""
        copies = self.copies
        if offset in copies:
            copies[offset] -= 1
            if copies[offset]:
                return
            del copies[offset]
        self.tries.pop(offset, None)
        if offset in self.in_flight:
            self.in_flight.remove(offset)
            self.unselected.discard(offset)
            self.declined.pop(offset, None)
        else:
            self.checkpoint.settle(offset)

    def forget(self, member: Member) -> None:
        """Drop what is kept about a member that leaves."""
        if self.preferred is member:
            self.preferred = None
        for declined in self.declined.values():
            declined.discard(member)

    def discard_deleted(self, begin: int, end: int) -> int:
        """Note that the log no longer has records at these offsets; return how many of them were unselected.

        Those that subscribers hold stay open until they are settled or left.
        """
        held = [offset for offset in self.in_flight if begin <= offset < end]
        gone = [offset for offset in self.tries if begin <= offset < end and offset in self.unselected]
        count = self.unselected.discard_range(begin, end) - len(held)
        for offset in held:
            self.unselected.add(offset)
        for offset in gone:
            if offset not in self.unselected:
                del self.tries[offset]
        if count:
            self.declined = {offset: members for offset, members in self.declined.items() if offset in self.unselected}
        return count

    def committable(self, settled: Collection[int] = (), handed_out: int = 0) -> OffsetAndMetadata | None:
        """Return the offset to commit: the first open one, with ledger and marks. None when nothing was read.

        `settled` are open offsets that count as settled. Members hold records below `handed_out`.
        """
        checkpoint, opened, end = self.checkpoint, None, 0
        first = self._base if checkpoint.committable is None else checkpoint.committable
        if (
            settled
            or self.unselected
            or self.ledger is not None
            or checkpoint.span > checkpoint.outstanding
            # records skipped as settled lie behind an open one
            or (checkpoint.span and first is not None and first < self._passed)
        ):
            opened, end = self._open_offsets(settled)
            first = opened.first
            if first is None:
                return OffsetAndMetadata(end, "")
        elif first is not None and not checkpoint.span:  # all that was read is settled, transaction markers included
            first = max(first, self._passed, self.position or 0)
        if first is None:
            return None
        marks = write_marks(first, self._marks(settled, handed_out))
        ledger = "" if opened is None else write_ledger(opened, end, LEDGER_LIMIT - len(marks))
        return OffsetAndMetadata(first, (ledger or LEDGER) + marks if marks else ledger)

    def _marks(self, settled: Collection[int], handed_out: int) -> Marks:
        tries = {offset: self.tries[offset] for offset in self.tries.keys() - set(settled)} if settled else self.tries
        begin, end = max(self.position or 0, self._crashed.start), self._crashed.stop  # those not read here yet
        return Marks(tries, 0, max(handed_out, end if begin < end else 0)) if handed_out else Marks(tries, begin, end)

    def _open_offsets(self, settled: Collection[int]) -> tuple[OffsetSet, int]:
        """Return the open offsets, and the offset before which all others are settled."""
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
        return opened, end


@dataclass(slots=True, eq=False)
class Member:
    """A subscriber in the reader.

    Invariant: it is in `free` of all of its pools while it is not `full`, else in none.
    """

    subscriber: Subscriber
    wants: Condition | None = None  # the subscriber's own selector; None selects all
    pools: list[Pool] = field(default_factory=list)  # from which it gets records
    full: bool = False  # has no capacity, until `wake`
    resting: bool = False  # is full for a while, whatever its subscriber says (`redelivery.Rests`)
    settled: int = 0  # how many records it has settled
    served: int = 0  # the number of its last record among all that members got in turn; 0 before the first
    # its unsettled deliveries, by the identity of the record (the delivery keeps the record alive), in the order of
    # their offers
    held: dict[int, Delivery] = field(default_factory=dict)
    # for each partition that it is behind on: the reading that brings formerly unselected records
    behind: dict[AssignedPartition, Reading] = field(default_factory=dict)
    log_subscriber: Subscriber | None = None  # of these readings; None when it never was behind
    _in_runs: bool = field(init=False)

    def __post_init__(self) -> None:
        self._in_runs = self.wants is None and hasattr(self.subscriber, "offer_run")

    def fill(self) -> None:
        """Mark the member as without capacity; it gets no records until `wake`."""
        self.full = True
        for pool in self.pools:
            pool.free.pop(self, None)

    def wake(self) -> None:
        """Mark the member as having capacity again, after all that have it already; not while it is resting."""
        if self.full and not self.resting:
            self.full = False
            for pool in self.pools:
                pool.free[self] = None

    def delivery(self, record: Received) -> Delivery | None:
        """Return the delivery of a record, or None when the member no longer holds it."""
        return self.held.get(id(record))

    def demand(self, partitions: int) -> int | None:
        """How many more records it would accept; None when it is behind in all of the group's `partitions` here."""
        return None if self.behind and len(self.behind) >= partitions else self.subscriber.demand

    @property
    def takes_runs(self) -> bool:
        """Whether it accepts any records of a pool in runs (`contracts.RunSubscriber`)."""
        return self._in_runs and not self.behind

    def selects(self, delivery: Delivery) -> bool:
        """Whether it may be offered a record now: it wants the record, and no reading will bring it."""
        if delivery.declined is not None and self in delivery.declined:
            return False
        if self.behind:
            reading = self.behind.get(delivery.assigned)
            if reading is not None and reading.position <= delivery.record.offset:
                return False
        if self.wants is None or self.wants(delivery.record):
            return True
        delivery.decline(self)
        return False


@dataclass(slots=True, eq=False)
class Pool:
    """Members that want the same records, and the records that wait for one of these members.

    Invariant: `free` are those of `members` that are not full, in the order of their turns: the one that joined, was
    served or was woken last comes last.
    """

    name: Hashable  # a topic (members that want all of it) or the name of a subscription filter
    topics: frozenset[str]  # the Kafka topics that may have such records
    sticky: bool  # a partition's keyed records stay with one member while that has capacity
    members: dict[Member, None] = field(default_factory=dict)
    free: dict[Member, None] = field(default_factory=dict)
    handed_out: int = EARLIEST  # the highest turn of the deliveries that members have accepted
    wanted: frozenset[str] = frozenset()  # the topics that `Pools` counts for this pool: none while it has no members
    ready: deque[Delivery] = field(default_factory=deque)  # deliveries to be offered
    returned: list[Delivery] = field(default_factory=list)  # given back, and not in their places in `ready` yet

    def join(self, member: Member) -> None:
        """Add a member that has capacity."""
        member.pools.append(self)
        self.members[member] = self.free[member] = None

    def leave(self, member: Member) -> None:
        """Remove a member; its `pools` do not change."""
        del self.members[member]
        self.free.pop(member, None)

    def next(self, delivery: Delivery) -> Member | None:
        """Return the member with capacity whose turn it is among those that select the record, or None."""
        for member in self.free:
            if member.selects(delivery):
                return member
        return None

    def balance(self, assignment: Iterable[AssignedPartition]) -> None:
        """Take partitions from members with more than their share; the next record of each selects another member."""
        if not self.sticky:
            return
        own = [assigned for assigned in assignment if assigned.partition.topic in self.topics]
        share = -(-len(own) // len(self.members))
        kept: Counter[Member] = Counter()
        for assigned in own:
            if assigned.preferred is not None:
                kept[assigned.preferred] += 1
                if kept[assigned.preferred] > share:
                    assigned.preferred = None

    def has_preferred(self, delivery: Delivery) -> bool:
        """Whether a record goes to its partition's preferred member; keyless ones of a sender may share a partition."""
        return self.sticky and (delivery.record.key is not None or len(self.members) == 1)

    def leading_run(self, kept: AssignedPartition | None, most: int) -> int:
        """Return how many of the first deliveries, at most `most`, go to the same members, and were never given back.

        These are the preferred member of the partition `kept`, or (None) the members in turn.
        """
        alone = len(self.members) == 1
        count = 0
        for delivery in itertools.islice(self.ready, most):
            if delivery.attempts or delivery.declined:
                break
            if not alone and (delivery.record.key is None) is not (kept is None):
                break
            if kept is not None and delivery.assigned is not kept:
                break
            count += 1
        return count


NO_POOL: Final = Pool("", frozenset(), sticky=False)
