"""Closing a consumer that has only just started: aiokafka then cancels tasks that never ran, and awaits them."""

from __future__ import annotations

import asyncio
import contextlib

from aiokafka import AIOKafkaConsumer

from gateway.kafka.consumers import close_consumer


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
