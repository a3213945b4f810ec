"""Joins end though a member elsewhere delays the rebalance, and a cancelled leave still leaves the group."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Collection, Hashable, Iterable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from gateway.kafka.contracts import Refused
from gateway.kafka.driver import kafka_consumer
from gateway.kafka.groups.delivery.assignment import SubscriptionFilter
from mapping.outcomes import Outcome
from mapping.record import Received


@pytest.fixture
def group() -> str:
    return f"g-{uuid.uuid4().hex[:12]}"


class SlowListener(ConsumerRebalanceListener):  # type: ignore[misc]
    """A live member that takes part in a rebalance only when it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.assigned = asyncio.Event()

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        if list(revoked):
            await self.released.wait()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self.assigned.set()


@contextlib.asynccontextmanager
async def slow_member(servers: str, group: str, topic: str) -> AsyncIterator[SlowListener]:
    """Run a native member of a group that has partitions and this listener."""
    listener = SlowListener()
    native = AIOKafkaConsumer(
        bootstrap_servers=servers,
        group_id=group,
        rebalance_timeout_ms=120_000,
        heartbeat_interval_ms=500,
        partition_assignment_strategy=(RangePartitionAssignor,),
    )
    native.subscribe([topic], listener=listener)
    async with native:
        await listener.assigned.wait()
        yield listener
        listener.released.set()


class Everything:
    """A selector for one subscription filter."""

    def select(self, record: Received) -> Collection[Hashable]:
        return ("all",)

    def forget(self, name: Hashable) -> None:
        assert name == "all"


async def refused_in_time(work: Any, within: float = 40.0) -> None:
    start = time.monotonic()
    with pytest.raises(Refused) as refused:
        await work
    assert refused.value.outcome is Outcome.BUSY
    assert time.monotonic() - start < within


async def members(admin: AIOKafkaAdminClient, group: str) -> int:
    """Return how many members a group has in Kafka."""
    (answer,) = await admin.describe_consumer_groups([group])
    ((_, _, _, _, _, found, *_),) = answer.groups
    return len(found)


async def test_a_join_that_others_hold_up_is_refused_and_may_be_tried_again(
    readers, producer, new_topic, group
) -> None:
    topic = await new_topic(partitions=2)
    here = readers.another(join_timeout_s=1.0)
    async with slow_member(here.bootstrap, group, topic) as listener:
        holders = [readers.Holder() for _ in range(3)]
        await asyncio.gather(*(refused_in_time(here.groups.join(group, [topic], holder)) for holder in holders))
        given_up = here.spawn(here.groups.join(group, [topic], holders[0]))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up], timeout=20)
        assert given_up.cancelled()
        await readers.wait_until(lambda: not here.groups.statistics())
        listener.released.set()

        async def joined() -> bool:
            with contextlib.suppress(Refused):
                holders[0].membership = await here.groups.join(group, [topic], holders[0])
            return holders[0].membership is not None

        async with asyncio.timeout(60):
            while not await joined():
                pass
    for number in range(20):
        await producer.send(topic, b"%d" % number, partition=number % 2)
    await producer.flush()
    await readers.wait_until(lambda: len(holders[0].held) == 20)
    await here.stop()


async def test_a_slow_change_of_topics_delays_no_join(readers, producer, new_topic, group) -> None:
    """A change of a filter's topics, which no join waits for, delays neither joins nor leaves."""
    topics = [await new_topic(partitions=2) for _ in range(2)]
    here = readers.another(join_timeout_s=1.0)
    subscription_filter = SubscriptionFilter(Everything(), "all")
    staying, leaving, late = (readers.Holder() for _ in range(3))
    async with slow_member(here.bootstrap, group, topics[0]) as listener:
        listener.released.set()  # until we are in
        for holder in (staying, leaving):
            async with asyncio.timeout(60):
                while holder.membership is None:
                    with contextlib.suppress(Refused):
                        holder.membership = await here.groups.join(
                            group, topics[:1], holder, subscription_filter=subscription_filter
                        )
        listener.assigned.clear()
        listener.released.clear()
        here.groups.change_topics(group, subscription_filter, topics)
        await readers.wait_until(lambda: here.groups.statistics()[0].topics == tuple(sorted(topics)))
        await refused_in_time(here.groups.join(group, topics, late, subscription_filter=subscription_filter))
        async with asyncio.timeout(40):
            await leaving.membership.leave()
        listener.released.set()
        for topic in topics:
            for number in range(20):
                await producer.send(topic, b"%d" % number, partition=number % 2)
        await producer.flush()
    await readers.wait_until(
        lambda: len({(one.topic, one.partition, one.offset) for one in staying.got}) == 40, timeout=60
    )
    async with asyncio.timeout(40):
        await here.stop()


async def test_a_cancelled_leave_still_leaves(readers, admin, new_topic, group) -> None:
    topic = await new_topic(partitions=2)
    membership = await readers.groups.join(group, [topic], readers.Holder())
    assert await members(admin, group) == 1
    leaving = readers.spawn(membership.leave())
    await asyncio.sleep(0)
    leaving.cancel()
    async with asyncio.timeout(20):
        while await members(admin, group):
            pass
    await asyncio.wait([leaving], timeout=20)
    assert leaving.cancelled()


async def test_joins_are_refused_while_the_gateway_stops(readers, new_topic, group) -> None:
    topic = await new_topic(partitions=1)
    here = readers.another()
    joining = here.spawn(here.groups.join(group, [topic], readers.Holder()))
    await asyncio.sleep(0)
    await here.groups.stop()
    with pytest.raises(Refused) as refused:
        await joining
    assert refused.value.outcome is Outcome.BUSY
    joining.exception()
    here.tasks.discard(joining)
    await here.stop()


async def test_a_join_is_not_lost_with_a_cancelled_one_of_the_same_topic(
    readers, producer, new_topic, group, monkeypatch
) -> None:
    monkeypatch.setattr(kafka_consumer, "_METADATA_RETRY_S", 1.0)  # the time in which one is cancelled
    topics = [await new_topic(partitions=1) for _ in range(2)]
    first, given_up, second = (readers.Holder() for _ in range(3))
    first.membership = await readers.groups.join(group, topics[:1], first)
    cancelled = readers.spawn(readers.groups.join(group, topics[1:], given_up))
    reader = readers.groups._readers[group]
    await readers.wait_until(lambda: topics[1] in reader.topics)
    joining = readers.spawn(readers.groups.join(group, topics[1:], second))
    await asyncio.sleep(0)
    cancelled.cancel()
    async with asyncio.timeout(20):
        second.membership = await joining
    await producer.send_and_wait(topics[1], b"one")
    await readers.wait_until(lambda: second.values == [b"one"])


async def test_a_given_up_join_at_the_end_moves_no_later_one(readers, producer, new_topic, group) -> None:
    topics = [await new_topic(partitions=1) for _ in range(2)]
    await producer.send_and_wait(topics[1], b"early")
    first, given_up, second = (readers.Holder() for _ in range(3))
    first.membership = await readers.groups.join(group, topics[:1], first)
    reader = readers.groups._readers[group]
    async with reader._changing:  # as during another join
        cancelled = readers.spawn(readers.groups.join(group, topics[1:], given_up, offset_reset="latest"))
        await readers.wait_until(lambda: given_up in reader.members)
        cancelled.cancel()
        await asyncio.wait([cancelled])
    second.membership = await readers.groups.join(group, topics[1:], second)
    await readers.wait_until(lambda: second.values == [b"early"])
