"""Readers while their broker dies, comes back, or falls silent."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome
from tests.support.frozen import freeze
from tests.support.topics import until_led

TOPIC = "readings"


async def make_topic(servers: str, partitions: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    await admin.create_topics([NewTopic(TOPIC, partitions, 1)])
    await until_led(admin, TOPIC)
    await admin.close()


async def store(servers: str, count: int, partitions: int) -> None:
    async with AIOKafkaProducer(bootstrap_servers=servers, acks="all") as producer:
        for number in range(count):
            await producer.send(TOPIC, b"%d" % number, partition=number % partitions)
        await producer.flush()


async def test_a_killed_broker_costs_no_subscriber_a_record(new_broker, readers) -> None:
    broker = new_broker()
    await broker.start()
    await make_topic(broker.bootstrap_servers, 2)
    here = type(readers)(broker.bootstrap_servers)
    await here.live_reader.start()
    fast, slow, held = readers.Sink(), readers.Sink(50), readers.Holder(50)
    await here.live_reader.watch(TOPIC, readers.Fan(fast, slow))
    held.membership = await here.groups.join(f"g-{uuid.uuid4().hex[:8]}", [TOPIC], held)
    await store(broker.bootstrap_servers, 1000, 2)
    await readers.wait_until(lambda: len(fast.got) == 1000 and len(held.held) == 50)
    settled = {(record.partition, record.offset) for record in held.settle(30)}

    await broker.kill()
    slow.room += 100
    here.live_reader.resume(slow)
    with pytest.raises(Refused) as refused:
        async with asyncio.timeout(60):
            await here.groups.join("another", [TOPIC], readers.Sink())
    assert refused.value.outcome is Outcome.BUSY
    await broker.start()

    await store(broker.bootstrap_servers, 1000, 2)
    await readers.wait_until(lambda: len(fast.got) == 2000)
    fast.check_complete(2000)
    slow.room = None
    here.live_reader.resume(slow)
    await readers.wait_until(lambda: here.live_reader.statistics().behind == 0)
    slow.check_complete(2000)
    assert here.live_reader.statistics().gaps == here.catch_up_reader.statistics().gaps == 0

    def all_settled() -> bool:
        settled.update((record.partition, record.offset) for record in held.settle())
        return len(settled) == 2000

    await readers.wait_until(all_settled, within=60)
    await here.stop()


async def test_a_silent_broker_neither_hangs_a_subscriber_nor_the_stop(new_broker, readers) -> None:
    broker = new_broker()
    await broker.start()
    await make_topic(broker.bootstrap_servers, 1)
    here = type(readers)(broker.bootstrap_servers, lookup_timeout_s=1.0, request_timeout_ms=40_000)
    await here.live_reader.start()
    sink, held = readers.Sink(), readers.Holder()
    await here.live_reader.watch(TOPIC, readers.Fan(sink))
    held.membership = await here.groups.join("g", [TOPIC], held)
    await store(broker.bootstrap_servers, 10, 1)
    await readers.wait_until(lambda: len(sink.got) == len(held.held) == 10)
    freeze(broker.pid)
    try:
        with pytest.raises(Refused) as refused:
            await here.live_reader.watch(TOPIC, readers.Fan())
        assert refused.value.outcome is Outcome.BUSY
        held.settle()
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    await store(broker.bootstrap_servers, 10, 1)
    await readers.wait_until(lambda: len(sink.got) == len(held.got) == 20)
    sink.check_complete(20)
    held.settle()

    freeze(broker.pid)
    start = time.monotonic()
    await here.stop()
    assert time.monotonic() - start < 25  # a few seconds, and a slow machine; Kafka's requests themselves wait 40
    os.kill(broker.pid, signal.SIGCONT)


async def test_starting_needs_no_kafka(readers) -> None:
    nowhere = type(readers)("127.0.0.1:1", lookup_timeout_s=1.0)
    await nowhere.live_reader.start()
    with pytest.raises(Refused) as refused:
        await nowhere.live_reader.watch(TOPIC, readers.Fan())
    assert refused.value.outcome is Outcome.BUSY
    with pytest.raises(Refused) as refused:
        await nowhere.groups.join("g", [TOPIC], readers.Sink())
    assert refused.value.outcome is Outcome.BUSY
    await nowhere.stop()
