"""Readers while their broker dies, comes back, or falls silent."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid

import pytest
from aiokafka import AIOKafkaProducer

from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome
from tests.support.frozen import freeze


async def store(servers: str, topic: str, count: int, partitions: int) -> None:
    async with AIOKafkaProducer(bootstrap_servers=servers, acks="all") as producer:
        for number in range(count):
            await producer.send(topic, b"%d" % number, partition=number % partitions)
        await producer.flush()


async def test_a_killed_broker_costs_no_subscriber_a_record(stoppable, own_topic, readers) -> None:
    topic = await own_topic(2)
    here = type(readers)(stoppable.bootstrap_servers, lookup_timeout_s=10.0)
    await here.live_reader.start()
    fast, slow, held = readers.Sink(), readers.Sink(50), readers.Holder(50)
    await here.live_reader.watch(topic, readers.Fan(fast, slow))
    held.membership = await here.groups.join(f"g-{uuid.uuid4().hex[:8]}", [topic], held)
    await store(stoppable.bootstrap_servers, topic, 1000, 2)
    await readers.wait_until(lambda: len(fast.got) == 1000 and len(held.held) == 50)
    settled = {(record.partition, record.offset) for record in held.settle(30)}

    await stoppable.kill()
    slow.capacity += 100
    here.live_reader.resume(slow)
    with pytest.raises(Refused) as refused:
        async with asyncio.timeout(60):
            await here.groups.join("another", [topic], readers.Sink())
    assert refused.value.outcome is Outcome.BUSY
    await stoppable.start()

    await store(stoppable.bootstrap_servers, topic, 1000, 2)
    await readers.wait_until(lambda: len(fast.got) == 2000)
    fast.check_complete(2000)
    slow.capacity = None
    here.live_reader.resume(slow)
    await readers.wait_until(lambda: here.live_reader.statistics().behind == 0)
    slow.check_complete(2000)
    assert here.live_reader.statistics().gaps == here.catch_up_reader.statistics().gaps == 0

    def all_settled() -> bool:
        settled.update((record.partition, record.offset) for record in held.settle())
        return len(settled) == 2000

    await readers.wait_until(all_settled, timeout=60)
    await here.stop()


async def test_a_silent_broker_neither_hangs_a_subscriber_nor_the_stop(stoppable, own_topic, readers) -> None:
    topic = await own_topic(1)
    here = type(readers)(stoppable.bootstrap_servers, lookup_timeout_s=1.0, request_timeout_ms=40_000)
    await here.live_reader.start()
    sink, held = readers.Sink(), readers.Holder()
    await here.live_reader.watch(topic, readers.Fan(sink))
    held.membership = await here.groups.join(f"g-{uuid.uuid4().hex[:8]}", [topic], held)
    await store(stoppable.bootstrap_servers, topic, 10, 1)
    await readers.wait_until(lambda: len(sink.got) == len(held.held) == 10)
    freeze(stoppable.pid)
    try:
        with pytest.raises(Refused) as refused:
            await here.live_reader.watch(topic, readers.Fan())
        assert refused.value.outcome is Outcome.BUSY
        held.settle()
    finally:
        os.kill(stoppable.pid, signal.SIGCONT)
    await store(stoppable.bootstrap_servers, topic, 10, 1)
    await readers.wait_until(lambda: len(sink.got) == len(held.got) == 20)
    sink.check_complete(20)
    held.settle()

    freeze(stoppable.pid)
    start = time.monotonic()
    await here.stop()
    assert time.monotonic() - start < 25  # a few seconds, and a slow machine; Kafka's requests themselves wait 40
    os.kill(stoppable.pid, signal.SIGCONT)


async def test_starting_needs_no_kafka(readers) -> None:
    nowhere = type(readers)("127.0.0.1:1", lookup_timeout_s=1.0)
    await nowhere.live_reader.start()
    with pytest.raises(Refused) as refused:
        await nowhere.live_reader.watch("readings", readers.Fan())
    assert refused.value.outcome is Outcome.BUSY
    with pytest.raises(Refused) as refused:
        await nowhere.groups.join("g", ["readings"], readers.Sink())
    assert refused.value.outcome is Outcome.BUSY
    await nowhere.stop()
