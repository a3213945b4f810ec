"""Every acknowledged message arrives at a receiver of each protocol: the longest, emptiest and strangest ones that
each protocol allows. A message may be refused, but it must not be acknowledged and then lost."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from proton import Message, Timeout, symbol, ulong
from proton.utils import BlockingConnection, SendException

from protocols.mqtt.packets import Publish
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

LONGEST = 65_535
LARGE = 900_000
BINARY = "application/vnd.kafka.binary.v2+json"
V2 = {"Content-Type": "application/vnd.kafka.v2+json"}

TOPICS = {
    "plain": "{t}/a/b",
    "one level": "{t}",
    "empty key": "{t}/",
    "empty levels": "{t}//x//",
    "65,535 bytes": "{t}/" + "x" * LONGEST,  # cut to length
    "65,001 bytes of two each": "{t}/" + "é" * 33_000,
    "leading slash": "/{t}",
    "only slashes around": "//{t}/",
    "spaces": " {t} / ",
    "dollar": "${t}/x",
    "dot": "./{t}",
    "two dots": "../{t}",
    "dots": "{t}.a/x",
    "underscore": "{t}_b/x",  # {t}_a collides in Kafka with {t}.a: test_dotted_names
    "internal": "__{t}/x",
    "249 characters": "{t}-{fill}/x",
    "250 characters": "{t}-{fill}y/x",
    "upper case": "{t}-ABC/x",
    "beyond the plane": "{t}/\N{GRINNING FACE}/\u202e",
    "long and without a Kafka name": "é {t}/" + "é" * 32_700,
}
PROPERTIES: dict[str, dict[str, Any]] = {
    "user property": {"user_properties": (("n" * LONGEST, "v" * LONGEST),)},
    "empty user property": {"user_properties": (("", ""), ("", ""))},
    "reserved names": {"user_properties": tuple((name, "x") for name in ("mqtt.topic", "gw.client", "expiry", "to"))},
    "many": {"user_properties": tuple((str(number), "v" * 100) for number in range(1000))},  # mapping.max_headers
    "content type": {"content_type": "c" * LONGEST},
    "response topic": {"response_topic": "r/" * 32_767},
    "correlation data": {"correlation_data": b"\xff" * LONGEST},
    "format": {"payload_format_indicator": 1, "content_type": "", "message_expiry_interval": 0xFFFFFFFF},
}


class Readers:
    """One receiver of each protocol; records the mark at the start of each value."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.heard: dict[str, list[str]] = {"mqtt5": [], "mqtt311": [], "amqp": [], "http": []}
        self.published: dict[str, Publish] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False

    async def listen(self, mqtt_topics: list[str], kafka_topics: list[str]) -> None:
        """Wait until all receivers get what is stored from now on."""
        for name, version in (("mqtt5", 5), ("mqtt311", 4)):
            client = await RawClient.connect(self.gateway.address("mqtt"), version=version)
            codes = [(await client.subscribe(topic)).reason_codes[0] for topic in mqtt_topics]
            assert max(codes) <= 2
            self._tasks.append(asyncio.create_task(self._mqtt(name, client)))
        ready = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks.append(
            asyncio.create_task(
                asyncio.to_thread(self._amqp, kafka_topics, lambda: loop.call_soon_threadsafe(ready.set))
            )
        )
        self._tasks.append(asyncio.create_task(self._http(kafka_topics)))
        await ready.wait()

    async def _mqtt(self, name: str, client: RawClient) -> None:
        try:
            while True:
                packet = await client.message(timeout=600)
                if name == "mqtt5":
                    self.published.setdefault(mark(packet.payload), packet)
                self.heard[name].append(mark(packet.payload))
        finally:
            client.drop()

    def _amqp(self, topics: list[str], ready: Callable[[], object]) -> None:
        connection = BlockingConnection(f"amqp://{self.gateway.addresses['amqp']}", timeout=60)
        receivers = [connection.create_receiver(topic, credit=500) for topic in topics]
        ready()
        while not self._over:
            for receiver in receivers:
                with contextlib.suppress(Timeout):
                    while True:
                        message = receiver.receive(timeout=0.1)  # the body is a view into the message
                        body = message.body
                        receiver.accept()
                        self.heard["amqp"].append(mark(body.encode() if isinstance(body, str) else bytes(body or b"")))
        connection.close()

    async def _http(self, topics: list[str]) -> None:
        base = f"http://{self.gateway.addresses['http']}/consumers/g-{uuid.uuid4().hex}"
        async with aiohttp.ClientSession() as session:
            settings = {"name": "c", "format": "binary", "auto.offset.reset": "earliest"}
            async with session.post(base, json=settings, headers=V2) as answer:
                assert answer.status == 200
            async with session.post(f"{base}/instances/c/subscription", json={"topics": topics}, headers=V2) as answer:
                assert answer.status == 204
            while not self._over:
                async with session.get(f"{base}/instances/c/records?timeout=500", headers={"Accept": BINARY}) as answer:
                    records = await answer.json(content_type=None)
                    assert answer.status == 200, records
                self.heard["http"] += [mark(base64.b64decode(one["value"] or "")) for one in records]
            async with session.delete(f"{base}/instances/c") as answer:
                assert answer.status == 204

    async def expect(self, marks: set[str]) -> None:
        """Wait until every receiver has all of these marks."""

        def missing() -> dict[str, set[str]]:
            return {name: gone for name, heard in self.heard.items() if (gone := marks - set(heard))}

        with contextlib.suppress(TimeoutError):
            await wait_until(lambda: not missing() or any(task.done() for task in self._tasks), 40)
        for task in self._tasks:
            if task.done():
                task.result()
        gone = missing()
        assert not gone, f"{gone}, of what came: {[one for one in self.heard['amqp'] if one not in marks]}"

    async def close(self) -> None:
        self._over = True
        for task in self._tasks[:2]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def mark(value: bytes) -> str:
    return value[:200].partition(b"|")[0].decode(errors="replace")


@pytest.fixture
def name() -> str:
    return f"k{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def readers(bootstrap: str, name: str, new_gateway: Callable[..., GatewayProcess]) -> AsyncIterator[Readers]:
    """Start readers of a gateway whose catch-all topic only this test uses."""
    config = f'[kafka]\ncreate_topics = true\n[mapping]\ncatch_all_topic = "{name}-all"\n'
    made = Readers(await new_gateway(bootstrap, config=config).start())
    yield made
    await made.close()
    assert await made.gateway.stop() == 0


def topic_of(shape: str, name: str) -> str:
    text = shape.replace("{t}", name).replace("{fill}", "f" * (248 - len(name)))
    return text.encode()[:LONGEST].decode(errors="ignore")


async def test_every_message_that_mqtt_acknowledges_arrives(readers: Readers, name: str) -> None:
    topics = {label: topic_of(shape, name) for label, shape in TOPICS.items()}
    fill = "f" * (248 - len(name))
    own = [f"{name}{end}" for end in ("", "-all", ".a", "_b", f"-{fill}", "-ABC")]
    await readers.listen(list(topics.values()), own)
    client = await RawClient.connect(readers.gateway.address("mqtt"), maximum_packet_size=4_000_000)
    for number, (label, topic) in enumerate(topics.items()):
        assert await client.publish(topic, f"{label}|".encode(), qos=1 + number % 2) == 0, label
    for label, properties in PROPERTIES.items():
        assert await client.publish(f"{name}/a/b", f"{label}|".encode(), 1, **properties) == 0, label
    assert await client.publish(f"{name}/a/b", b"large|" + bytes(LARGE)) == 0
    await readers.expect({*topics, *PROPERTIES, "large"})
    for label, topic in topics.items():
        assert readers.published[label].topic == topic
    for label, asked in PROPERTIES.items():
        properties = readers.published[label].properties
        assert properties is not None
        for field, value in asked.items():
            if field != "message_expiry_interval":
                assert getattr(properties, field) == value, label
    await client.disconnect()


AMQP: dict[str, dict[str, Any]] = {
    "plain": {},
    "text": {"body": "text|", "inferred": False},
    "long subject": {"subject": "s" * 70_000, "reply_to": "r" * 70_000, "content_type": symbol("c" * 70_000)},
    "NUL and wildcards": {"subject": "\0", "reply_to": "a/#", "content_type": symbol("\0")},
    "correlation by number": {"correlation_id": ulong(2**64 - 1), "id": ulong(0)},
    "correlation by uuid": {"correlation_id": uuid.UUID(int=7), "id": uuid.UUID(int=8)},
    "correlation by bytes": {"correlation_id": bytes(70_000)},
    "properties": {"properties": {"": "", "n" * 70_000: "v", "v": "v" * 70_000, "b": b"\xff" * 50_000, "none": None}},
    "reserved properties": {"properties": {"mqtt.topic": "a/#", "gw.protocol": "mqtt5", "expiry": "1", "to": 7}},
    "annotations": {"annotations": {symbol("x-opt-mine"): "y" * 70_000, symbol("x-opt-bridge.key"): "a/\N{SNOWMAN}"}},
    "far expiry": {"ttl": 4_000_000.0, "expiry_time": 9_999_999_999.0, "creation_time": 1.0},
    "group": {"group_id": "g" * 70_000, "group_sequence": 2**32 - 1, "priority": 9, "durable": True},
    "large": {"body": b"large|" + bytes(LARGE)},
}


async def test_every_message_that_amqp_accepts_arrives(readers: Readers, name: str) -> None:
    """A group id beyond 65,535 bytes, as a key, is too long for an MQTT topic; MQTT receives all others."""
    await readers.listen([f"{name}/#"], [name])

    def send() -> set[str]:
        connection = BlockingConnection(f"amqp://{readers.gateway.addresses['amqp']}", timeout=60)
        sender = connection.create_sender(f"{name}/k")
        accepted = set()
        for label, fields in AMQP.items():
            try:
                sender.send(Message(**{"body": f"{label}|".encode(), "inferred": True, **fields}))
                accepted.add(label)
            except SendException:
                pass
        connection.close()
        return accepted

    accepted = await asyncio.to_thread(send)
    assert accepted >= AMQP.keys() - {"NUL and wildcards", "reserved properties", "group"}
    await readers.expect(accepted - {"group"})


HTTP: dict[str, dict[str, Any]] = {
    "plain": {},
    "no key": {"key": None},
    "empty key": {"key": ""},
    "strange key": {"key": " /\N{SNOWMAN}//"},
    "long key": {"key": "x" * 65_500},
    "headers": {"headers": [{"key": "", "value": ""}, {"key": "n" * 60_000, "value": "v" * 60_000}]},
    "binary header": {"headers": [{"key": "b", "value": "/wA="}, {"key": "\0", "value": "AA=="}]},
    "reserved headers": {"headers": [{"key": key, "value": "Iw=="} for key in ("mqtt.topic", "gw.client", "expiry")]},
    "large": {"value": "large|" + "x" * LARGE},
}


async def test_every_record_that_http_acknowledges_arrives(readers: Readers, name: str) -> None:
    await readers.listen([f"{name}/#"], [name])

    def encoded(text: str | None) -> str | None:
        return None if text is None else base64.b64encode(text.encode()).decode()

    stored = set()
    async with aiohttp.ClientSession() as session:
        for label, fields in HTTP.items():
            record = {
                **fields,
                "key": encoded(fields.get("key", "k")),
                "value": encoded(fields.get("value", f"{label}|")),
            }
            async with session.post(
                f"http://{readers.gateway.addresses['http']}/topics/{name}",
                data=io.BytesIO(json.dumps({"records": [record]}).encode()),
                headers={"Content-Type": BINARY},
            ) as answer:
                body = await answer.json(content_type=None)
                if answer.status == 200 and "offset" in body["offsets"][0]:
                    stored.add(label)
    assert stored >= HTTP.keys() - {"headers", "binary header", "reserved headers"}
    await readers.expect(stored)
