"""Fetched records become `Received`: the same as from aiokafka, from any start offset and in any portions."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.consumer.fetcher import PartitionRecords
from aiokafka.errors import ConsumerStoppedError, OffsetOutOfRangeError

from gateway.kafka.driver.fetch.fetching import fetch
from gateway.kafka.driver.kafka_consumer import close_consumer
from gateway.kafka.driver.lifecycle import start_consumer
from mapping.record import Received

WAIT_S = 60.0
HEADERS = [("one", b"1"), ("one", None), ("two", b"")]


@asynccontextmanager
async def reading(
    bootstrap: str, topic: str, isolation: str = "read_committed", pause_ms: int = 200
) -> AsyncIterator[AIOKafkaConsumer]:
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, auto_offset_reset="none", isolation_level=isolation, fetch_max_wait_ms=100,
        consumer_timeout_ms=pause_ms,
    )  # fmt: skip
    await start_consumer(consumer, asyncio.create_task)
    consumer.assign([TopicPartition(topic, 0)])
    try:
        yield consumer
    finally:
        await close_consumer(consumer)


async def fill(bootstrap: str, topic: str) -> int:
    """Write batches of every kind, with committed and aborted transactions between them. Returns the end of the log."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=20) as plain:
        for number in range(20):
            value = b"%d" % number if number % 2 or number % 3 else None
            await plain.send(topic, value, key=None if number % 2 else b"k")
            await plain.send(topic, b"", headers=HEADERS)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=20, compression_type="gzip") as packed:
        for number in range(20):
            await packed.send(topic, b"packed %d" % number, timestamp_ms=1_700_000_000_000 + number)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"tx-{topic}") as transactional:
        for number in range(6):
            await transactional.begin_transaction()
            for _ in range(3):
                await transactional.send(topic, b"transaction %d" % number)
            await (transactional.abort_transaction() if number % 2 else transactional.commit_transaction())
        await transactional.begin_transaction()
        await transactional.send_and_wait(topic, b"the last")
        await transactional.commit_transaction()
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap) as asking:
        partition = TopicPartition(topic, 0)
        return int((await asking.end_offsets([partition]))[partition])


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
async def test_it_is_what_getmany_brings(bootstrap: str, new_topic: Any, isolation: str) -> None:
    topic = await new_topic(partitions=1)
    end = await fill(bootstrap, topic)
    partition = TopicPartition(topic, 0)
    plain = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level=isolation)
    async with plain as theirs, reading(bootstrap, topic, isolation) as ours:
        theirs.assign([partition])
        theirs.seek(partition, 0)
        expected: list[Received] = []
        async with asyncio.timeout(WAIT_S):
            while not expected or expected[-1].value != b"the last":
                batches = await theirs.getmany(timeout_ms=1000)
                expected += [
                    Received(one.topic, one.key, one.value, one.headers, one.timestamp, one.partition, one.offset)
                    for records in batches.values()
                    for one in records
                ]
        aborted = [record for record in expected if record.value in {b"transaction 1", b"transaction 3"}]
        assert len(aborted) == (0 if isolation == "read_committed" else 6)
        for first, most in [(0, 7), (0, 1000), *((offset, 1000) for offset in range(1, end - 2, 5)), (13, 1)]:
            ours.seek(partition, first)
            wanted = [record for record in expected if record.offset >= first]
            got: list[Received] = []
            async with asyncio.timeout(WAIT_S):
                while len(got) < len(wanted):
                    for records in (await fetch(ours, [partition], timeout_s=1.0, most=most)).values():
                        assert len(records) <= most
                        got += records
                        assert await ours.position(partition) > records[-1].offset
            assert got == wanted, (first, most)


async def test_it_waits_for_the_first_record(bootstrap: str, producer: AIOKafkaProducer, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    partition = TopicPartition(topic, 0)
    async with reading(bootstrap, topic) as consumer:
        consumer.seek(partition, 0)
        assert await fetch(consumer, [partition], timeout_s=0.0, most=10) == {}
        assert await fetch(consumer, [partition], timeout_s=0.05, most=10) == {}
        waiting = asyncio.ensure_future(fetch(consumer, [], timeout_s=WAIT_S, most=10))
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done()
        await producer.send_and_wait(topic, b"now")
        assert [record.value for record in (await waiting)[partition]] == [b"now"]


async def test_a_fetcher_that_overlooks_work_is_woken(
    bootstrap: str, producer: AIOKafkaProducer, new_topic: Any, readers: Any
) -> None:
    """As when a fetch ends in the same turn of the event loop in which its partition is resumed."""
    topic = await new_topic(partitions=1)
    partition = TopicPartition(topic, 0)
    async with reading(bootstrap, topic, pause_ms=600_000) as consumer:
        consumer.seek(partition, 0)
        consumer.pause(partition)
        fetcher = consumer._fetcher
        await readers.wait_until(lambda: consumer.partitions_for_topic(topic) and not fetcher._in_flight)
        leader = consumer._client.cluster.leader_for_partition(partition)
        fetcher._in_flight.add(leader)
        turn = fetcher._wait_consume_future
        fetcher._notify(turn)
        consumer.resume(partition)
        await readers.wait_until(lambda: fetcher._wait_consume_future is not turn)
        fetcher._in_flight.discard(leader)
        await producer.send_and_wait(topic, b"now")
        found = await fetch(consumer, [], timeout_s=WAIT_S, most=10)
        assert [record.value for record in found[partition]] == [b"now"]


async def test_errors_come_through(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    partition = TopicPartition(topic, 0)
    async with reading(bootstrap, topic) as consumer:
        consumer.seek(partition, 5)
        with pytest.raises(OffsetOutOfRangeError):
            await fetch(consumer, [partition], timeout_s=WAIT_S, most=10)
        consumer.seek(partition, 0)
        waiting = asyncio.ensure_future(fetch(consumer, [partition], timeout_s=WAIT_S, most=10))
        await asyncio.wait([waiting], timeout=0.2)
        await consumer.stop()
        with pytest.raises(ConsumerStoppedError):
            await waiting


async def test_fetched_records_are_freed_without_the_garbage_collector(
    bootstrap: str, producer: AIOKafkaProducer, new_topic: Any, readers: Any
) -> None:
    """Fetches that were read to their end, in part, skipped by a seek, never read, or left when the consumer closed."""
    topic = await new_topic(partitions=1)
    partition = TopicPartition(topic, 0)
    for number in range(10):
        await producer.send_and_wait(topic, b"%d" % number)

    def kept() -> int:
        return sum(isinstance(found, PartitionRecords) and found._tp == partition for found in gc.get_objects())

    async def read() -> None:
        async with reading(bootstrap, topic) as consumer:
            for most in (10, 10, 3, 3, 1, 1):
                consumer.seek(partition, 0)
                assert await fetch(consumer, [partition], timeout_s=WAIT_S, most=most)
            for _ in range(3):
                consumer.seek(partition, 0)
                await readers.wait_until(lambda: partition in consumer._fetcher._records)
            assert kept() == 1

    gc.disable()
    try:
        await read()
        assert kept() == 0
    finally:
        gc.enable()
