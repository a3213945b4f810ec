"""A client cannot forge headers that readers trust as the gateway's: every way in against every way out."""

from __future__ import annotations

import asyncio
import base64
import uuid
from typing import Any

import aiohttp
import pytest
from proton import Message
from proton.utils import BlockingConnection

from mapping.record import RESERVED_HEADERS, RESERVED_PREFIXES, TRUSTED_HEADERS, TRUSTED_PREFIXES
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

WAIT_S = 60
FORGED = "forged"
VOUCHED = sorted(TRUSTED_HEADERS | {f"{prefix}topic" for prefix in TRUSTED_PREFIXES})
RESERVED = sorted(RESERVED_HEADERS | {f"{prefix}topic" for prefix in RESERVED_PREFIXES} | {"dead-letter.reason"})
VALUE = base64.b64encode(FORGED.encode()).decode()


class AmqpPeer:
    """proton's blocking client; used by one call at a time."""

    def __init__(self, gateway: GatewayProcess, topic: str) -> None:
        host, port = gateway.address("amqp")
        self.connection = BlockingConnection(f"amqp://{host}:{port}", timeout=WAIT_S)
        self.receiver = self.connection.create_receiver(topic, credit=20)
        self.topic = topic

    def send(self) -> None:
        properties = dict.fromkeys(RESERVED, FORGED)
        message = Message(body=b"amqp", inferred=True, properties=properties)
        message.annotations = {"x-opt-bridge.key": "amqp", "x-opt-dead-letter-topic": FORGED}
        self.connection.create_sender(self.topic).send(message)

    def receive(self, count: int) -> list[Message]:
        found = []
        for _ in range(count):
            found.append(self.receiver.receive(WAIT_S))
            self.receiver.accept()
        return found


async def post(gateway: GatewayProcess, path: str, media: str, **options: Any) -> tuple[int, bytes]:
    host, port = gateway.address("http")
    fields = {"Content-Type": media, **options.pop("headers", {})}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"http://{host}:{port}{path}", headers=fields, **options) as answer,
    ):
        return answer.status, await answer.read()


async def send_all(gateway: GatewayProcess, topic: str, mqtt: RawClient) -> None:
    """Send one record by each way in, with the way as its key."""
    headers = [{"key": name, "value": VALUE} for name in VOUCHED]
    record = {"key": "http", "value": "http", "headers": headers}
    json_type = "application/vnd.kafka.json.v2+json"
    assert (await post(gateway, f"/topics/{topic}", json_type, json={"records": [record]}))[0] == 200
    assert (await post(gateway, f"/v2/topics/{topic}", json_type, json={"records": [record | {"key": "v2"}]}))[0] == 200
    lines = {"key": "lines", "value": "lines", "headers": headers}
    assert (await post(gateway, f"/topics/{topic}/records", "application/x-ndjson", json=lines))[0] == 200
    host, port = gateway.address("http")
    async with aiohttp.ClientSession() as client, client.get(f"http://{host}:{port}/v3/clusters") as answer:
        cluster = (await answer.json())["data"][0]["cluster_id"]
    one = {
        "key": {"type": "STRING", "data": "v3"},
        "headers": [{"name": name, "value": VALUE} for name in VOUCHED],
    }
    path = f"/v3/clusters/{cluster}/topics/{topic}/records"
    assert (await post(gateway, path, "application/json", json=one))[0] == 200
    await mqtt.publish(f"{topic}/mqtt", b"mqtt", user_properties=tuple((name, FORGED) for name in RESERVED))


@pytest.mark.part("live websockets")
async def test_no_client_can_forge_the_gateways_headers(gateway: GatewayProcess) -> None:
    topic = f"vouched-{uuid.uuid4().hex[:8]}"
    mqtt = await RawClient.connect(gateway.address("mqtt"))
    await mqtt.subscribe(f"{topic}/#")
    amqp = await asyncio.to_thread(AmqpPeer, gateway, topic)
    fields = {f"Record-Header-{name}": FORGED for name in RESERVED}
    request = f"/requests/{topic}%2Frequest?timeout=30000"
    asking = asyncio.create_task(post(gateway, request, "text/plain", data=b"?", headers=fields))
    await send_all(gateway, topic, mqtt)
    await asyncio.to_thread(amqp.send)
    ways = {"http", "v2", "lines", "v3", "request", "mqtt", "amqp"}

    seen = {message.annotations["x-opt-bridge.key"]: message for message in await asyncio.to_thread(amqp.receive, 7)}
    assert seen.keys() == ways
    for way, message in seen.items():
        said = (message.user_id, message.address, message.subject, message.group_id)
        assert (way, *said) == (way, b"", None, None, None)
        assert not [name for name in message.annotations if str(name).startswith("x-opt-dead-letter")]
        expected = VOUCHED if way in {"http", "v2", "lines", "v3"} else RESERVED
        assert (way, {name: message.properties.get(name) for name in expected}) == (
            way,
            dict.fromkeys(expected, FORGED),
        )

    packets = [await mqtt.message() for _ in ways]
    asking.cancel()  # it gets no answer
    await asyncio.wait([asking])
    for packet in packets:
        way = packet.topic.rpartition("/")[2]
        given = dict(packet.properties.user_properties)
        expected = VOUCHED if way in {"http", "v2", "lines", "v3"} else RESERVED
        assert (way, {name: given.get(name) for name in expected}) == (way, dict.fromkeys(expected, FORGED))
        assert (packet.properties.response_topic is None) == (way != "request")
    host, port = gateway.address("http")
    async with aiohttp.ClientSession() as client:
        for partition in range(3):
            async with client.get(f"http://{host}:{port}/topics/{topic}/records?partition={partition}") as answer:
                for record in await answer.json(content_type=None):
                    names = {header["key"] for header in record["headers"]}
                    assert not names & {"user-id", "to", "dead-letter.topic", "dead-letter.reason", "gw.topic"}
                    assert names >= {f"user.{name}" for name in VOUCHED}
    await mqtt.disconnect()
    await asyncio.to_thread(amqp.connection.close)
