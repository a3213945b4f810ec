"""Batches that aiokafka cannot parse are read as Java reads them, or fetched again and then stepped over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, PartitionRecords
from aiokafka.errors import CorruptRecordException
from hypothesis import given
from hypothesis import strategies as st

from gateway.kafka.driver.kafka_consumer import close_consumer, log_consumer, poll
from kafka_records.fetched_records import FETCHED_AGAIN, Unreadable, _Converted, _Trials, convert_arrivals
from kafka_records.record_batch import FetchedBatches, records
from mapping.record import Received
from tests.reference.record_buffer import varint
from tests.support.altering_proxy import FETCH, AlteringProxy, of_another_partition
from tests.support.raw_batches import BREAKS, RECORDS_AT, TIME_MS, batch, produce_raw, signed

WAIT_S = 60.0
NAMES = [b"caf\xe9", b"\xff\xfe", b"a\xc3", b"ok", b"\xed\xa0\x80b", b"\xf8\x88\x80\x80\x80"]
PLACE = TopicPartition("t", 0)


@asynccontextmanager
async def reading(
    bootstrap: str, partition: TopicPartition
) -> AsyncIterator[tuple[AIOKafkaConsumer, list[Unreadable]]]:
    told: list[Unreadable] = []
    consumer = log_consumer({"bootstrap_servers": bootstrap})
    await consumer.start()
    convert_arrivals(consumer, told.append)
    try:
        consumer.assign([partition])
        consumer.seek(partition, 0)
        yield consumer, told
    finally:
        await close_consumer(consumer)


async def read_to(consumer: AIOKafkaConsumer, partition: TopicPartition, end: int) -> list[Received]:
    found: list[Received] = []
    async with asyncio.timeout(WAIT_S):
        while await consumer.position(partition) < end:
            for records in (await poll(consumer, wait_ms=100)).values():
                found += records
    return found


@pytest.mark.parametrize("codec", range(5))
async def test_names_of_headers_are_any_bytes(bootstrap: str, new_topic: Any, codec: int) -> None:
    partition = TopicPartition(await new_topic(partitions=1), 0)
    headers = [(name, None if number % 2 else b"%d" % number) for number, name in enumerate(NAMES)]
    await produce_raw(bootstrap, partition.topic, batch([b"before"]))
    await produce_raw(bootstrap, partition.topic, batch([b"one", None, b"three"], headers, codec=codec))
    await produce_raw(bootstrap, partition.topic, batch([b"after"], key=None))
    shown = tuple((name.decode("utf-8", "replace"), value) for name, value in headers)
    async with reading(bootstrap, partition) as (consumer, told):
        found = await read_to(consumer, partition, 5)
        assert found == [
            Received(partition.topic, b"k", b"before", (), TIME_MS, 0, 0),
            Received(partition.topic, b"k", b"one", shown, TIME_MS, 0, 1),
            Received(partition.topic, b"k", None, shown, TIME_MS, 0, 2),
            Received(partition.topic, b"k", b"three", shown, TIME_MS, 0, 3),
            Received(partition.topic, None, b"after", (), TIME_MS, 0, 4),
        ]
        consumer.seek(partition, 2)
        assert await read_to(consumer, partition, 5) == found[2:]
        assert told == []


@pytest.mark.parametrize("kind", BREAKS)
async def test_what_nothing_can_read_is_stepped_over(bootstrap: str, new_topic: Any, kind: str) -> None:
    partition = TopicPartition(await new_topic(partitions=1), 0)
    host, _, port = bootstrap.rpartition(":")
    broken = batch([b"x", b"y", b"z"])
    await produce_raw(bootstrap, partition.topic, batch([b"before"]))
    await produce_raw(bootstrap, partition.topic, broken)
    await produce_raw(bootstrap, partition.topic, batch([b"after"]))
    async with AlteringProxy((host, int(port))).running() as proxy:
        alteration = proxy.alter(broken, BREAKS[kind])
        async with reading(proxy.bootstrap, partition) as (consumer, told):
            found = await read_to(consumer, partition, 5)
    assert [record.value for record in found if record.value not in (b"x", b"y", b"z")] == [b"before", b"after"]
    lost = [offset for one in told for offset in range(one.first, one.behind)]
    assert sorted([*lost, *(record.offset for record in found)]) == [0, 1, 2, 3, 4]
    assert alteration.done > (FETCHED_AGAIN if lost else 0)
    assert bool(lost) == (kind != "too many records")  # all its records are there
    assert all(str(one).startswith(f"{partition.topic}-0, offset") for one in told)


async def test_what_the_network_altered_is_fetched_again(bootstrap: str, new_topic: Any) -> None:
    partition = TopicPartition(await new_topic(partitions=1), 0)
    host, _, port = bootstrap.rpartition(":")
    broken = batch([b"x", b"y"])
    await produce_raw(bootstrap, partition.topic, broken)
    async with AlteringProxy((host, int(port))).running() as proxy:
        alteration = proxy.alter(broken, BREAKS["wrong checksum"], times=FETCHED_AGAIN)
        async with reading(proxy.bootstrap, partition) as (consumer, told):
            assert [record.value for record in await read_to(consumer, partition, 2)] == [b"x", b"y"]
    assert alteration.done == FETCHED_AGAIN
    assert told == []


async def test_an_answer_for_another_partition_ends_no_consumer(bootstrap: str, new_topic: Any) -> None:
    partition = TopicPartition(await new_topic(partitions=1), 0)
    host, _, port = bootstrap.rpartition(":")
    await produce_raw(bootstrap, partition.topic, batch([b"x"]))
    async with AlteringProxy((host, int(port))).running() as proxy:
        alteration = proxy.alter_answers(FETCH, of_another_partition(partition.topic), times=2)
        async with reading(proxy.bootstrap, partition) as (consumer, told):
            assert [record.value for record in await read_to(consumer, partition, 1)] == [b"x"]
    assert alteration.done == 2
    assert told == []


def unpacked(data: bytes, end: int) -> tuple[list[Received], list[Unreadable], int]:
    """Fetch these bytes until the reader moves on; return its records, what it steps over, and its position."""
    told: list[Unreadable] = []
    trials = _Trials(told.append, 10)
    for _ in range(FETCHED_AGAIN + 1):
        source = PartitionRecords(PLACE, FetchedBatches(data), None, 0, None, None, True, READ_COMMITTED)
        converted = _Converted(source, end, trials)
        found = list(converted)
        if converted.next_fetch_offset > 0:
            break
    return found, told, converted.next_fetch_offset


@pytest.mark.parametrize("length", [2**20, 2**31 - 1, 2**40, 2**62])
@pytest.mark.parametrize("field", range(5))
def test_no_length_in_a_record_reads_beyond_its_batch(field: int, length: int) -> None:
    """Of key, value, headers, name and value of a header: the process would end."""
    wrong = varint(length)
    parts = [varint(1) + b"k", varint(1) + b"v", varint(1), varint(4) + b"caf\xe9", varint(1) + b"1"]
    parts[field] = wrong
    record = b"\0\0\0" + b"".join(parts)
    raw = signed(batch([b"x"])[:RECORDS_AT] + varint(len(record)) + record)
    with pytest.raises(CorruptRecordException):
        list(records("t", 0, memoryview(raw), 4, 10))


def test_a_number_without_an_end_is_no_record() -> None:
    for record in (b"\x80", b"\x80" * 11 + b"\0", varint(3) + b"\0\x80"):
        with pytest.raises(CorruptRecordException):
            list(records("t", 0, memoryview(signed(batch([b"x"])[:RECORDS_AT] + record)), 4, 10))


@given(st.binary(max_size=120), st.integers(0, 300), st.integers(0, 40), st.booleans(), st.integers(0, 4))
def test_any_bytes_are_records_or_stepped_over(new: bytes, at: int, cut: int, sign: bool, codec: int) -> None:
    """A fuzzed batch never raises, never moves a reader back, and never beyond the end of the log."""
    raw = batch([b"one", b"two"], [(b"caf\xe9", b"1")], codec=codec)
    at = min(at, len(raw))
    altered = raw[:at] + new + raw[at + cut :]
    if sign and len(altered) > 61:
        altered = signed(altered)
    found, told, position = unpacked(altered + raw, 4)
    assert 0 < position <= 4
    assert all(0 <= one.first < one.behind <= 4 for one in told)
    assert [record.offset for record in found] == sorted({record.offset for record in found})
