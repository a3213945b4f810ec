"""Closing a consumer that has only just started: aiokafka then cancels tasks that never ran, and awaits them. Cancelled
while it starts, it forgets a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Coroutine
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaConnectionError

from gateway.kafka.consumers import close_consumer, start_consumer


async def started(bootstrap: str) -> AIOKafkaConsumer:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None, auto_offset_reset="none")
    await consumer.start()
    return consumer


async def test_closing_at_once_ends_nobody_else(bootstrap: str) -> None:
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


async def test_a_start_that_is_cancelled_anywhere_leaves_no_connection(bootstrap: str) -> None:
    told: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    started_by_themselves: set[asyncio.Task[None]] = set()

    def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        started_by_themselves.add(task)
        return task

    try:
        for turns in range(1, 50, 6):
            consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None, auto_offset_reset="none")
            starting = asyncio.create_task(start_consumer(consumer, spawn))
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
                await close_consumer(consumer)  # it was done already
            await asyncio.gather(*started_by_themselves)
            assert not consumer._client._conns or all(not one.connected() for one in consumer._client._conns.values())
            del consumer, starting
            gc.collect()
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
    await readers.tail.watch(topic, fan)
    readers.tail.unwatch(topic, fan)  # the reader's consumer is still connecting, and finds nothing to read
    await readers.wait_until(lambda: readers.tail.statistics().assignments == 1)
    await readers.tail.watch(topic, fan)
    await producer.send_and_wait(topic, b"1")
    await readers.wait_until(lambda: len(sink.got) == 1)
