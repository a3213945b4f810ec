"""HTTP requests that MQTT and AMQP clients answer, through complete gateway processes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from proton import Message
from proton.utils import BlockingConnection

from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tests.support.waiting import wait_until

pytestmark = pytest.mark.part("device requests")

LIMIT_MS = 40_000


def url(process: GatewayProcess, address: str, timeout_ms: int = LIMIT_MS) -> str:
    host, port = process.address("http")
    return f"http://{host}:{port}/requests/{quote(address, safe='')}?timeout={timeout_ms}"


@asynccontextmanager
async def device(
    process: GatewayProcess, topic: str, reply: Callable[[paho.MQTTMessage], bytes | None]
) -> AsyncIterator[PahoClient]:
    """An MQTT client that answers requests as in MQTT 5 section 4.10."""
    client = PahoClient(process.address("mqtt"))

    def on_message(connection: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        client.messages.append(message)
        payload = reply(message)
        if payload is None:
            return
        properties = Properties(PacketTypes.PUBLISH)
        properties.CorrelationData = message.properties.CorrelationData  # type: ignore[union-attr]
        properties.ContentType = "text/plain"
        properties.UserProperty = [("state", "é on"), ("a/b", "100%")]
        connection.publish(message.properties.ResponseTopic, payload, 1, properties=properties)  # type: ignore[union-attr]

    client.paho.on_message = on_message
    await client.connect()
    assert await client.subscribe(topic) < 0x80
    try:
        yield client
    finally:
        await client.close()


async def test_an_mqtt_client_answers(gateway: GatewayProcess, new_topic: Any) -> None:
    topic = f"{await new_topic()}/lamp/set"
    async with (
        device(gateway, topic, lambda message: b"did " + message.payload) as lamp,
        aiohttp.ClientSession() as http,
    ):
        fields = {"Content-Type": "text/x-order", "Record-Header-Room%201": "k%C3%BCche", "traceparent": "00-a-b-01"}
        async with http.post(url(gateway, topic), data=b"on", headers=fields) as answer:
            assert (answer.status, await answer.read()) == (200, b"did on")
            assert answer.headers["Content-Type"] == "text/plain"
            assert answer.headers["Record-Header-state"] == "%C3%A9%20on"
            assert answer.headers["Record-Header-a%2Fb"] == "100%25"
        properties: Any = lamp.messages[0].properties
        assert (lamp.messages[0].topic, properties.ContentType) == (topic, "text/x-order")
        assert ("Room 1", "küche") in properties.UserProperty
        assert ("traceparent", "00-a-b-01") in properties.UserProperty
        assert 0 < properties.MessageExpiryInterval <= LIMIT_MS // 1000
        answers = await asyncio.gather(*(ask(http, gateway, topic, b"%d" % number) for number in range(50)))
        assert answers == [(200, b"did %d" % number) for number in range(50)]
        correlations = {message.properties.CorrelationData for message in lamp.messages}  # type: ignore[union-attr]
        assert len(correlations) == len(lamp.messages)


async def ask(http: aiohttp.ClientSession, process: GatewayProcess, address: str, body: bytes) -> tuple[int, bytes]:
    async with http.post(url(process, address), data=body) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize("prefix", ["", "topic://"])
async def test_an_amqp_client_answers(gateway: GatewayProcess, new_topic: Any, prefix: str) -> None:
    topic = await new_topic()
    attached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def answer_one() -> Message:
        connection = BlockingConnection(f"amqp://{gateway.addresses['amqp']}", timeout=60)
        try:
            receiver = connection.create_receiver(topic, credit=1)
            loop.call_soon_threadsafe(attached.set)
            request = receiver.receive(40)
            receiver.accept()
            reply = Message(
                body=b"did " + bytes(request.body),
                inferred=True,
                address=request.reply_to,
                correlation_id=request.correlation_id,
                content_type="application/x-state",
                properties={"state": "on"},
            )
            connection.create_sender(request.reply_to).send(reply)
            return request
        finally:
            connection.close()

    answering = asyncio.create_task(asyncio.to_thread(answer_one))
    await attached.wait()
    target = url(gateway, f"{prefix}{topic}/pump")
    async with aiohttp.ClientSession() as http, http.post(target, data=b"go") as answer:
        assert (answer.status, await answer.read()) == (200, b"did go")
        assert answer.headers["Content-Type"] == "application/x-state"
        assert answer.headers["Record-Header-state"] == "on"
    request = await answering
    assert request.annotations["x-opt-bridge.key"] == "pump"
    assert 0 < request.ttl <= LIMIT_MS / 1000


async def test_the_device_and_its_client_are_at_different_gateways(
    gateway: GatewayProcess, new_gateway: Any, new_topic: Any, bootstrap: str
) -> None:
    topic = f"{await new_topic()}/valve"
    other = await new_gateway(bootstrap, config="[kafka]\ncreate_topics = true\n").start()
    async with device(other, topic, lambda message: message.payload[::-1]), aiohttp.ClientSession() as http:
        both = await asyncio.gather(ask(http, gateway, topic, b"abc"), ask(http, other, topic, b"xyz"))
        assert both == [(200, b"cba"), (200, b"zyx")]


async def test_a_request_without_an_answer_times_out(gateway: GatewayProcess, new_topic: Any) -> None:
    topic = f"{await new_topic()}/mute"
    async with device(gateway, topic, lambda _: None) as mute, aiohttp.ClientSession() as http:
        began = time.monotonic()
        async with http.post(url(gateway, topic, 4000), data=b"?") as answer:  # long enough to reach the device
            assert answer.status == 504
            assert "4000 ms" in (await answer.json(content_type=None))["message"]
        assert round(time.monotonic() - began, 2) >= 4  # the gateway's clock counts milliseconds
        # The answer comes too late, and does not reach another open request.
        await wait_until(lambda: mute.messages)
        late = await late_answers(gateway)
        properties = Properties(PacketTypes.PUBLISH)
        properties.CorrelationData = mute.messages[0].properties.CorrelationData  # type: ignore[union-attr]
        mute.paho.publish(mute.messages[0].properties.ResponseTopic, b"late", 1, properties=properties)  # type: ignore[union-attr]
        async with asyncio.timeout(60):
            while await late_answers(gateway) == late:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.05)


async def late_answers(process: GatewayProcess) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"http://{process.addresses['management']}/metrics") as answer:
        text = await answer.text()
    for line in text.splitlines():
        if line.startswith("trivium_http_devices_late_answers_total "):
            return float(line.split()[1])
    raise AssertionError("not counted")


async def test_an_expired_request_is_never_delivered(gateway: GatewayProcess, new_topic: Any) -> None:
    """A device that reconnects to its session gets requests that are still waiting, and not those that timed out."""
    topic = f"{await new_topic()}/door"
    kept = Properties(PacketTypes.CONNECT)
    kept.SessionExpiryInterval = 600
    door = PahoClient(gateway.address("mqtt"), client_id=f"door-{topic[:20]}")
    await door.connect(clean_start=True, properties=kept)
    assert await door.subscribe(topic) < 0x80
    await door.close()
    async with aiohttp.ClientSession() as http:
        async with http.post(url(gateway, topic, 200), data=b"open") as answer:
            assert answer.status == 504
        again = PahoClient(gateway.address("mqtt"), client_id=f"door-{topic[:20]}")
        await again.connect(clean_start=False, properties=kept)
        asking = asyncio.create_task(ask(http, gateway, topic, b"close"))
        await wait_until(lambda: again.messages)
        assert [message.payload for message in again.messages] == [b"close"]
        asking.cancel()
        await again.close()


@pytest.mark.parametrize(
    ("address", "status"), [("a/+/b", 422), ("a/#", 422), ("topic://__state/x", 422), ("topic://", 422)]
)
async def test_an_invalid_address_is_refused(gateway: GatewayProcess, address: str, status: int) -> None:
    async with aiohttp.ClientSession() as http, http.post(url(gateway, address), data=b"x") as answer:
        assert answer.status == status
