"""A message sent by any protocol is received unchanged by all three, and by a Kafka client.

Foreign clients only: paho (MQTT 5), proton's blocking client (AMQP 1.0), aiohttp and curl (HTTP), aiokafka.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
import paho.mqtt.client as paho
import pytest
from aiokafka import AIOKafkaConsumer
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from proton import Message
from proton.utils import BlockingConnection

from tests.support.gateway import GatewayProcess

KEY = "kitchen/temp"
BODY = b'{"temperature":21.5}'
CONTENT_TYPE = "application/json"
CORRELATION = "corr-4711"
REPLY_TO = "answers/me"
PROPERTIES = [("room", "küche"), ("unit", "°C")]
WAIT_S = 60


class Seen(NamedTuple):
    """A record as a client received it, in protocol-neutral terms."""

    key: str
    body: bytes
    content_type: str | None
    correlation: str | None
    reply_to: str | None
    properties: list[tuple[str, str]]


EXPECTED = Seen(KEY, BODY, CONTENT_TYPE, CORRELATION, REPLY_TO, PROPERTIES)

# senders


def send_mqtt(gateway: GatewayProcess, topic: str, qos: int = 1, retain: bool = False) -> None:
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id=f"send-{uuid.uuid4().hex}", protocol=paho.MQTTv5)
    kept = Properties(PacketTypes.CONNECT)
    kept.SessionExpiryInterval = 60 if qos == 2 else 0
    client.connect(*gateway.address("mqtt"), properties=kept)
    client.loop_start()
    properties = Properties(PacketTypes.PUBLISH)
    properties.ContentType = CONTENT_TYPE
    properties.CorrelationData = CORRELATION.encode()
    properties.ResponseTopic = REPLY_TO
    properties.UserProperty = PROPERTIES
    client.publish(f"{topic}/{KEY}", BODY, qos, retain, properties).wait_for_publish(WAIT_S)
    client.disconnect()
    client.loop_stop()


def send_amqp(gateway: GatewayProcess, topic: str) -> None:
    connection = BlockingConnection(f"amqp://{gateway.addresses['amqp']}", timeout=WAIT_S)
    message = Message(body=BODY, inferred=True, content_type=CONTENT_TYPE, correlation_id=CORRELATION)
    message.reply_to = REPLY_TO
    message.properties = dict(PROPERTIES)
    message.annotations = {"x-opt-bridge.key": KEY}
    connection.create_sender(topic).send(message)
    connection.close()


async def send_http(gateway: GatewayProcess, topic: str) -> None:
    headers = [("content-type", CONTENT_TYPE), ("correlation-id", CORRELATION), ("reply-to", REPLY_TO), *PROPERTIES]
    record = {
        "key": KEY,
        "value": json.loads(BODY),
        "headers": [{"key": name, "value": base64.b64encode(value.encode()).decode()} for name, value in headers],
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{gateway.addresses['http']}/topics/{topic}",
            data=json.dumps({"records": [record]}),
            headers={"Content-Type": "application/vnd.kafka.json.v2+json"},
        ) as response,
    ):
        assert response.status == 200, await response.text()
        assert "offset" in (await response.json(content_type=None))["offsets"][0]


async def send(protocol: str, gateway: GatewayProcess, topic: str) -> None:
    if protocol == "mqtt":
        await asyncio.to_thread(send_mqtt, gateway, topic)
    elif protocol == "mqtt, QoS 2, retained":  # of a persistent session, whose records carry headers for crash recovery
        await asyncio.to_thread(send_mqtt, gateway, topic, 2, True)
    elif protocol == "amqp":
        await asyncio.to_thread(send_amqp, gateway, topic)
    else:
        await send_http(gateway, topic)


# receivers: each is ready when it returns, and its result is the received record

Receiving = Callable[[], Awaitable[Seen]]


async def receive_mqtt(gateway: GatewayProcess, topic: str) -> Receiving:
    loop = asyncio.get_running_loop()
    subscribed, seen = asyncio.Event(), loop.create_future()
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id=f"recv-{uuid.uuid4().hex}", protocol=paho.MQTTv5)

    def on_message(_client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        p = message.properties
        correlation = getattr(p, "CorrelationData", None)
        found = Seen(
            message.topic.partition("/")[2],
            message.payload,
            getattr(p, "ContentType", None),
            correlation.decode() if correlation is not None else None,
            getattr(p, "ResponseTopic", None),
            [pair for pair in getattr(p, "UserProperty", []) if not pair[0].startswith("message-")],
        )
        loop.call_soon_threadsafe(lambda: seen.done() or seen.set_result(found))

    client.on_message = on_message
    client.on_subscribe = lambda *_: loop.call_soon_threadsafe(subscribed.set)
    client.connect(*gateway.address("mqtt"))
    client.subscribe(f"{topic}/#", qos=1)
    client.loop_start()
    await asyncio.wait_for(subscribed.wait(), WAIT_S)

    async def result() -> Seen:
        try:
            return await asyncio.wait_for(seen, WAIT_S)
        finally:
            client.disconnect()
            await asyncio.to_thread(client.loop_stop)

    return result


async def receive_amqp(gateway: GatewayProcess, topic: str) -> Receiving:
    ready = threading.Event()

    def work() -> Seen:
        connection = BlockingConnection(f"amqp://{gateway.addresses['amqp']}", timeout=WAIT_S)
        receiver = connection.create_receiver(topic, credit=10)
        ready.set()
        message = receiver.receive(timeout=WAIT_S)
        receiver.accept()
        connection.close()
        return Seen(
            message.annotations["x-opt-bridge.key"],
            bytes(message.body),
            message.content_type,
            message.correlation_id,
            message.reply_to,
            [(str(name), value) for name, value in (message.properties or {}).items()],
        )

    task = asyncio.get_running_loop().run_in_executor(None, work)
    assert await asyncio.to_thread(ready.wait, WAIT_S)

    async def result() -> Seen:
        return await asyncio.wait_for(task, WAIT_S)

    return result


def from_headers(key: bytes, value: bytes, headers: list[tuple[str, bytes]]) -> Seen:
    own = dict(headers)
    return Seen(
        key.decode(),
        value,
        own["content-type"].decode(),
        own["correlation-id"].decode(),
        own["reply-to"].decode(),
        [(name, raw.decode()) for name, raw in headers if name in dict(PROPERTIES)],
    )


async def receive_http(gateway: GatewayProcess, topic: str) -> Receiving:
    base = f"http://{gateway.addresses['http']}/consumers/g-{uuid.uuid4().hex}"
    control = {"Content-Type": "application/vnd.kafka.v2+json"}
    session = aiohttp.ClientSession()
    create = {"name": "one", "format": "binary", "auto.offset.reset": "earliest"}
    async with session.post(base, json=create, headers=control) as response:
        assert response.status == 200, await response.text()
    url = f"{base}/instances/one"
    async with session.post(f"{url}/subscription", json={"topics": [topic]}, headers=control) as response:
        assert response.status == 204, await response.text()

    async def result() -> Seen:
        try:
            async with asyncio.timeout(WAIT_S):
                records: list[dict[str, Any]] = []
                while not records:
                    accept = {"Accept": "application/vnd.kafka.binary.v2+json"}
                    async with session.get(f"{url}/records?timeout=1000", headers=accept) as response:
                        assert response.status == 200, await response.text()
                        records = json.loads(await response.text())
            async with session.delete(url) as response:
                assert response.status == 204
        finally:
            await session.close()
        decode = base64.b64decode
        headers = [(header["key"], decode(header["value"])) for header in records[0]["headers"]]
        return from_headers(decode(records[0]["key"]), decode(records[0]["value"]), headers)

    return result


async def receive_kafka(gateway: GatewayProcess, topic: str) -> Receiving:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=gateway.addresses["kafka"], auto_offset_reset="earliest")
    await consumer.start()

    async def result() -> Seen:
        try:
            record = await asyncio.wait_for(consumer.getone(), WAIT_S)
        finally:
            await consumer.stop()
        return from_headers(record.key, record.value, list(record.headers))

    return result


RECEIVERS = {"mqtt": receive_mqtt, "amqp": receive_amqp, "http": receive_http, "kafka": receive_kafka}


@pytest.mark.parametrize("sender", ["mqtt", "mqtt, QoS 2, retained", "amqp", "http"])
async def test_a_record_is_received_unchanged_by_every_protocol(
    gateway: GatewayProcess, new_topic: Callable[..., Awaitable[str]], sender: str
) -> None:
    topic = await new_topic()
    receiving = {name: await receive(gateway, topic) for name, receive in RECEIVERS.items()}
    await send(sender, gateway, topic)
    seen = {name: await result() for name, result in receiving.items()}
    for name, what in seen.items():
        assert what == EXPECTED, f"{sender} -> {name}"
