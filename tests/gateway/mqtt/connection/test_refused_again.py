"""An MQTT 3.1.1 client resends a message it was disconnected for; that must end, and the message must not be lost."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import paho.mqtt.client as paho
import pytest
from aiokafka import AIOKafkaConsumer

from gateway.mqtt.connection.publishing import Incoming
from gateway.mqtt.connection.refused_again import REFUSED_TOPIC, REMEMBERED, RefusedAgain
from gateway.mqtt.counters import Counters
from protocols.mqtt.packets import Publish, Pubrel
from tests.support.counted_list import CountedList
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

NewTopic = Callable[..., Awaitable[str]]


async def _find(consumer: AIOKafkaConsumer, payload: bytes) -> Any:
    while True:
        record = await consumer.getone()
        if record.value == payload:
            return record


@pytest.mark.parametrize(("qos", "refused"), [(1, "too-large"), (2, "too-large"), (1, "denied")])
async def test_paho_goes_on_behind_what_is_refused_for_good(
    gateway: GatewayProcess, new_topic: NewTopic, bootstrap: str, qos: int, refused: str
) -> None:
    """The first time it is disconnected; the second time the message is stored as a dead letter and acknowledged."""
    good = await new_topic(max_message_bytes="2000")
    run = uuid.uuid4().hex
    topic = f"{good}/x" if refused == "too-large" else f"$SYS/{run}"
    payload = run.encode() * 100
    ends: list[str] = []
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id=run, protocol=paho.MQTTv311)  # type: ignore[attr-defined]
    client.on_disconnect = lambda *arguments: ends.append(str(arguments[3]))
    acknowledged: set[int] = set()  # `is_published` raises where it was disconnected as the second one was queued
    client.on_publish = lambda *arguments: acknowledged.add(arguments[2])
    client.reconnect_delay_set(1, 1)
    client.connect(*gateway.address("mqtt"))
    client.loop_start()
    sent = {client.publish(topic, payload, qos).mid, client.publish(f"{good}/y", b"behind", qos).mid}
    await wait_until(lambda: acknowledged == sent, 120)
    assert len(ends) == 1
    client.disconnect()
    await asyncio.to_thread(client.loop_stop)

    consumer = AIOKafkaConsumer(REFUSED_TOPIC, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    async with asyncio.timeout(60):
        record = await _find(consumer, payload)
    await consumer.stop()
    headers = dict(record.headers)
    assert headers["dead-letter.condition"] == refused.encode()
    assert headers["mqtt.topic"] == topic.encode()
    assert headers["gw.client"] == run.encode()
    assert headers["dead-letter.reason"]


async def test_another_packet_of_the_same_client_is_refused_like_the_first(
    gateway: GatewayProcess, new_topic: NewTopic
) -> None:
    """Only the refused message counts as such: the same packet identifier, with DUP."""
    topic = await new_topic(max_message_bytes="2000")
    client_id = uuid.uuid4().hex

    async def publish(packet_id: int, *, dup: bool) -> list[Any]:
        client = await RawClient.connect(gateway.address("mqtt"), client_id=client_id, version=4)
        client.send(Publish(f"{topic}/x", b"x" * 3000, 1, packet_id=packet_id, dup=dup))
        packets = list(await client.expect_end())
        client.drop()
        return packets

    assert await publish(1, dup=False) == []
    assert await publish(2, dup=True) == []
    assert await publish(2, dup=False) == []


def test_what_is_remembered_is_bounded() -> None:
    again = RefusedAgain(None, Counters())  # type: ignore[arg-type] # nothing is stored here
    for number in range(REMEMBERED + 10):
        again.remember(f"client-{number}", 7)
    assert again.take("client-9") == 0
    assert again.take("client-10") == 7
    assert again.take("client-10") == 0


def test_the_refused_message_is_looked_for_once_in_each_event() -> None:
    incoming = Incoming.__new__(Incoming)
    incoming._refused_id, incoming._resent = 9, None
    events = CountedList(one for _ in range(500) for one in (Publish("a", b""), Pubrel(1)))
    for position in range(0, 1000, 2):  # as `publish` is called: once for each run of publishes
        incoming._find_refused(events, position)
    assert events.taken == 1000
