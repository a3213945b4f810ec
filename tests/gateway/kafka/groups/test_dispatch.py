"""Which member gets which record, without Kafka, for any order of events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowcontrol.bucket import Bucket
from gateway.kafka.groups.commits import Commits
from gateway.kafka.groups.delivery import assignment, ready, redelivery
from gateway.kafka.groups.delivery.assignment import AssignedPartition, Member, SubscriptionFilter
from gateway.kafka.groups.delivery.dispatch import DEMAND, Dispatch
from gateway.kafka.read.catch_up_reader import Reading
from mapping.record import Received
from tests.support.steps import steps

PARTITION = TopicPartition("t", 0)


class ByKey:
    """Filters named by letters; a record matches those in its key."""

    def select(self, record: Received) -> list[str]:
        return list((record.key or b"").decode())

    def forget(self, name: object) -> None:
        assert name in {"a", "b"}


SELECTOR = ByKey()


class Everything(ByKey):
    """Filters named by numbers; each record matches all of them."""

    def forget(self, name: object) -> None:
        pass


class Sink:
    """A subscriber with a window that declines chosen records."""

    lossy = False

    def __init__(self, capacity: int = 1_000_000) -> None:
        self.capacity = capacity
        self.got: list[Received] = []
        self.held: list[Received] = []
        self.declines = False
        self.has_repeats = False  # in a run
        self.key = b""
        self.member: Any = None
        self.dispatch: Any = None

    @property
    def demand(self) -> int:
        return self.capacity

    @property
    def offsets(self) -> list[int]:
        return [record.offset for record in self.got]

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        if not self.capacity:
            return False
        if self.declines:
            self.dispatch.decline(self.member, record)
            return True
        self.capacity -= 1
        self.got.append(record)
        self.held.append(record)
        return True

    def done(self, record: Received) -> None:
        self.held.remove(record)
        self.capacity += 1
        self.dispatch.done(self.member, record)
        self.dispatch.wake(self.member)


class Taker(Sink):
    """Accepts runs."""

    def __init__(self, capacity: int = 1_000_000) -> None:
        super().__init__(capacity)
        self.in_runs: list[int] = []
        self.boasts = False  # reports more demand than it accepts, as when bytes are counted too

    @property
    def demand(self) -> int:
        return 1000 if self.boasts and self.capacity else self.capacity

    def offer_run(self, records: Sequence[Received], context: object = None) -> int:
        self.in_runs += [record.offset for record in records]
        # Not an assertion: the dispatch contains what a subscriber raises, and offers the records one by one.
        self.has_repeats |= len({(record.partition, record.offset) for record in records}) < len(records)
        return sum(1 for _ in itertools.takewhile(self.offer_nowait, records))


S = TypeVar("S", bound=Sink)


class Log:
    """The log that was read so far; each `turn` offers it to all members that are behind."""

    def __init__(self) -> None:
        self.records: list[Received] = []
        self.readings: list[Reading] = []

    def start(self, reading: Reading) -> None:
        self.readings.append(reading)

    def cancel(self, reading: Reading) -> None:
        self.readings.remove(reading)

    def forget(self, subscriber: Any) -> list[Reading]:
        found = [reading for reading in self.readings if reading.subscriber is subscriber]
        self.readings = [reading for reading in self.readings if reading.subscriber is not subscriber]
        return found

    def resume(self, subscriber: Any) -> None:
        pass

    def turn(self) -> None:
        for reading in tuple(self.readings):
            for record in [one for one in self.records if one.partition == reading.partition.partition]:
                if record.offset < reading.position or reading not in self.readings:
                    continue
                if reading.subscriber.demand <= 0 or not reading.subscriber.offer_nowait(record):
                    break
                reading.position = record.offset + 1
            if reading in self.readings and reading.position >= reading.goal():
                self.readings.remove(reading)
                reading.finished(reading)


class World:
    def __init__(
        self, partitions: int = 1, return_wait_s: float = 0, backoff_s: Callable[[int], float] = lambda _: 0.001
    ) -> None:
        self.log = Log()
        self.dispatch = Dispatch(backoff_s, lambda: None, self.log, return_wait_s=return_wait_s)
        self.parts = [
            AssignedPartition(TopicPartition("t", number), 0, OffsetAndMetadata(0, "")) for number in range(partitions)
        ]
        self.dispatch.set_assignment(self.parts)
        self.dispatch.suspended = False
        self.next = [0] * partitions

    def join(self, sink: S, subscription_filter: str = "", *, selects: bytes = b"", queue: bool = False) -> S:
        sink.dispatch = self.dispatch
        wants = (lambda record: record.key == selects) if selects else None
        chosen = SubscriptionFilter(SELECTOR, subscription_filter) if subscription_filter else None
        sink.member = self.dispatch.add(sink, ["t"], chosen, wants, queue=(lambda record: True) if queue else None)
        return sink

    def read(self, *keys: str, partition: int = 0, value: bytes = b"") -> None:
        part = self.parts[partition]
        for key in keys:
            record = Received("t", key.encode(), value, (), 0, partition, self.next[partition])
            self.next[partition] += 1
            self.log.records.append(record)
            self.dispatch.take([record], part)
            part.position = record.offset + 1
        self.dispatch.push()

    def read_run(self, keys: Sequence[bytes | None], partition: int = 0) -> None:
        """Read the records of one fetch."""
        first = self.next[partition]
        self.next[partition] += len(keys)
        records = [Received("t", key, b"", (), 0, partition, first + place) for place, key in enumerate(keys)]
        self.dispatch.take(records, self.parts[partition])
        self.parts[partition].position = self.next[partition]

    @property
    def committable(self) -> int:
        stored = self.parts[0].committable()
        assert stored is not None
        return stored.offset


@pytest.fixture
def world() -> World:
    return World()


def tries(member: Member, record: Received) -> tuple[int, int]:
    """Return how often a record was delivered before, and how many of the attempts have failed."""
    delivery = member.delivery(record)
    return (0, 0) if delivery is None else (delivery.attempts, delivery.failures)


def test_members_of_a_subscription_filter_take_turns(world: World) -> None:
    sinks = [world.join(Sink(), "a") for _ in range(3)]
    world.read(*"aaaaaaa")
    assert [sink.offsets for sink in sinks] == [[0, 3, 6], [1, 4], [2, 5]]


def test_a_partition_stays_with_one_whole_topic_member() -> None:
    world = World(partitions=2)
    one, two = world.join(Sink(3)), world.join(Sink())
    world.read(*"aaa", partition=0)
    world.read(*"aaa", partition=1)
    assert [{record.partition for record in sink.got} for sink in (one, two)] == [{0}, {1}]
    world.read("a", partition=0)  # its preferred member has no capacity
    assert two.got[-1].partition == 0


def test_whole_topic_members_take_turns_with_a_subscription_filter(world: World) -> None:
    whole, chosen = world.join(Sink()), world.join(Sink(), "a")
    world.read(*"aaaabb")
    assert whole.offsets == [1, 3, 4, 5]
    assert chosen.offsets == [0, 2]


def test_the_member_without_records_for_longest_is_next(world: World) -> None:
    whole, chosen = world.join(Sink()), [world.join(Sink(), "a") for _ in range(3)]
    world.read(*"aaaaaaaa")
    assert [len(sink.got) for sink in (whole, *chosen)] == [2, 2, 2, 2]


fetches = st.tuples(st.integers(0, 1), st.lists(st.sampled_from((None, None, b"k")), min_size=1, max_size=9))


@given(st.lists(fetches, max_size=8), st.integers(1, 4), st.lists(st.booleans(), min_size=8, max_size=8))
def test_runs_are_shared_out_as_single_records_are(read: list[Any], members: int, pushed: list[bool]) -> None:
    """Each member gets as many, in order; keyed records go to the same one while no member is full."""
    found: list[Any] = []
    for kind in (Sink, Taker):
        world = World(partitions=2)
        sinks = [world.join(kind()) for _ in range(members)]
        for (partition, keys), push in zip(read, pushed, strict=False):
            world.read_run(keys, partition)
            if push:
                world.dispatch.push()
        world.dispatch.push()
        assert not any(sink.has_repeats for sink in sinks)
        got = [[(record.partition, record.offset) for record in sink.got] for sink in sinks]
        for partition in range(2):
            assert all(one == sorted(one) for one in ([at for at in places if at[0] == partition] for places in got))
        assert sorted(itertools.chain(*got)) == [
            (part, at) for part, count in enumerate(world.next) for at in range(count)
        ]
        keyed = [[(record.partition, record.offset) for record in sink.got if record.key] for sink in sinks]
        found.append((list(map(len, got)), keyed))
    assert found[0] == found[1]


windows = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@given(windows, st.lists(st.sampled_from((None, None, b"k")), min_size=1, max_size=20), st.data())
def test_a_run_ends_where_capacity_does(capacities: list[int], keys: list[bytes | None], drawn: Any) -> None:
    """No member exceeds its window, each gets its part in order, and nothing waits while a member has capacity."""
    world = World()
    sinks = [world.join(Taker(capacity)) for capacity in capacities]
    for sink in sinks:
        sink.boasts = drawn.draw(st.booleans())
    world.read_run(keys)
    world.dispatch.push()
    while True:
        given = sorted(offset for sink in sinks for offset in sink.offsets)
        assert given == list(range(len(given)))
        assert len(given) == len(keys) or not any(sink.capacity for sink in sinks)
        assert all(sink.offsets == sorted(sink.offsets) for sink in sinks)
        holders = [sink for sink in sinks if sink.held]
        if not holders:
            break
        one = drawn.draw(st.sampled_from(holders))
        one.done(one.held[0])
        world.dispatch.push()
    assert len(given) == (len(keys) if any(capacities) else 0)
    assert all(capacity == sink.capacity for capacity, sink in zip(capacities, sinks, strict=True))
    assert not any(sink.has_repeats for sink in sinks)


def test_a_redelivered_record_is_offered_alone(world: World) -> None:
    """Its number of attempts matters."""
    sink = world.join(Taker())
    world.read_run([None] * 3)
    world.dispatch.push()
    world.dispatch.requeue(sink.member, sink.got[1], failed=True, at_once=True)
    world.read_run([None] * 2)
    world.dispatch.push()
    assert (sink.offsets, sink.in_runs) == ([0, 1, 2, 1, 3, 4], [1, 2, 3, 4])


class Failing(Taker):
    """A subscriber with a bug that one record triggers."""

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        if record.offset == 2:
            raise RuntimeError("a bug of the test's")
        return super().offer_nowait(record)

    def offer_run(self, records: Sequence[Received], context: object = None) -> int:
        if any(record.offset == 2 for record in records):
            raise RuntimeError("a bug of the test's")
        return super().offer_run(records)


async def test_a_run_that_fails_is_offered_one_by_one() -> None:
    world = World(backoff_s=lambda _: 60.0)
    sink = world.join(Failing(4))
    world.read_run([None] * 6)
    world.dispatch.push()
    assert sink.offsets == [0, 1, 3, 4]
    sink.done(sink.held[0])
    world.dispatch.push()
    assert sink.offsets == [0, 1, 3, 4, 5]
    for record in list(sink.held):
        sink.done(record)
    assert (world.committable, world.parts[0].checkpoint.outstanding) == (2, 1)  # it waits for its next attempt
    world.dispatch.close()


def test_a_pool_without_capacity_delays_no_other(world: World) -> None:
    full, other = world.join(Sink(1), "a"), world.join(Sink(), "b")
    world.read(*"aaabab")
    assert (full.offsets, other.offsets) == ([0], [3, 5])
    full.done(full.held[0])
    world.dispatch.push()
    assert full.offsets == [0, 1]


def test_reading_stops_when_too_much_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    full = world.join(Sink(1), "a")
    world.join(Sink(), "b")
    assert world.dispatch.demand == DEMAND
    world.read(*"a" * 5, value=bytes(ready.WAITING_BYTES // 4))
    assert world.dispatch.demand == 0
    for _ in range(2):
        full.done(full.held[0])
        world.dispatch.push()
    assert world.dispatch.demand == DEMAND
    monkeypatch.setattr(ready, "WAITING_RECORDS", 2)
    assert world.dispatch.demand == 0


def test_a_copy_for_each_subscription_filter_is_settled_when_all_are(world: World) -> None:
    one, two = world.join(Sink(), "a"), world.join(Sink(), "b")
    world.read("ab", "a")
    one.done(one.held[0])
    assert world.committable == 0
    two.done(two.held[0])
    assert world.committable == 1


def test_a_subscription_filter_without_members_leaves_nothing_behind(world: World) -> None:
    one, two = world.join(Sink(1), "a"), world.join(Sink(), "b")
    world.read("a", "a", "ab", "b")
    world.dispatch.remove(one.member)
    world.dispatch.push()
    assert two.offsets == [2, 3]
    for record in list(two.held):
        two.done(record)
    assert world.committable == 4
    assert world.dispatch.unwanted == 3


def test_records_of_an_abandoned_filter_go_to_whole_topic_members(world: World) -> None:
    chosen = world.join(Sink(), "a")
    world.read("a", "a")
    whole = world.join(Sink())
    world.dispatch.remove(chosen.member)
    world.dispatch.push()
    assert whole.offsets == [0, 1]
    assert [tries(whole.member, record)[0] for record in whole.got] == [1, 1]


def test_records_without_members_wait_while_the_partition_may_move(world: World) -> None:
    """After the last member for a topic has left, its records stay unsettled until Kafka has moved the partition."""
    one = world.join(Sink(), "a")
    world.read("a")
    world.dispatch.remove(one.member)
    world.read("a", "b")
    assert world.dispatch.topics == frozenset()
    assert world.parts[0].checkpoint.outstanding == 3
    back = world.join(Sink(), "a")  # before it was moved
    world.dispatch.push()
    assert back.offsets == [0, 1]
    assert world.dispatch.unwanted == 1


async def test_a_member_that_returns_soon_has_missed_nothing() -> None:
    world = World(return_wait_s=60)
    one, other = world.join(Sink(), "a"), world.join(Sink(), "b")
    world.read("a", "b", "a")
    world.dispatch.remove(one.member)
    world.read("a", "b", "c")
    assert world.dispatch.knows("a")
    assert other.offsets == [1, 4]
    back = world.join(Sink(), "a")
    world.dispatch.push()
    assert back.offsets == [0, 2, 3]
    assert [tries(back.member, record)[0] for record in back.got] == [1, 1, 0]
    world.dispatch.close()


async def test_a_filter_whose_members_stay_away_is_dropped() -> None:
    world = World(return_wait_s=0.01)
    one, other = world.join(Sink(), "a"), world.join(Sink(), "b")
    world.read("a", "b")
    other.done(other.held[0])
    world.dispatch.remove(one.member)
    assert world.committable == 0
    world.dispatch.progress.clear()
    async with asyncio.timeout(5):
        await world.dispatch.progress.wait()
    assert (world.committable, world.dispatch.unwanted, world.dispatch.knows("a")) == (2, 1, False)


async def test_a_filter_that_awaits_its_members_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "WAITING_RECORDS", 10)
    world = World(return_wait_s=60)
    one, other = world.join(Sink(), "a"), world.join(Sink(), "b")
    world.dispatch.remove(one.member)
    world.read(*"a" * 10)
    assert world.dispatch.demand == DEMAND
    assert world.dispatch.unwanted == 10
    world.read(*"ab")
    assert other.offsets == [11]


def test_a_record_that_all_decline_is_settled(world: World) -> None:
    one, two, late = world.join(Sink(), "a"), world.join(Sink(1), "a"), Sink()
    two.declines = True
    world.read("a")
    one.declines = True
    world.read("a")
    assert (one.offsets, two.offsets, world.dispatch.unwanted) == ([0], [], 1)
    two.capacity = 0  # a member without capacity is asked later
    world.read("a")
    assert world.parts[0].checkpoint.outstanding == 2
    world.join(late, "a")
    world.dispatch.push()
    assert late.offsets == [2]


class Choosy(Sink):
    """A subscriber that wants the records of one key, and declines others with or without capacity."""

    def __init__(self, key: bytes, capacity: int = 1_000_000) -> None:
        super().__init__(capacity)
        self.key = key

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        if record.key != self.key:
            self.dispatch.decline(self.member, record)
            return True
        return super().offer_nowait(record, context)


def test_a_record_for_a_member_without_capacity_delays_no_other(world: World) -> None:
    slow, quick = world.join(Choosy(b"a", capacity=1)), world.join(Choosy(b"b"))
    world.read(*"aabacbab")
    assert (slow.offsets, quick.offsets) == ([0], [2, 5, 7])
    assert world.dispatch.unwanted == 0  # the slow one was not offered c
    for record in list(quick.held):
        quick.done(record)
    assert world.committable == 0
    for _ in range(4):
        slow.done(slow.held[0])
        world.dispatch.push()
    assert slow.offsets == [0, 1, 3, 6]  # in order
    assert world.dispatch.unwanted == 1
    assert world.committable == 8


def test_a_lost_partition_is_forgotten(world: World) -> None:
    sink = world.join(Sink(2), "a")
    world.read(*"aaa")
    world.dispatch.set_assignment(())
    sink.dispatch.done(sink.member, sink.held[0])
    assert (world.dispatch.late, world.dispatch.held) == (1, 0)
    sink.capacity = 5
    world.dispatch.wake(sink.member)
    world.dispatch.push()
    assert len(sink.got) == 2


def test_a_record_requeued_at_once_comes_first(world: World) -> None:
    sink = world.join(Sink(3))
    world.read(*"aaaaa")
    world.dispatch.requeue(sink.member, sink.held.pop(), failed=False, at_once=True)
    world.dispatch.requeue(sink.member, sink.held.pop(), failed=True, at_once=True)
    sink.capacity = 10
    world.dispatch.wake(sink.member)
    world.dispatch.push()
    assert sink.offsets == [0, 1, 2, 1, 2, 3, 4]
    assert [tries(sink.member, record)[0] for record in sink.held] == [0, 1, 0, 0, 0]
    assert world.dispatch.redelivered == 2


@given(st.data())
def test_records_given_back_in_any_order_come_again_in_the_order_in_which_they_were_read(data: st.DataObject) -> None:
    partitions = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=20))
    world = World(partitions=3)
    sink = world.join(Taker(data.draw(st.integers(1, 20))))
    for partition in partitions:
        world.read("a", partition=partition)
    order = {id(record): place for place, record in enumerate(world.log.records)}
    sink.capacity = 0
    for _ in range(3):
        taken = sink.held
        settled = data.draw(st.lists(st.sampled_from(taken), unique_by=id)) if taken else []
        for record in settled:
            world.dispatch.done(sink.member, record)
        back = data.draw(st.permutations([record for record in taken if record not in settled]))
        sink.held = []
        for record in back:
            world.dispatch.requeue(sink.member, record, failed=data.draw(st.booleans()), at_once=True)
            if data.draw(st.booleans()):
                world.dispatch.push()  # the member has no capacity: what came back waits
        sink.got.clear()
        sink.capacity = data.draw(st.integers(1, 20))
        world.dispatch.wake(sink.member)
        world.dispatch.push()
        sink.capacity = 0
        got = [order[id(record)] for record in sink.got]
        assert got == sorted(got)
        assert not back or got[0] == min(order[id(record)] for record in back)


async def test_a_member_that_gives_the_same_record_back_again_and_again_rests_and_others_get_it() -> None:
    pauses: list[int] = []

    def recorded(pause: int) -> float:
        pauses.append(pause)
        return 0.001

    world = World(backoff_s=recorded)
    stubborn = world.join(Sink())
    world.read("a", "a")

    def give_back() -> None:
        for record in stubborn.held:
            world.dispatch.requeue(stubborn.member, record, failed=False, at_once=True)
        stubborn.held.clear()
        world.dispatch.push()

    for _ in range(redelivery.AT_ONCE):
        give_back()
        assert [record.offset for record in stubborn.held] == [0, 1]
    assert pauses == []
    give_back()
    world.dispatch.wake(stubborn.member)
    world.dispatch.push()
    assert (stubborn.held, pauses) == ([], [0])
    await until_offered(world, stubborn, len(stubborn.got) + 2)
    give_back()
    assert pauses == [0, 1]
    other = world.join(Sink(1))
    world.dispatch.push()
    assert other.offsets == [0]
    await until_offered(world, stubborn, len(stubborn.got) + 1)
    stubborn.done(stubborn.held[0])
    world.read("a")
    for _ in range(redelivery.AT_ONCE):
        give_back()
    assert pauses == [0, 1]
    give_back()
    world.dispatch.remove(stubborn.member)  # during the pause
    await until_offered(world, world.join(Sink()), 1)


def test_the_partition_of_a_held_record(world: World) -> None:
    sink = world.join(Sink())
    world.read(*"aa")
    first, second = sink.held
    assert sink.member.delivery(first).assigned is world.parts[0]
    sink.done(first)
    assert sink.member.delivery(first) is None
    world.dispatch.set_assignment(())
    assert sink.member.delivery(second) is None


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_settling_together_equals_settling_one_by_one(data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["", "a", "b", "ab"])), max_size=30))
    runs = data.draw(st.lists(st.lists(st.integers(0, 29), unique=True, max_size=10), max_size=5))
    found = []
    for together in (True, False):
        world = World(partitions=2)
        sinks = [world.join(Sink(), "a"), world.join(Sink(), "b"), world.join(Sink())]
        for partition, key in keys:
            world.read(key, partition=partition)
        states = []
        for sink in sinks:
            for run in runs:
                records = [sink.got[place] for place in run if place < len(sink.got)]
                if together:
                    world.dispatch.done_all(sink.member, records)
                else:
                    for record in records:
                        world.dispatch.done(sink.member, record)
                parts = [(part.committable(), part.checkpoint.outstanding) for part in world.parts]
                states.append((parts, world.dispatch.late, world.dispatch.held, world.dispatch.progress.is_set()))
        found.append(states)
    assert found[0] == found[1]


async def test_a_requeued_record_comes_again_later(world: World) -> None:
    one = world.join(Sink(), "a")
    world.read("a")
    world.dispatch.requeue(one.member, one.held.pop(), failed=True)
    world.dispatch.remove(one.member)
    two = world.join(Sink(), "a")
    async with asyncio.timeout(5):
        while not two.got:
            world.dispatch.push()
            await asyncio.sleep(0)
    assert tries(two.member, two.got[0])[0] == 1
    assert world.dispatch.delayed == 0


async def until_offered(world: World, sink: Sink, count: int) -> None:
    async with asyncio.timeout(5):
        while len(sink.got) < count:
            world.dispatch.push()
            await asyncio.sleep(0)


async def test_the_back_off_grows_though_nothing_has_failed() -> None:
    delays: list[int] = []

    def recorded(attempt: int) -> float:
        delays.append(attempt)
        return 0.001

    world = World(backoff_s=recorded)
    sink = world.join(Sink())
    world.read("a")
    for count in range(1, 4):
        await until_offered(world, sink, count)
        assert tries(sink.member, sink.got[-1])[0] == 0
        world.dispatch.requeue(sink.member, sink.held.pop(), failed=False)
    assert delays == [0, 1, 2]


def test_leaving_in_order_is_no_failure(world: World) -> None:
    one = world.join(Sink())
    world.read("a")
    two = world.join(Sink())
    world.dispatch.remove(one.member, failed=False)
    world.dispatch.push()
    record = two.got[0]
    assert tries(two.member, record) == (1, 0)
    one = world.join(Sink())
    world.dispatch.remove(two.member)
    world.dispatch.push()
    assert tries(one.member, record) == (2, 1)


def test_a_record_that_all_decline_is_kept_on_request(world: World) -> None:
    """It is not settled, and not offered again to a member that has declined it; others may come."""
    one, two = world.join(Sink()), world.join(Sink())
    world.read("a")
    record = one.held.pop()
    assert world.dispatch.has_other(one.member, record)
    world.dispatch.decline(one.member, record, failed=True, keep=True)
    world.dispatch.push()
    assert two.offsets == [0]
    assert tries(two.member, record)[0] == 1
    assert not world.dispatch.has_other(two.member, record)
    world.dispatch.remove(two.member, failed=False)
    world.dispatch.push()
    assert one.offsets == [0]
    assert world.dispatch.unwanted == 0
    assert world.committable == 0  # nothing is settled


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.sampled_from(["a", "b", "ab", "c", ""])),
        st.tuples(st.just("join"), st.sampled_from(["", "a", "b"])),
        st.tuples(st.sampled_from(["leave", "done", "decline"]), st.integers(0, 50)),
    ),
    max_size=60,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS)
def test_every_record_is_settled_and_none_is_settled_twice(actions: list[tuple[str, Any]]) -> None:
    world = World()
    sinks: list[Sink] = [world.join(Sink(2), "a")]
    settled: Counter[tuple[int, str]] = Counter()

    def finish(sink: Sink) -> None:
        record = sink.held[0]
        sink.done(record)
        settled[record.offset, str(sink.member.pools[0].name)] += 1

    for action, argument in actions:
        if action == "read":
            world.read(argument)
        elif action == "join":
            sinks.append(world.join(Sink(2), argument))
        elif not sinks:
            continue
        elif action == "leave":
            world.dispatch.remove(sinks.pop(argument % len(sinks)).member)
        elif action == "decline":
            sink = sinks[argument % len(sinks)]
            sink.declines = not sink.declines
        elif sinks[argument % len(sinks)].held:
            finish(sinks[argument % len(sinks)])
        world.dispatch.push()
        held = Counter(record.offset for sink in sinks for record in sink.held)
        assert all(count <= 2 for count in held.values())  # at most one in each subscription filter
    sinks.extend(world.join(Sink(), name) for name in ("", "a", "b"))  # with capacity for everything
    for _ in range(len(actions) * 2 + 2):
        world.dispatch.push()
        for sink in sinks:
            while sink.held:
                finish(sink)
    assert world.parts[0].checkpoint.outstanding == 0
    assert world.committable == world.next[0]
    assert world.parts[0].copies == {}
    assert all(count == 1 for count in settled.values())
    assert (world.dispatch.held, world.dispatch.ready.records, world.dispatch.ready.bytes) == (0, 0, 0)


# Queues: records that no member selects stay in the log.


def open_of(part: AssignedPartition, end: int | None = None) -> set[int]:
    """The offsets that a successor finds open if we commit now, up to `end` or to the position."""
    stored = part.committable()
    assert stored is not None
    successor = AssignedPartition(part.partition, stored.offset, stored)
    records = [Received("t", b"", b"", (), 0, 0, offset) for offset in range(stored.offset, end or part.position or 0)]
    return {record.offset for record in successor.unsettled(records)}


def test_unselected_records_stay_for_other_members(world: World) -> None:
    one = world.join(Sink(), selects=b"a", queue=True)
    world.read(*"abcab")
    assert (one.offsets, world.dispatch.unwanted) == ([0, 3], 0)
    for record in list(one.held):
        one.done(record)
    assert world.committable == 1
    assert open_of(world.parts[0]) == {1, 2, 4}
    two = world.join(Sink(1), selects=b"b", queue=True)
    world.log.turn()
    assert two.offsets == [1]
    world.read("b", "a")  # while the second is behind
    assert (one.offsets, two.offsets) == ([0, 3, 6], [1])
    for _ in range(2):
        two.done(two.held[0])
        world.log.turn()
    assert two.offsets == [1, 4, 5]  # in order
    two.done(two.held[0])
    world.log.turn()
    assert two.member.behind == {}
    world.read("b")
    assert two.offsets == [1, 4, 5, 7]  # at the head of the log again
    assert open_of(world.parts[0]) == {2, 6, 7}


def test_a_receiver_without_capacity_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that wait for it beyond the limit are left in the log, and come in order when it has capacity."""
    monkeypatch.setattr(ready, "WAITING_RECORDS", 4)
    world = World()
    slow, quick = world.join(Sink(1), selects=b"a", queue=True), world.join(Sink(), selects=b"b", queue=True)
    for _ in range(10):
        world.read("a", "b")
        assert world.dispatch.demand > 0
    assert quick.offsets == list(range(1, 20, 2))
    assert slow.offsets == [0]
    for _ in range(9):
        slow.done(slow.held[0])
        world.dispatch.push()
        world.log.turn()
    assert slow.offsets == list(range(0, 20, 2))


def test_a_returned_record_without_a_member_keeps_its_attempts(world: World) -> None:
    one, other = world.join(Sink(), selects=b"a", queue=True), world.join(Sink(), selects=b"b", queue=True)
    world.read("a")
    world.dispatch.remove(one.member)
    world.dispatch.push()
    assert (world.committable, open_of(world.parts[0]), other.got) == (0, {0}, [])
    again = world.join(Sink(), selects=b"a", queue=True)
    world.log.turn()
    assert tries(again.member, again.held[0])[0] == 1
    again.done(again.held[0])
    assert world.committable == 1
    assert world.parts[0].tries == {}


def test_records_deleted_by_retention_are_not_awaited(world: World) -> None:
    world.join(Sink(), selects=b"a", queue=True)
    world.read(*"bbbb")
    assert world.committable == 0
    del world.log.records[:2]
    two = world.join(Sink(), selects=b"b", queue=True)
    world.log.turn()
    assert (two.offsets, world.dispatch.catch_up.expired, world.committable) == ([2, 3], 2, 2)


def test_a_successor_reads_only_open_records(world: World) -> None:
    one = world.join(Sink(), selects=b"a", queue=True)
    world.read(*"babab")
    for record in list(one.held):
        one.done(record)
    stored = world.parts[0].committable()
    assert stored is not None
    assert stored.offset == 0
    later = World()
    later.parts = [AssignedPartition(PARTITION, stored.offset, stored)]
    later.dispatch.set_assignment(later.parts)
    two = later.join(Sink(), selects=b"b", queue=True)
    later.read(*"ba")
    two.done(two.held[0])
    assert open_of(later.parts[0], 5) == {2, 4}  # though they have not been read again
    later.read(*"babbc")
    assert two.offsets == [0, 2, 4, 5]


def test_records_that_a_successor_skips_are_passed(world: World) -> None:
    one = world.join(Sink(), selects=b"a", queue=True)
    world.read(*"ba")
    one.done(one.held[0])
    stored = world.parts[0].committable()
    later = World()
    later.parts = [AssignedPartition(PARTITION, 0, stored)]
    later.dispatch.set_assignment(later.parts)
    two = later.join(Sink(), selects=b"b", queue=True)
    later.dispatch.take(world.log.records, later.parts[0])
    later.dispatch.push()
    two.done(two.held[0])
    assert later.committable == 2


def test_records_settled_by_one_owner_are_not_delivered_by_the_next(world: World) -> None:
    world.join(Sink(2))
    two = world.join(Sink(2))
    world.read(*"aaa")
    two.done(two.held[-1])
    assert open_of(world.parts[0]) == (opened := {0, 1, 2} - {two.offsets[-1]})
    for _ in range(2):  # the second one knows it only from the first
        stored = world.parts[0].committable()
        later = World()
        later.parts = [AssignedPartition(PARTITION, 0, stored)]
        later.dispatch.set_assignment(later.parts)
        later.dispatch.take(world.log.records, later.parts[0])
        later.parts[0].position = 3
        assert open_of(later.parts[0]) == opened
        world.parts = later.parts


QUEUE_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.sampled_from([b"a", b"b", b"c"])),
        st.tuples(st.just("join"), st.sampled_from([b"a", b"b", b""])),
        st.tuples(st.sampled_from(["leave", "done", "again", "decline"]), st.integers(0, 50)),
        st.tuples(st.sampled_from(["turn", "restart"]), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(QUEUE_ACTIONS, st.integers(1, 4))
def test_every_record_of_a_queue_is_settled_once(actions: list[tuple[str, Any]], waiting: int) -> None:
    """A receiver that selects it settles it, whatever happens; a successor gets exactly the open records."""
    settled: Counter[int] = Counter()
    world = World()
    sinks: list[Sink] = []

    def finish(sink: Sink) -> None:
        settled[sink.held[0].offset] += 1
        sink.done(sink.held[0])

    def join(key: bytes, capacity: int = 2) -> None:
        sinks.append(world.join(Sink(capacity), selects=key, queue=True))
        sinks[-1].key = key

    def restart() -> World:
        stored, end = world.parts[0].committable(), world.next[0]
        assert stored is not None
        successor = World()
        successor.parts = [AssignedPartition(PARTITION, stored.offset, stored)]
        successor.dispatch.set_assignment(successor.parts)
        successor.next[0] = end
        successor.dispatch.take([one for one in world.log.records if one.offset >= stored.offset], successor.parts[0])
        successor.parts[0].position = end
        successor.log.records = world.log.records
        return successor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ready, "WAITING_RECORDS", waiting)
        patch.setattr(redelivery, "AT_ONCE", 100)  # there is no event loop for the pauses of members
        join(b"a")
        for action, argument in actions:
            if action == "read":
                world.read(argument.decode())
            elif action == "join":
                join(argument)
            elif action == "turn":
                world.log.turn()
            elif action == "restart":
                keys = [sink.key for sink in sinks]
                world, sinks = restart(), []
                for key in keys:
                    join(key)
            elif action == "leave" and len(sinks) > 1:
                world.dispatch.remove(sinks.pop(argument % len(sinks)).member)
            elif action != "leave" and sinks[argument % len(sinks)].held:
                sink = sinks[argument % len(sinks)]
                if action == "done":
                    finish(sink)
                elif action == "again":
                    sink.capacity += 1
                    world.dispatch.requeue(sink.member, sink.held.pop(), failed=True, at_once=True)
                else:
                    sink.capacity += 1
                    world.dispatch.decline(sink.member, sink.held.pop())
            world.dispatch.push()
            held = Counter(record.offset for sink in sinks for record in sink.held)
            assert all(count == 1 for count in held.values())
            assert all(sink.key in (b"", record.key) for sink in sinks for record in sink.held)
            read = range(world.next[0])
            assert open_of(world.parts[0]) == {offset for offset in read if offset not in settled}
        join(b"", capacity=1_000)
        for _ in range(len(actions) + 3):
            world.dispatch.push()
            world.log.turn()
            for sink in sinks:
                while sink.held:
                    finish(sink)
    assert settled == Counter(range(world.next[0]))
    assert world.committable == world.next[0]
    part = world.parts[0]
    assert (len(part.unselected), part.in_flight, part.tries) == (0, set(), {})
    assert (world.dispatch.held, world.dispatch.ready.records, world.log.readings) == (0, 0, [])


async def test_a_full_member_is_asked_once_until_it_is_woken() -> None:
    class Counting(Sink):
        asked = 0

        @property
        def demand(self) -> int:
            Counting.asked += 1
            return self.capacity

    world = World()
    idle = [world.join(Counting(capacity=0)) for _ in range(1000)]
    busy = world.join(Sink(capacity=3))
    assert [world.dispatch.demand for _ in range(50)] == [3] * 50
    assert Counting.asked == 1000
    world.read("k", "k", "k", "k", "k")
    world.dispatch.push()
    assert busy.offsets == [0, 1, 2]
    idle[500].capacity = 10
    world.dispatch.wake(idle[500].member)
    assert world.dispatch.demand == 10
    world.dispatch.push()
    assert idle[500].offsets == [3, 4]


def test_adding_or_removing_a_filter_costs_the_same_however_many_there_are() -> None:
    world = World()
    world.dispatch.add(Sink(), ["t"], None)

    def add(number: int) -> Any:
        return world.dispatch.add(Sink(), [f"t{number % 3}", "t"], SubscriptionFilter(Everything(), number))

    first = steps(lambda: add(0))
    members = [add(number) for number in range(1, 300)]
    assert steps(lambda: members.append(add(300))) <= first + 10
    assert world.dispatch.topics == {"t", "t0", "t1", "t2"}
    many = steps(lambda: world.dispatch.remove(members.pop()))
    while len(members) > 1:
        world.dispatch.remove(members.pop())
    assert many <= steps(lambda: world.dispatch.remove(members.pop())) + 10
    assert world.dispatch.topics == {"t", "t0"}


def test_a_record_costs_a_member_without_runs_the_same_however_many_wait() -> None:
    def cost(waiting: int) -> int:
        world = World()
        sink = world.join(Sink(waiting))
        world.read_run([b"k"] * waiting)
        work = steps(world.dispatch.push)
        assert len(sink.got) == waiting
        return work // waiting

    assert cost(400) <= cost(20)


def test_a_held_record_that_retention_deletes_is_settled_as_others(world: World) -> None:
    world.join(Sink(), selects=b"a", queue=True)
    world.read(*"bbb")
    late = world.join(Sink(2), queue=True)
    world.log.turn()
    assert late.offsets == [0, 1]
    world.dispatch.catch_up.note_deleted(world.parts[0], 0, 3)
    assert (world.dispatch.catch_up.expired, world.committable) == (1, 0)
    late.done(late.held[0])
    world.dispatch.remove(late.member)
    world.dispatch.push()
    world.dispatch.catch_up.note_deleted(world.parts[0], 0, 3)
    assert (world.dispatch.catch_up.expired, world.committable) == (2, 3)


def test_attempts_of_deleted_records_leave_room_for_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "TRIES_LIMIT", 2)
    world.join(Sink(), selects=b"a", queue=True)
    for _ in range(2):
        world.read("b", "b")
        short = world.join(Sink(), selects=b"b", queue=True)
        world.log.turn()
        world.dispatch.remove(short.member)
        world.dispatch.push()
        again = world.join(Sink(), selects=b"b", queue=True)
        world.log.turn()
        assert [tries(again.member, record) for record in again.held] == [(1, 1)] * 2
        world.dispatch.remove(again.member)
        world.dispatch.push()
        world.dispatch.catch_up.note_deleted(world.parts[0], 0, world.next[0])
        world.log.records.clear()


def test_a_member_that_leaves_during_a_rebalance_ends_the_wait_for_its_records(world: World) -> None:
    sink = world.join(Sink())
    world.read("a")
    world.dispatch.suspended = True
    world.dispatch.remove(sink.member)
    assert not world.dispatch.held
    assert world.dispatch.returned.is_set()


async def test_a_record_from_the_log_whose_offer_fails_is_tried_again(world: World) -> None:
    world.join(Sink(), selects=b"x", queue=True)
    world.read(*"aaa")
    sink = world.join(Failing(), queue=True)
    with contextlib.suppress(RuntimeError):
        world.log.turn()
    assert (sink.offsets, list(sink.member.held.values())) == ([0, 1], list(map(sink.member.delivery, sink.held)))
    assert world.dispatch.delayed == 1
    world.dispatch.close()


async def test_a_transaction_commits_nothing_of_a_partition_that_was_lost_while_it_waited(world: World) -> None:
    sink = world.join(Sink())
    world.read("a")
    delivery = sink.member.delivery(sink.held[0])
    commits = Commits("g", world.dispatch, None, lambda: None, Bucket(1, 1, 0))

    async def commit() -> None:
        async with commits.committing({delivery.assigned: {0}}):
            raise AssertionError("it is another member's now")

    async with commits.lock:  # as during a rebalance
        committing = asyncio.create_task(commit())
        await asyncio.sleep(0)
        world.dispatch.set_assignment(())
    with pytest.raises(KafkaError):
        await committing
