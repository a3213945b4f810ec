"""Closing a consumer that has just started, where aiokafka awaits tasks that it cancelled before their first step; and
cancelling a start, where aiokafka leaks a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaConnectionError, KafkaError

from gateway.kafka.cluster.cluster_admin import ClusterAdmin
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.kafka_consumer import close_consumer
from gateway.kafka.driver.lifecycle import OnDemand, start_client, start_consumer
from gateway.kafka.groups.member_starts import MemberStarts
from gateway.kafka.groups.polled_member import MemberSettings, PolledMember
from gateway.kafka.read.arrivals import Arrivals
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.kafka.read.live_reader import LiveReader
from gateway.runtime.spawn import Spawn, Tasks
from gateway.settings.config import KafkaConfig


async def started(bootstrap: str) -> AIOKafkaConsumer:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None, auto_offset_reset="none")
    await consumer.start()
    return consumer


async def test_closing_a_new_consumer_cancels_no_other_task(bootstrap: str) -> None:
    ended = []

    async def reader() -> None:
        consumer = await started(bootstrap)
        consumer.assign([])
        await close_consumer(consumer)
        ended.append("as it should")

    async with asyncio.TaskGroup() as group:
        group.create_task(reader())
    assert ended == ["as it should"]


async def test_a_closing_that_is_cancelled_ends(bootstrap: str) -> None:
    consumer = await started(bootstrap)
    closing = asyncio.create_task(close_consumer(consumer))
    asyncio.get_running_loop().call_soon(closing.cancel)  # after its first step
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    assert closing.cancelled()
    await close_consumer(consumer)


@pytest.mark.parametrize("turns", range(1, 8))
async def test_a_closing_that_is_cancelled_twice_leaves_no_connection(bootstrap: str, turns: int) -> None:
    consumer = await started(bootstrap)
    await consumer.topics()
    connections = tuple(consumer._client._conns.values())
    assert connections
    closing = asyncio.create_task(close_consumer(consumer))
    for _ in range(2):
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    left = [connection for connection in connections if connection.connected()]
    await close_consumer(consumer)
    assert not left


async def test_a_start_that_ends_as_its_caller_is_cancelled_is_closed_although_no_task_starts_any_more() -> None:
    calls: list[str] = []
    tasks = Tasks(lambda error: None)
    starting, is_started = asyncio.Event(), asyncio.Event()

    async def start() -> None:
        await starting.wait()
        calls.append("started")
        is_started.set()

    async def close() -> None:
        await asyncio.sleep(0)
        calls.append("closed")

    async def ask() -> None:
        await start_client(start, close, tasks.spawn)

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    starting.set()
    await is_started.wait()
    asking.cancel()  # `ask` has not gone on yet
    await tasks.close()
    await asyncio.wait({asking})
    assert asking.cancelled()
    assert calls == ["started", "closed"]


async def ask_consumer(bootstrap: str, spawn: Spawn) -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None, auto_offset_reset="none")
    await start_consumer(consumer, spawn)
    await close_consumer(consumer)


async def ask_lookup(bootstrap: str, spawn: Spawn) -> None:
    lookup = Lookup({"bootstrap_servers": bootstrap}, spawn=spawn)
    try:
        await lookup.refresh()
    finally:
        await lookup.stop()


async def ask_admin(bootstrap: str, spawn: Spawn) -> None:
    admin = ClusterAdmin({"bootstrap_servers": bootstrap}, spawn)
    try:
        await admin.committed("nobody")
    finally:
        await admin.stop()


async def ask_topics(bootstrap: str, spawn: Spawn) -> None:
    config = KafkaConfig(bootstrap_servers=bootstrap)
    topics = Topics(config, create=False, spawn=spawn, clock=asyncio.get_running_loop().time)
    try:
        await topics.refresh()
    finally:
        await topics.stop()


async def ask_member(bootstrap: str, spawn: Spawn) -> None:
    loop = asyncio.get_running_loop()
    settings = MemberSettings("nobody", "m", "latest", 1, 1024, "read_committed", 10.0, 3.0, None, 60.0)
    kafka = {"bootstrap_servers": bootstrap}
    lookup = Lookup(kafka, spawn=spawn)
    arrivals = Arrivals(LiveReader(kafka, spawn, lookup, CatchUpReader(kafka, spawn, lookup)), lookup)
    member = PolledMember(
        settings, kafka, arrivals, lookup, starts=MemberStarts("nobody", lookup), auto_commit=False, spawn=spawn,
        clock=loop.time,
    )  # fmt: skip
    await member.start()
    await member.stop(2.0)


async def test_a_refresh_in_flight_ends_when_its_lookup_stops(bootstrap: str) -> None:
    lookup = Lookup({"bootstrap_servers": bootstrap}, spawn=asyncio.create_task, timeout_s=3600.0)
    await lookup.refresh()
    refreshing = asyncio.create_task(lookup.refresh())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not refreshing.done()
    await lookup.stop()
    await asyncio.wait_for(refreshing, 60)


@pytest.mark.parametrize("ask", [ask_consumer, ask_lookup, ask_admin, ask_topics, ask_member])
async def test_a_cancelled_start_leaves_no_connection(
    bootstrap: str, ask: Callable[[str, Spawn], Coroutine[Any, Any, None]]
) -> None:
    told: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    gc.collect()  # what other tests left
    loop.set_exception_handler(lambda _, context: told.append(context))
    started_by_themselves: set[asyncio.Task[None]] = set()

    def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        started_by_themselves.add(task)
        return task

    try:
        for turns in range(1, 50, 6):
            asking = asyncio.create_task(ask(bootstrap, spawn))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, Refused):  # a new broker has no coordinator yet
                await asking
            await asyncio.gather(*started_by_themselves, return_exceptions=True)
            del asking
            gc.collect()  # aiokafka warns of a leaked open connection when it is collected
        assert told == []
    finally:
        loop.set_exception_handler(None)


async def test_a_start_without_kafka_says_so(bootstrap: str) -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers="127.0.0.1:1", group_id=None)
    with pytest.raises(KafkaConnectionError):
        await start_consumer(consumer, asyncio.create_task)
    assert consumer._closed


async def test_the_tail_outlives_a_watch_that_ends_before_it_reads(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=1)
    sink = readers.Sink()
    fan = readers.Fan(sink)
    await readers.live_reader.watch(topic, fan)
    readers.live_reader.unwatch(topic, fan)  # the reader's consumer is still connecting, and finds nothing to read
    await readers.wait_until(lambda: readers.live_reader.statistics().assignments == 1)
    await readers.live_reader.watch(topic, fan)
    await producer.send_and_wait(topic, b"1")
    await readers.wait_until(lambda: len(sink.got) == 1)


async def test_a_client_that_is_started_while_its_owner_stops_is_closed() -> None:
    class Client:
        closed = False

        async def close(self) -> None:
            self.closed = True

    client, may_start = Client(), asyncio.Event()
    on_demand = OnDemand(lambda: client, lambda _: may_start.wait(), asyncio.create_task)
    getting = asyncio.create_task(on_demand.get())
    await asyncio.sleep(0)
    await on_demand.stop()
    may_start.set()
    with pytest.raises(KafkaError):
        await getting
    assert client.closed
