"""Requests and replies across protocols: an AMQP requester with a temporary queue, responders of every protocol."""

from __future__ import annotations

import asyncio
import base64
import uuid
from typing import Any

import aiohttp
from proton import Message
from proton.utils import BlockingConnection

from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

WAIT_S = 60
RECORDS = {"Content-Type": "application/vnd.kafka.binary.v2+json"}


class Requester:
    """proton's blocking client; used by one call at a time."""

    def __init__(self, gateway: GatewayProcess) -> None:
        host, port = gateway.address("amqp")
        self.connection = BlockingConnection(f"amqp://{host}:{port}", timeout=WAIT_S)
        self.replies = self.connection.create_receiver(None, dynamic=True, credit=10)
        self.address: str = self.replies.link.remote_source.address

    def ask(self, topic: str, correlation_id: str) -> None:
        request = Message(body=b"status?", inferred=True, reply_to=self.address, correlation_id=correlation_id)
        self.connection.create_sender(topic).send(request)

    def reply(self) -> tuple[bytes, Any]:
        message = self.replies.receive(WAIT_S)
        self.replies.accept()
        return bytes(message.body), message.correlation_id


async def test_an_mqtt_device_answers(gateway: GatewayProcess) -> None:
    """The device publishes to the request's response topic, and knows nothing about AMQP."""
    topic = f"device-{uuid.uuid4().hex[:8]}"
    requester = await asyncio.to_thread(Requester, gateway)
    device = await RawClient.connect(gateway.address("mqtt"))
    await device.subscribe(f"{topic}/#")
    await asyncio.to_thread(requester.ask, topic, "c-1")
    request = await device.message()
    assert request.payload == b"status?"
    assert request.properties.response_topic == requester.address
    correlation = request.properties.correlation_data
    await device.publish(requester.address, b"fine", correlation_data=correlation)
    assert await asyncio.to_thread(requester.reply) == (b"fine", "c-1")
    await device.disconnect()
    await asyncio.to_thread(requester.connection.close)


async def test_an_http_service_answers(gateway: GatewayProcess) -> None:
    requester = await asyncio.to_thread(Requester, gateway)
    topic, _, key = requester.address.partition("/")
    host, port = gateway.address("http")
    body = {"records": [{"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(b"fine").decode()}]}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"http://{host}:{port}/topics/{topic}", json=body, headers=RECORDS) as answer,
    ):
        assert answer.status == 200
    assert await asyncio.to_thread(requester.reply) == (b"fine", None)
    await asyncio.to_thread(requester.connection.close)
