from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from gateway.kafka.contracts import Refused
from gateway.kafka.groups import reader as group_reader
from mapping.outcomes import Outcome
from mapping.record import Received


@pytest.fixture
def group() -> str:
    return f"g-{uuid.uuid4().hex[:12]}"


async def fill(
    producer: AIOKafkaProducer, topic: str, count: int, partitions: int = 3, key: bytes | None = None
) -> None:
    for number in range(count):
        await producer.send(topic, b"%d" % number, key=key, partition=number % partitions)
    await producer.flush()


async def committed(servers: str, group: str, topic: str, partitions: int = 3) -> list[int | None]:
    """The committed offsets, at which a native consumer of the group would start."""
    parts = [TopicPartition(topic, number) for number in range(partitions)]
    async with AIOKafkaConsumer(bootstrap_servers=servers, group_id=group, enable_auto_commit=False) as consumer:
        consumer.assign(parts)
        return [await consumer.committed(part) for part in parts]


async def join(readers, group, topics, holder, **options):
    holder.membership = await readers.groups.join(group, topics, holder, **options)
    return holder


async def test_two_subscribers_share_the_partitions_of_one_consumer(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=4)
    await fill(producer, topic, 4000, partitions=4)
    first = await join(readers, group, [topic], readers.Holder(50))
    second = await join(readers, group, [topic], readers.Holder(50))
    (statistics,) = readers.groups.statistics()
    assert (statistics.subscribers, statistics.rebalances) == (2, 1)
    seen = []
    while len(seen) < 4000:
        assert len(first.held) <= 50
        assert len(second.held) <= 50
        seen += first.settle() + second.settle()
        await asyncio.sleep(0)
    assert len({(record.partition, record.offset) for record in seen}) == 4000
    assert len(first.got) > 1000
    assert len(second.got) > 1000
    (statistics,) = readers.groups.statistics()
    assert statistics.unsettled == 0
    await first.membership.leave()
    await second.membership.leave()
    assert readers.groups.statistics() == ()
    assert await committed(readers.bootstrap, group, topic, 4) == [1000] * 4


async def test_order_holds_while_subscribers_have_capacity(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=3)
    holders = [await join(readers, group, [topic], readers.Holder()) for _ in range(3)]
    await fill(producer, topic, 3000, key=b"k")
    await readers.wait_until(lambda: sum(len(holder.got) for holder in holders) == 3000)
    for holder in holders:
        assert len(holder.by_partition()) == 1  # one partition each
        holder.check_complete(1000)


async def test_only_the_contiguous_settled_prefix_is_committed(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=1)
    holder = await join(readers, group, [topic], readers.Holder())
    await fill(producer, topic, 20, partitions=1)
    await readers.wait_until(lambda: len(holder.held) == 20)
    for number in (0, 1, 2, 4, 5, 19):
        holder.membership.done(holder.held[number])
    await readers.wait_until(lambda: readers.groups.statistics()[0].committed.get(topic) == {0: 3})
    assert await committed(readers.bootstrap, group, topic, 1) == [3]
    holder.membership.done(holder.held[3])
    await readers.wait_until(lambda: readers.groups.statistics()[0].committed.get(topic) == {0: 6})
    assert await committed(readers.bootstrap, group, topic, 1) == [6]
    await holder.membership.leave()
    assert await committed(readers.bootstrap, group, topic, 1) == [6]


async def test_a_busy_group_commits_once_a_second(readers, producer, new_topic, group) -> None:
    """After its first commits, which may pass few records, and so are early."""
    topic = await new_topic(partitions=1)
    holder = await join(readers, group, [topic], readers.Holder(500))
    await fill(producer, topic, 10_000, partitions=1)
    taken = 0
    before = readers.groups.statistics()[0].commits
    start = time.monotonic()
    while taken < 10_000:
        taken += len(holder.settle())
        await asyncio.sleep(0)
    commits = readers.groups.statistics()[0].commits - before
    assert commits <= 3 + time.monotonic() - start


async def test_records_of_a_leaving_subscriber_go_to_the_others_immediately(
    readers, producer, new_topic, group
) -> None:
    topic = await new_topic(partitions=2)
    leaving = await join(readers, group, [topic], readers.Holder(60))
    await fill(producer, topic, 100, partitions=2)
    await readers.wait_until(lambda: len(leaving.held) == 60)
    settled = leaving.settle(10)
    await readers.wait_until(lambda: len(leaving.held) == 60)
    staying = await join(readers, group, [topic], readers.Holder())
    held = list(leaving.held)
    await leaving.membership.leave()
    await readers.wait_until(lambda: len(staying.got) == 90)
    again = [record for record in staying.got if record in held]
    for partition in (0, 1):
        assert [r for r in again if r.partition == partition] == [r for r in held if r.partition == partition]
    assert len(again) == 60
    assert {staying.membership.attempts(record) for record in again} == {1}
    assert {staying.membership.attempts(record) for record in staying.got if record not in held} == {0}
    leaving.membership.done(held[0])  # too late: another member holds it
    assert readers.groups.statistics()[0].late == 1
    assert readers.groups.statistics()[0].unsettled == 90
    staying.settle()
    await staying.membership.leave()
    assert await committed(readers.bootstrap, group, topic, 2) == [50, 50]
    assert len(settled) == 10


async def test_the_last_subscriber_leaves_the_group_to_others(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=1)
    await fill(producer, topic, 10, partitions=1)
    holder = await join(readers, group, [topic], readers.Holder())
    await readers.wait_until(lambda: len(holder.held) == 10)
    holder.settle(4)
    await holder.membership.leave()
    await holder.membership.leave()  # once is enough
    native = AIOKafkaConsumer(
        topic,
        bootstrap_servers=readers.bootstrap,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    async with native, asyncio.timeout(9):  # not a session time-out later, which is 10 s
        assert [(await native.getone()).offset for _ in range(6)] == [4, 5, 6, 7, 8, 9]


async def test_records_given_back_come_again_after_a_back_off(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=1)
    holder = await join(readers, group, [topic], readers.Holder())
    await fill(producer, topic, 3, partitions=1)
    await readers.wait_until(lambda: len(holder.held) == 3)
    first, second, third = holder.held
    clock = asyncio.get_running_loop().time
    start = clock()
    delays = []
    for attempt in range(3):
        assert holder.membership.attempts(second) == attempt
        holder.membership.requeue(second)
        holder.membership.requeue(second)  # no longer held: late
        await readers.wait_until(lambda wanted=4 + attempt: len(holder.got) == wanted)
        assert holder.got[-1] is second
        delays.append(clock() - start)
        start = clock()
    for delay, least in zip(delays, (0.08, 0.16, 0.32), strict=True):
        assert delay >= least
    holder.membership.requeue(second, failed=False)
    await readers.wait_until(lambda: len(holder.got) == 7)
    assert holder.membership.attempts(second) == 3
    statistics = readers.groups.statistics()[0]
    assert (statistics.redelivered, statistics.late, statistics.unsettled) == (4, 3, 3)
    for record in (first, second, third):
        holder.membership.done(record)
    assert readers.groups.statistics()[0].unsettled == 0


async def test_a_subscriber_settles_and_leaves_during_an_offer(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=1)

    class AtOnce(readers.Sink):
        def offer_nowait(self, record, context=None) -> bool:
            super().offer_nowait(record, context)
            self.membership.done(record)
            return True

    sink = await join(readers, group, [topic], AtOnce())
    await fill(producer, topic, 1000, partitions=1)
    await readers.wait_until(lambda: len(sink.got) == 1000)
    await sink.membership.leave()
    assert await committed(readers.bootstrap, group, topic, 1) == [1000]


async def test_without_capacity_reading_pauses_and_the_membership_stays(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=2)
    holder = await join(readers, group, [topic], readers.Holder(5))
    await fill(producer, topic, 5000, partitions=2)
    await readers.wait_until(lambda: len(holder.held) == 5)
    reader = next(iter(readers.groups._readers.values()))
    await readers.wait_until(lambda: len(reader._consumer.paused()) == 2)  # stalled long enough
    await readers.wait_until(lambda: reader._woken.is_set() or reader._paused)
    assert len(holder.held) == 5
    assert readers.groups.statistics()[0].unsettled <= 5 + 500  # at most one chunk more than requested
    taken = 0
    while taken < 5000:
        taken += len(holder.settle())
        await asyncio.sleep(0)
    holder.check_complete(5000)
    assert readers.groups.statistics()[0].rebalances == 1


async def test_a_record_that_is_never_settled_stops_its_partition_in_the_end(
    readers, producer, new_topic, group, monkeypatch
) -> None:
    monkeypatch.setattr(group_reader, "SPAN", 1000)
    topic = await new_topic(partitions=2)
    await fill(producer, topic, 6000, partitions=2)
    holder = await join(readers, group, [topic], readers.Holder())
    stuck: list[Received] = []

    def settle_but_the_first() -> None:
        for record in holder.held:
            if record.partition == 0 and record.offset == 0:
                stuck.append(record)
            else:
                holder.membership.done(record)
        holder.held.clear()

    def is_stalled() -> bool:
        """Whether only the partition of the first record is stalled: the other may be too until the next check."""
        settle_but_the_first()
        read = holder.by_partition()
        done = len(read[topic, 1]) == 3000 and len(read[topic, 0]) > 1000
        return done and bool(stuck) and readers.groups.statistics()[0].stalled == 1

    await readers.wait_until(is_stalled)
    behind = len(holder.by_partition()[topic, 0])
    assert 1000 <= behind <= 1000 + 500
    holder.membership.done(stuck[0])
    await readers.wait_until(lambda: settle_but_the_first() or len(holder.got) == 6000)
    holder.check_complete(6000)
    await readers.wait_until(lambda: readers.groups.statistics()[0].stalled == 0)


async def test_two_processes_share_the_group_and_hand_over_cleanly(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=4)
    other = readers.another()
    here = await join(readers, group, [topic], readers.Holder(20))
    counts: Counter[tuple[int, int]] = Counter()
    flowing = True

    async def flow() -> None:
        number = 0
        while flowing:
            await producer.send(topic, b"%d" % number, partition=number % 4)
            number += 1
            await asyncio.sleep(0.001)

    async def work(holder) -> None:
        while flowing:
            counts.update((record.partition, record.offset) for record in holder.settle())
            await asyncio.sleep(0.002)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(flow())
        tasks.create_task(work(here))
        there = readers.Holder(20)
        there = await join(other, group, [topic], there)
        tasks.create_task(work(there))
        await readers.wait_until(lambda: len(there.got) > 100 and len(here.got) > 100)
        assert len(there.by_partition()) == 2  # half of them each
        flowing = False
    await producer.flush()
    await there.membership.leave()
    end = 0
    async with AIOKafkaConsumer(bootstrap_servers=readers.bootstrap) as native:
        ends = await native.end_offsets([TopicPartition(topic, number) for number in range(4)])
        end = sum(ends.values())

    def drained() -> bool:
        counts.update((record.partition, record.offset) for record in here.settle())
        return len(counts) == end

    await readers.wait_until(drained)
    # Everything was settled before the partitions moved, so only the records that `there` held at the end came twice.
    assert sum(counts.values()) - len(counts) <= 20
    await other.stop()


async def test_a_killed_member_s_records_come_to_the_others(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=2)
    other = readers.another(session_timeout_ms=6000)
    victim = await join(other, group, [topic], readers.Holder())
    await fill(producer, topic, 100, partitions=2)
    await readers.wait_until(lambda: len(victim.held) == 100)
    victim.settle(20)
    reader = next(iter(other.groups._readers.values()))
    await readers.wait_until(lambda: sum(reader.statistics().committed.get(topic, {}).values()) == 20)
    # As a crash would: no close, no commit; the coordinator finds out by the missing heartbeats.
    coordinator = reader._consumer._coordinator
    for task in (coordinator._heartbeat_task, coordinator._coordination_task, *reader._tasks):
        task.cancel()
    heir = await join(readers, group, [topic], readers.Holder())
    await readers.wait_until(lambda: len(heir.held) == 80)
    lost = {(record.partition, record.offset) for record in victim.held}
    assert {(record.partition, record.offset) for record in heir.held} == lost
    heir.settle()
    await heir.membership.leave()
    assert await committed(readers.bootstrap, group, topic, 2) == [50, 50]
    other.groups._readers.clear()
    reader._consumer._coordinator.generation = -1  # so that it cannot leave the group
    reader._tasks = []
    await reader.close()
    await other.stop()


async def test_a_rebalance_moves_no_more_than_it_must(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=2)
    quick = readers.another(revoke_wait_s=0.2)
    holder = await join(quick, group, [topic], readers.Holder())
    await fill(producer, topic, 10, partitions=2)
    await readers.wait_until(lambda: len(holder.held) == 10)
    old = list(holder.held)
    other = await join(readers, group, [topic], readers.Holder())
    await readers.wait_until(lambda: len(other.held) == 5)
    (moved,) = other.by_partition()
    for record in old:
        holder.membership.done(record)
    (statistics,) = quick.groups.statistics()
    # The partition that stayed was not read again, and the subscriber still held its records.
    assert (statistics.late, statistics.unsettled, statistics.rebalances) == (5, 0, 2)
    assert holder.got == old
    await fill(producer, topic, 10, partitions=2)
    await readers.wait_until(lambda: len(holder.got) == 15 and len(other.got) == 10)
    assert {(record.topic, record.partition) for record in holder.got[10:]}.isdisjoint({moved})
    holder.settle()
    other.settle()
    await quick.stop()
    await other.membership.leave()
    assert await committed(readers.bootstrap, group, topic, 2) == [10, 10]


async def test_a_native_consumer_is_a_member_like_any_other(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=2)
    holder = await join(readers, group, [topic], readers.Holder())
    native = AIOKafkaConsumer(
        topic,
        bootstrap_servers=readers.bootstrap,
        group_id=group,
        auto_offset_reset="earliest",
        partition_assignment_strategy=(RangePartitionAssignor,),
    )
    async with native:
        await readers.wait_until(lambda: readers.groups.statistics()[0].rebalances == 2)
        await fill(producer, topic, 100, partitions=2)
        got = []
        while len(got) < 50:
            for records in (await native.getmany(timeout_ms=1000)).values():
                got += records
        await readers.wait_until(lambda: len(holder.held) == 50)
        assert {record.partition for record in got}.isdisjoint(record.partition for record in holder.held)
        holder.settle()


async def test_a_member_without_partitions_waits_for_its_turn(readers, producer, new_topic, group) -> None:
    topic = await new_topic(partitions=1)
    other = readers.another()
    one = await join(readers, group, [topic], readers.Holder())
    two = await join(other, group, [topic], readers.Holder())
    await fill(producer, topic, 10, partitions=1)
    await readers.wait_until(lambda: len(one.held) + len(two.held) == 10)
    (busy, _), (idle, _) = sorted([(one, readers), (two, other)], key=lambda pair: -len(pair[0].held))
    assert idle.held == []
    busy.settle()
    await busy.membership.leave()
    await fill(producer, topic, 10, partitions=1)
    await readers.wait_until(lambda: len(idle.held) == 10)
    assert [record.offset for record in idle.held] == list(range(10, 20))
    await other.stop()


@pytest.mark.parametrize("case", [("earliest", 0), ("latest", 10)])
async def test_where_a_new_group_begins(readers, producer, new_topic, group, case) -> None:
    reset, first = case
    topic = await new_topic(partitions=1)
    await fill(producer, topic, 10, partitions=1)
    holder = await join(readers, group, [topic], readers.Holder(), offset_reset=reset)
    reader = next(iter(readers.groups._readers.values()))
    await reader._consumer.position(TopicPartition(topic, 0))  # `latest` is fixed by now
    await fill(producer, topic, 10, partitions=1)
    await readers.wait_until(lambda: len(holder.got) == 20 - first)
    assert holder.got[0].offset == first


@pytest.mark.parametrize("seed", [1, 2])
async def test_at_least_once_whatever_subscribers_do(readers, producer, new_topic, group, seed) -> None:
    rng = random.Random(seed)
    topic = await new_topic(partitions=3)
    await fill(producer, topic, 3000)
    holders = [await join(readers, group, [topic], readers.Holder(rng.randrange(1, 80))) for _ in range(4)]
    settled: Counter[tuple[int, int]] = Counter()
    given_back: Counter[tuple[int, int]] = Counter()

    def step() -> bool:
        for holder in holders:
            rng.shuffle(holder.held)
            if rng.random() < 0.2 and holder.held:
                last = holder.held[-1].partition, holder.held[-1].offset
                given_back[last] += 1
                if given_back[last] <= 5:  # each time it comes back later: after nine times, in a minute
                    holder.membership.requeue(holder.held.pop())
                    holder.capacity += 1
            done = holder.settle(rng.randrange(len(holder.held) + 1))
            settled.update((record.partition, record.offset) for record in done)
        return len(settled) == 3000

    for _ in range(5):
        for _ in range(20):
            step()
            await asyncio.sleep(0)
        leaving = holders.pop(rng.randrange(len(holders)))
        await leaving.membership.leave()
        holders.append(await join(readers, group, [topic], readers.Holder(rng.randrange(1, 80))))
    await readers.wait_until(step)
    assert set(settled.values()) == {1}  # within one process a settled record never comes again
    await readers.groups.stop()
    assert await committed(readers.bootstrap, group, topic) == [1000] * 3


async def test_invalid_joins_are_refused(readers, new_topic, group) -> None:
    topic = await new_topic(partitions=1)
    for name, topics, outcome in [
        ("", [topic], Outcome.UNFIT),
        (group, [], Outcome.UNFIT),
        (group, ["no-such-topic"], Outcome.UNKNOWN_TOPIC),
        (group, [topic, "__consumer_offsets"], Outcome.DENIED),
    ]:
        with pytest.raises(Refused) as refused:
            await readers.groups.join(name, topics, readers.Holder())
        assert refused.value.outcome is outcome
    assert readers.groups.statistics() == ()


async def test_a_group_with_another_assignor_is_refused(readers, new_topic, group) -> None:
    topic = await new_topic(partitions=1)
    native = AIOKafkaConsumer(topic, bootstrap_servers=readers.bootstrap, group_id=group)  # round robin only
    async with native:
        with pytest.raises(Refused, match="members that do not know Kafka's assignor") as refused:
            await readers.groups.join(group, [topic], readers.Holder())
        assert refused.value.outcome is Outcome.BROKEN
