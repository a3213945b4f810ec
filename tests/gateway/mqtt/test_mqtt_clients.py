"""MQTT from a user's view: paho against a running gateway; other libraries are in `tests/interop/mqtt`."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiokafka
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.support.gateway import GatewayProcess
from tests.support.waiting import wait_until

NewTopic = Callable[..., Awaitable[str]]


class Client:
    """paho driven from an event loop."""

    def __init__(self, gateway: GatewayProcess, client_id: str | None = None, **options: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.messages: list[paho.MQTTMessage] = []
        self.connack: Any = None
        self.connack_properties: Any = None
        self.disconnected: Any = None
        self.subacks: dict[int, list[Any]] = {}
        options.setdefault("protocol", paho.MQTTv5)
        self.paho = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=client_id or f"c-{uuid.uuid4().hex[:10]}", **options
        )
        self.paho.on_connect = self._on_connect
        self.paho.on_disconnect = self._on_disconnect
        self.paho.on_message = lambda _c, _d, message: self.messages.append(message)
        self.paho.on_subscribe = self._on_subscribe
        self._address = gateway.address("mqtt")

    async def connect(self, **options: Any) -> Client:
        self.paho.connect(*self._address, **options)
        self.paho.loop_start()
        await wait_until(lambda: self.connack is not None or self.disconnected is not None)
        return self

    async def subscribe(self, *arguments: Any, **options: Any) -> list[Any]:
        _, mid = self.paho.subscribe(*arguments, **options)
        await wait_until(lambda: mid in self.subacks, 90)  # `#` asks for the end of every topic of the whole run
        return self.subacks[mid]

    async def publish(self, topic: str, payload: bytes = b"", qos: int = 1, **options: Any) -> None:
        info = self.paho.publish(topic, payload, qos, **options)
        await wait_until(info.is_published)

    async def close(self) -> None:
        self.paho.disconnect()
        await asyncio.to_thread(self.paho.loop_stop)

    def _on_connect(self, _client: Any, _data: Any, _flags: Any, reason: Any, properties: Any) -> None:
        self.connack, self.connack_properties = reason, properties

    def _on_disconnect(self, _client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        self.disconnected = reason

    def _on_subscribe(self, _client: Any, _data: Any, mid: int, codes: Any, _properties: Any) -> None:
        self.subacks[mid] = codes


@pytest.mark.clause("MQTT-4.3.2-4", "MQTT311-4.3.2-2")
@pytest.mark.parametrize("protocol", [paho.MQTTv5, paho.MQTTv311])
async def test_a_publish_is_in_kafka_when_it_is_acknowledged(
    gateway: GatewayProcess, new_topic: NewTopic, bootstrap: str, protocol: int
) -> None:
    topic = await new_topic()
    client = await Client(gateway, protocol=protocol).connect()
    await client.publish(f"{topic}/a/b", b"one")
    consumer = aiokafka.AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    record = await asyncio.wait_for(consumer.getone(), 60)
    await consumer.stop()
    assert (record.key, record.value) == (b"a/b", b"one")
    headers = dict(record.headers)
    assert headers["mqtt.topic"] == f"{topic}/a/b".encode()
    assert headers["gw.protocol"] == (b"mqtt5" if protocol == paho.MQTTv5 else b"mqtt311")
    assert headers["gw.client"] == client.paho._client_id
    await client.close()


@pytest.mark.clause("MQTT-3.3.2-3", "MQTT-3.8.4-8")
async def test_wildcards_reach_every_mapped_topic(gateway: GatewayProcess, new_topic: NewTopic) -> None:
    one, two = await new_topic(), await new_topic()
    client = await Client(gateway).connect()
    everything = await Client(gateway).connect()
    await client.subscribe([(f"{one}/+/temp", 1), (f"{two}/#", 0)])
    await everything.subscribe("#", qos=1)
    for topic in (f"{one}/k/temp", f"{one}/k/hum", f"{two}", f"{two}/x/y/z"):
        await client.publish(topic, topic.encode())
    await wait_until(lambda: len(client.messages) >= 3)
    assert sorted(message.topic for message in client.messages) == sorted([f"{one}/k/temp", f"{two}", f"{two}/x/y/z"])
    assert {message.qos for message in client.messages if message.topic.startswith(two)} == {0}
    own = {one, two}
    await wait_until(lambda: sum(message.topic.split("/")[0] in own for message in everything.messages) == 4)
    await client.close()
    await everything.close()


async def test_a_subscription_comes_before_the_topic(gateway: GatewayProcess) -> None:
    """The first message after SUBACK arrives, even if it creates the Kafka topic."""
    name = f"later-{uuid.uuid4().hex[:8]}"
    wild, exact = await Client(gateway).connect(), await Client(gateway).connect()
    await wild.subscribe("+/x", qos=1)
    await exact.subscribe(f"{name}/x", qos=1)
    await exact.publish(f"{name}/x", b"first")
    await wait_until(lambda: exact.messages)
    await wait_until(lambda: any(message.topic == f"{name}/x" for message in wild.messages))
    await wild.close()
    await exact.close()


@pytest.mark.clause("MQTT-3.3.4-2", "MQTT-3.3.4-3", "MQTT-3.3.4-4", "MQTT-3.8.3-3")
async def test_overlapping_filters_give_one_copy_with_all_identifiers_and_no_local_is_kept(
    gateway: GatewayProcess, new_topic: NewTopic
) -> None:
    topic = await new_topic()
    client, other = await Client(gateway).connect(), await Client(gateway).connect()
    for number, (topic_filter, qos) in enumerate([(f"{topic}/#", 0), (f"{topic}/+", 1)], 1):
        properties = Properties(PacketTypes.SUBSCRIBE)
        properties.SubscriptionIdentifier = number
        await client.subscribe(topic_filter, qos, properties=properties)
    await other.subscribe(f"{topic}/a", options=SubscribeOptions(qos=1, noLocal=True))
    await other.publish(f"{topic}/a", b"mine")
    await client.publish(f"{topic}/a", b"yours")
    await wait_until(lambda: len(client.messages) == 2 and other.messages)
    assert {message.qos for message in client.messages} == {1}
    assert {tuple(sorted(message.properties.SubscriptionIdentifier)) for message in client.messages} == {(1, 2)}
    assert [message.payload for message in other.messages] == [b"yours"]
    await client.close()
    await other.close()


def log_of(gateway: GatewayProcess, client_id: str, event: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in gateway.log.read_text().splitlines() if client_id in line and event in line)
    return [line for line in lines if line["event"] == event]


@pytest.mark.clause("MQTT-3.1.4-3")
async def test_a_second_connection_takes_the_client_id_over(gateway: GatewayProcess) -> None:
    name = f"twin-{uuid.uuid4().hex[:8]}"
    first = await Client(gateway, name, reconnect_on_failure=False).connect()
    second = await Client(gateway, name).connect()
    await wait_until(lambda: first.disconnected is not None)
    assert first.disconnected.value == 0x8E
    await wait_until(lambda: log_of(gateway, name, "client disconnected") != [])
    assert log_of(gateway, name, "client disconnected")[0]["reason"] == "another connection uses this client id"
    await second.publish(f"{name}/x", b"still here")
    await second.close()
    await asyncio.to_thread(first.paho.loop_stop)


async def test_a_record_too_large_for_its_topic_is_refused_and_loses_nothing_else(
    gateway: GatewayProcess, new_topic: NewTopic, bootstrap: str
) -> None:
    topic = await new_topic(max_message_bytes="2000")
    client = await Client(gateway, reconnect_on_failure=False).connect()
    other = await Client(gateway).connect()
    before = client.paho.publish(f"{topic}/a", b"before", 1)
    client.paho.publish(f"{topic}/a", b"x" * 5000, 1)
    await wait_until(lambda: client.disconnected is not None)
    assert client.disconnected.value == 0x95
    assert before.is_published()
    await other.publish(f"{topic}/a", b"other")
    consumer = aiokafka.AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    stored = [(await asyncio.wait_for(consumer.getone(), 60)).value for _ in range(2)]
    await consumer.stop()
    assert stored == [b"before", b"other"]
    await other.close()
    await asyncio.to_thread(client.paho.loop_stop)


@pytest.mark.parametrize(
    "packet",
    [
        b"\x10\x00",
        b"\x30\x03\x00\x01a",
        b"GET / HTTP/1.1\r\n\r\n",
        b"AMQP\x00\x01\x00\x00",
        b"\x10\x0d\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x00\xf3\x00",
        b"\x10\x0d\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x00\x36\x04\x00\x01\xff\xff",
    ],
)
async def test_an_illegal_packet_closes_its_own_connection_only(gateway: GatewayProcess, packet: bytes) -> None:
    bystander = await Client(gateway).connect()
    reader, writer = await asyncio.open_connection(*gateway.address("mqtt"))
    writer.write(packet)
    await asyncio.wait_for(reader.read(), 60)  # to its end: the gateway closes
    writer.close()
    await bystander.publish(f"t-{uuid.uuid4().hex[:6]}/ok", b"fine")
    await bystander.close()


async def test_a_slow_subscriber_at_qos_1_gets_everything_in_order_and_holds_nobody(
    gateway: GatewayProcess, new_topic: NewTopic
) -> None:
    topic = await new_topic(partitions=1)
    slow_properties = Properties(PacketTypes.CONNECT)
    slow_properties.ReceiveMaximum = 3
    slow = await Client(gateway, manual_ack=True).connect(properties=slow_properties)
    fast = await Client(gateway).connect()
    for client in (slow, fast):
        await client.subscribe(f"{topic}/#", qos=1)
    publisher = await Client(gateway).connect()
    infos = [publisher.paho.publish(f"{topic}/a", b"%d" % number, 1) for number in range(500)]
    await wait_until(lambda: all(info.is_published() for info in infos), 60)
    await wait_until(lambda: len(fast.messages) == 500)
    assert len(slow.messages) <= 3

    acknowledged = 0

    def drain() -> bool:
        nonlocal acknowledged
        while acknowledged < len(slow.messages):
            slow.paho.ack(slow.messages[acknowledged].mid, 1)
            acknowledged += 1
        return len(slow.messages) >= 500

    await wait_until(drain)
    assert [int(message.payload) for message in slow.messages] == list(range(500))
    for client in (slow, fast, publisher):
        await client.close()


@pytest.mark.clause("MQTT-3.1.2-22")
async def test_a_silent_client_is_dropped_after_one_and_a_half_keep_alives(gateway: GatewayProcess) -> None:
    reader, writer = await asyncio.open_connection(*gateway.address("mqtt"))
    writer.write(b"\x10\x10\x00\x04MQTT\x05\x02\x00\x01\x00\x00\x03abc")
    loop = asyncio.get_running_loop()
    started = loop.time()
    said = await asyncio.wait_for(reader.read(), 60)
    assert 1.4 <= loop.time() - started < 20
    assert said[0] == 0x20
    assert b"\xe0" in said
    assert said[said.rindex(b"\xe0") + 2] == 0x8D
    writer.close()
