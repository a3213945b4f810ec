"""While Kafka is frozen, a flood stays within the memory budget. Other faults of Kafka: `test_fault_bench.py`."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer

from gateway.embedded.broker import EmbeddedBroker
from loadtest.clients.topics import create_topic
from tests.support.gateway import GatewayProcess
from tests.support.waiting import wait_until


@pytest.mark.timeout(400)
async def test_a_flood_into_a_frozen_kafka_stays_within_the_budget_and_keeps_its_connections(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]
) -> None:
    config = "[budget]\nprocess_bytes = 8_388_608\nconnection_bytes = 2_097_152\n"
    gateway = await new_gateway(stoppable.bootstrap_servers, config=config).start()
    topic = f"flood-{uuid.uuid4().hex[:6]}"
    await create_topic(stoppable.bootstrap_servers, topic)
    payload = b"x" * 20_000
    body = bytes((0, len(topic))) + topic.encode() + b"\x00" + payload
    packet = b"\x30" + bytes((len(body) & 0x7F | 0x80, len(body) >> 7 & 0x7F | 0x80, len(body) >> 14)) + body
    resident = rss(gateway.pid)
    sent = 0

    async def flood(number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        nonlocal sent
        reader, writer = await asyncio.open_connection(*gateway.address("mqtt"))
        writer.write(b"\x10\x0f\x00\x04MQTT\x05\x02\x00\x02\x00\x00\x02f%d" % number)  # keep alive 2 s
        assert (await asyncio.wait_for(reader.read(100), 60))[0] == 0x20
        for _ in range(2000):  # 40 MB per connection without back-pressure
            writer.write(packet)
            sent += 1
            try:
                await asyncio.wait_for(writer.drain(), 1)
            except TimeoutError:
                return reader, writer
        raise AssertionError("nothing held the flood back")

    os.kill(stoppable.pid, signal.SIGSTOP)
    try:
        async with asyncio.TaskGroup() as group:
            flooding = [group.create_task(flood(number)) for number in range(4)]
        floods = [task.result() for task in flooding]
        loop = asyncio.get_running_loop()
        until = loop.time() + 4
        await wait_until(lambda: loop.time() > until, 10)  # longer than 1.5 times the keep alive
        assert not any(reader.at_eof() for reader, _ in floods)
        assert rss(gateway.pid) - resident < 1.5 * 8_388_608 + 16_000_000
    finally:
        os.kill(stoppable.pid, signal.SIGCONT)
    for _, writer in floods:
        await asyncio.wait_for(writer.drain(), 60)
        writer.write(b"\xe0\x00")
    for reader, writer in floods:
        assert await asyncio.wait_for(reader.read(), 60) == b""  # no DISCONNECT: the gateway has received the client's
        writer.close()
    assert await gateway.stop() == 0
    assert await stored_records(stoppable.bootstrap_servers, topic) == sent


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def stored_records(bootstrap: str, topic: str) -> int:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap)
    await consumer.start()
    ends = await consumer.end_offsets(consumer.assignment())
    await consumer.stop()
    return sum(ends.values())
