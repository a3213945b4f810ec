"""proton's own blocking client, unmodified, against the listener and a real Kafka."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from proton import Delivery, Message
from proton.utils import BlockingConnection, LinkDetached

from gateway.amqp.server import AmqpServer

TIMEOUT = 60


async def read(bootstrap: str, topic: str, count: int) -> list[Any]:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        async with asyncio.timeout(TIMEOUT):
            return [await consumer.getone() for _ in range(count)]
    finally:
        await consumer.stop()


async def test_send_and_receive(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic()

    def client() -> list[Any]:
        connection = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        receiver = connection.create_receiver(topic, credit=10)
        grouped = connection.create_receiver(f"{topic}/group.id/g-{topic}", credit=10)
        sender = connection.create_sender(topic)
        for number in range(5):
            sender.send(Message(id=str(number), body=f"text {number}", properties={"n": number}))
        found = []
        for link in (receiver, grouped):
            for _ in range(5):
                found.append(link.receive(TIMEOUT))
                link.accept()
        connection.close()
        return found

    found = await asyncio.to_thread(client)
    for half in (found[:5], found[5:]):
        assert sorted(message.body for message in half) == [f"text {number}" for number in range(5)]
        assert sorted(message.properties["n"] for message in half) == list(range(5))
    records = await read(bootstrap, topic, 5)
    assert sorted(record.value for record in records) == [f"text {number}".encode() for number in range(5)]


async def test_a_message_of_100_mb_ends_its_link_alone(listener: AmqpServer, new_topic: Any) -> None:
    topic = await new_topic()

    def client() -> tuple[str, str]:
        connection = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        other, sender = connection.create_sender(topic, name="other"), connection.create_sender(topic)
        with pytest.raises(LinkDetached) as refused:
            sender.send(Message(body=b"h" * (100 << 20)))
        outcome = other.send(Message(body=b"x")).remote_state
        connection.close()
        return str(refused.value.condition), str(outcome)

    condition, outcome = await asyncio.to_thread(client)
    assert (condition, outcome) == ("amqp:link:message-size-exceeded", str(Delivery.ACCEPTED))
