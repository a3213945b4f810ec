"""Finding QoS 2 messages in a real log, among other traffic."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete

from gateway.kafka.cluster.lookup import Lookup
from gateway.mqtt.registry.crash_recovery import find_qos2_messages, parse
from mapping.record import MQTT_EXCHANGE
from tests.support.waiting import wait_until

WITHIN_S = 60


@pytest.fixture
def kafka(bootstrap: str) -> dict[str, Any]:
    return {"bootstrap_servers": bootstrap, "request_timeout_ms": 5000}


@pytest.fixture
async def lookup(kafka: dict[str, Any]) -> AsyncIterator[Lookup]:
    lookup = Lookup(kafka, spawn=asyncio.create_task, timeout_s=60.0)
    yield lookup
    await lookup.stop()


@pytest.fixture
async def producer(bootstrap: str) -> AsyncIterator[AIOKafkaProducer]:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=5, max_batch_size=262_144) as client:
        yield client


def message(session_id: str, packet_id: int, sequence: int) -> list[tuple[str, bytes]]:
    return [("mqtt.qos", b"2"), (MQTT_EXCHANGE, f"{session_id}/{packet_id}/{sequence}".encode())]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"ab12/1/0", ("ab12", 1, 0)),
        (b"ab12/65535/123456789012345678", ("ab12", 65535, 123456789012345678)),
        *((bad, None) for bad in (
            None, b"", b"a", b"a/1", b"a/1/2/3", b"/1/2", b"a/0/1", b"a/65536/1", b"a/x/1", b"a/1/-1", b"a/1/", b"a//1",
            b"\xff/1/1", b"a/ 1/1", b"a/1/1234567890123456789", b"a/" + b"9" * 5000 + b"/1",
        )),
    ],
)  # fmt: skip
def test_only_what_is_an_exchange_counts(value: bytes | None, expected: Any) -> None:
    assert parse(value) == expected


async def test_several_partitions_and_topics_with_other_traffic_between(
    kafka: dict[str, Any], lookup: Lookup, producer: AIOKafkaProducer, new_topic: Any
) -> None:
    first, second = await new_topic(partitions=3), await new_topic(partitions=2)
    nonces = [uuid.uuid4().hex for _ in range(3)]
    expected: dict[str, set[tuple[int, int]]] = {session_id: set() for session_id in nonces}
    for number in range(900):
        topic, partitions = (first, 3) if number % 2 else (second, 2)
        if number % 9 == 0:
            pair = (number % 100 + 1, number)
            expected[nonces[number % 3]].add(pair)
            headers = message(nonces[number % 3], *pair)
        elif number % 50 == 1:
            headers = [(MQTT_EXCHANGE, b"nonsense")]
        else:
            headers = [("user.mqtt.message", b"n/1/1"), ("unit", b"C")]
        await producer.send(topic, b"x", headers=headers, partition=number % partitions)
    await producer.flush()
    expected = {session_id: pairs for session_id, pairs in expected.items() if pairs}
    ranges = {TopicPartition(topic, number): 0 for topic, count in ((first, 3), (second, 2)) for number in range(count)}
    ranges[TopicPartition(f"gone-{uuid.uuid4().hex}", 0)] = 5
    ranges[TopicPartition(second, 7)] = 0
    assert await find_qos2_messages(kafka, lookup, asyncio.create_task, ranges) == expected
    assert await find_qos2_messages(kafka, lookup, asyncio.create_task, {}) == {}


async def test_it_begins_at_the_offset_and_ends_at_the_end(
    kafka: dict[str, Any], lookup: Lookup, producer: AIOKafkaProducer, new_topic: Any, admin: Any
) -> None:
    topic = await new_topic(partitions=1)
    partition = TopicPartition(topic, 0)
    for number in range(20):
        await producer.send(topic, b"x", headers=message("n", 1, number), partition=0)
    await producer.flush()

    async def sequences(offset: int) -> list[int]:
        found = await asyncio.wait_for(
            find_qos2_messages(kafka, lookup, asyncio.create_task, {partition: offset}), WITHIN_S
        )
        return sorted(sequence for _, sequence in found.get("n", ()))

    assert await sequences(15) == [15, 16, 17, 18, 19]
    assert await sequences(20) == []  # the end
    assert await sequences(21) == list(range(20))  # behind the end: it was made anew
    await admin.delete_records({partition: RecordsToDelete(18)})
    assert await sequences(3) == [18, 19]


async def test_transactions_of_others_neither_end_nor_delay_it(
    bootstrap: str, kafka: dict[str, Any], lookup: Lookup, producer: AIOKafkaProducer, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    partition = TopicPartition(topic, 0)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"t-{uuid.uuid4().hex}") as other:
        async with other.transaction():
            await other.send_and_wait(topic, b"x", partition=0)  # the log ends with a marker
        assert (
            await asyncio.wait_for(find_qos2_messages(kafka, lookup, asyncio.create_task, {partition: 0}), WITHIN_S)
            == {}
        )
        async with other.transaction():
            await other.send_and_wait(topic, b"open", partition=0)
            # Ours is stored, although readers of committed records do not see it yet.
            await producer.send_and_wait(topic, b"x", headers=message("n", 3, 4), partition=0)
            found = await asyncio.wait_for(
                find_qos2_messages(kafka, lookup, asyncio.create_task, {partition: 0}), WITHIN_S
            )
            assert found == {"n": {(3, 4)}}


async def test_a_hundred_thousand_records_take_seconds(
    kafka: dict[str, Any], lookup: Lookup, producer: AIOKafkaProducer, new_topic: Any
) -> None:
    topic = await new_topic(partitions=4)
    headers = [("mqtt.topic", b"a/b"), ("mqtt.qos", b"1"), ("gw.protocol", b"mqtt5"), ("gw.client", b"c")]
    for number in range(4):
        builder, count = producer.create_batch(), 0
        while builder.append(key=b"k", value=b"x" * 20, timestamp=None, headers=headers) is not None:
            count += 1
        builder.close()
        for _ in range(25_000 // count + 1):
            batch = producer.create_batch()
            for _ in range(count):
                batch.append(key=b"k", value=b"x" * 20, timestamp=None, headers=headers)
            await producer.send_batch(batch, topic, partition=number)
        await producer.send(topic, b"x", headers=message("n", number + 1, number), partition=number)
    await producer.flush()
    ranges = {TopicPartition(topic, number): 0 for number in range(4)}
    started = time.perf_counter()
    found = await find_qos2_messages(kafka, lookup, asyncio.create_task, ranges)
    assert time.perf_counter() - started < 40
    assert found == {"n": {(1, 0), (2, 1), (3, 2), (4, 3)}}


async def test_it_waits_for_a_kafka_that_is_away(
    bootstrap: str, producer: AIOKafkaProducer, new_topic: Any, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await new_topic(partitions=1)
    await producer.send_and_wait(topic, b"x", headers=message("n", 1, 2), partition=0)
    host, _, port = bootstrap.rpartition(":")
    away = socket.socket()  # it has its port, and nobody listens there yet
    away.bind(("127.0.0.1", 0))
    own = away.getsockname()[1]

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, to_them = await asyncio.open_connection(host, int(port))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, to_them), pump(theirs, writer), return_exceptions=True)

    kafka = {"bootstrap_servers": f"127.0.0.1:{own}", "request_timeout_ms": 2000}
    lookup = Lookup(kafka, spawn=asyncio.create_task, timeout_s=1.0)
    async with asyncio.TaskGroup() as group:
        finding = group.create_task(
            find_qos2_messages(kafka, lookup, asyncio.create_task, {TopicPartition(topic, 0): 0})
        )
        await wait_until(lambda: f'Unable connect to "127.0.0.1:{own}"' in caplog.text)
        assert not finding.done()
        server = await asyncio.start_server(forward, sock=away)
        assert await asyncio.wait_for(finding, WITHIN_S) == {"n": {(1, 2)}}
        await lookup.stop()
        server.close()
