"""Kafka forgets the offsets of groups without members after a while; those of queues and subscriptions stay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import OffsetAndMetadata
from proton import Message
from proton.reactor import DurableSubscription
from proton.utils import BlockingConnection

from protocols.mqtt.packets import Subscription
from tests.conformance.conftest import kept
from tests.support.amqp import TIMEOUT, body_of
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

FORGETFUL = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "1000"}
"""The shortest time that Kafka accepts."""


async def test_positions_outlive_kafkas_retention_of_offsets(new_broker: Any, tmp_path: Path) -> None:
    """A native group's commit is forgotten; a durable AMQP and a shared MQTT subscription go on where they were."""
    broker = new_broker(settings=FORGETFUL)
    await broker.start()
    gateway = await GatewayProcess(tmp_path, broker.bootstrap_servers, config="[kafka]\ncreate_topics = true\n").start()

    def receive(*sent: bytes) -> list[bytes]:
        connection = BlockingConnection(f"amqp://{gateway.addresses['amqp']}", timeout=TIMEOUT, container_id="me")
        receiver = connection.create_receiver("orders", credit=10, name="mine", options=DurableSubscription())
        if sent:
            sender = connection.create_sender("orders")
            for body in sent:
                sender.send(Message(body=body))
            connection.close()
            return []
        found = [body_of(receiver.receive(TIMEOUT)) for _ in range(2)]
        connection.close()
        return found

    await asyncio.to_thread(receive, b"one", b"two")
    worker = await RawClient.connect(gateway.address("mqtt"), "worker", **kept(5, session_expiry_interval=600))
    await worker.subscribe(Subscription("$share/workers/orders/#", 1))
    await worker.disconnect()
    sender = await RawClient.connect(gateway.address("mqtt"))
    assert await sender.publish("orders/x", b"three") == 0
    await sender.disconnect()
    place = TopicPartition("orders", 0)
    native = AIOKafkaConsumer(bootstrap_servers=broker.bootstrap_servers, group_id="native", enable_auto_commit=False)
    await native.start()
    native.assign([place])
    await native.commit({place: OffsetAndMetadata(1, "")})
    await native.stop()
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    try:

        async def forgotten() -> bool:
            return not await admin.list_consumer_group_offsets("native")

        await wait_until(forgotten, timeout=120)
    finally:
        await admin.close()
    assert sorted(await asyncio.to_thread(receive)) == [b"one", b"two"]
    worker = await RawClient.connect(gateway.address("mqtt"), "worker", **kept(5, session_expiry_interval=600))
    assert (await worker.message()).payload == b"three"
    worker.drop()
    assert await gateway.stop() == 0
