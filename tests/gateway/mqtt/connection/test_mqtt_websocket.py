"""MQTT over WebSocket in a running gateway: on the HTTP port's path, and on a listener of its own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import paho.mqtt.client as paho
import pytest

from protocols.mqtt.packets import Connect, Disconnect, Subscribe, Subscription, Version, Will
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient, RawClient
from tests.support.mqtt_packets import encode_packet
from tests.support.waiting import wait_until
from tests.support.websocket import CLOSE, frame, handshake, parse

LISTENERS = ("http", "mqtt_websocket")
CONNECT = b"\x10\x0d\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x00"
NewTopic = Callable[..., Awaitable[str]]


async def ask(gateway: GatewayProcess, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, Any]:
    url = f"http://{gateway.addresses['http']}{path}"
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=headers) as response:
        return response.status, response.headers, await response.json(content_type=None)


@pytest.mark.clause("MQTT-6.0.0-3", "MQTT311-6.0.0-3")
@pytest.mark.clause("MQTT-6.0.0-4", "MQTT311-6.0.0-4")
@pytest.mark.parametrize("protocol", [paho.MQTTv5, paho.MQTTv311])
@pytest.mark.parametrize("listener", LISTENERS)
async def test_paho_publishes_and_receives(
    gateway: GatewayProcess, new_topic: NewTopic, listener: str, protocol: Any
) -> None:
    topic = await new_topic()
    over_tcp = await PahoClient(gateway.address("mqtt")).connect()
    client = await PahoClient(gateway.address(listener), transport="websockets", protocol=protocol).connect()
    for subscriber in (over_tcp, client):
        assert await subscriber.subscribe(f"{topic}/#") == 1
    large = b"x" * 300_000
    assert await client.publish(f"{topic}/large", large) == 0
    assert await over_tcp.publish(f"{topic}/small", b"small") == 0
    for subscriber in (over_tcp, client):
        await wait_until(lambda one=subscriber: len(one.messages) == 2)
        assert {message.topic: message.payload for message in subscriber.messages} == {
            f"{topic}/large": large,
            f"{topic}/small": b"small",
        }
        await subscriber.close()


@pytest.mark.clause("MQTT-6.0.0-2", "MQTT311-6.0.0-2")
@pytest.mark.parametrize("listener", LISTENERS)
async def test_packets_need_not_fit_frames(gateway: GatewayProcess, listener: str) -> None:
    reader, writer = await asyncio.open_connection(*gateway.address(listener))
    ping = b"\xc0\x00"
    said = CONNECT + ping * 3
    writer.write(handshake("/mqtt") + b"".join(frame(said[at : at + 5]) for at in range(0, len(said), 5)))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    heard = b""
    while not (stream := b"".join(payload for _, payload in parse(heard)[0])).endswith(b"\xd0\x00" * 3):
        heard += await reader.read(1000)
    assert stream[:1] == b"\x20"
    writer.write(frame(b"\xe0\x00"))
    assert parse(await reader.read(1000)) == ([(CLOSE, b"\x03\xe8")], b"")
    writer.close()


@pytest.mark.parametrize("listener", LISTENERS)
async def test_each_packet_is_in_a_frame_of_its_own(gateway: GatewayProcess, listener: str) -> None:
    reader, writer = await asyncio.open_connection(*gateway.address(listener))
    writer.write(handshake("/mqtt") + frame(CONNECT + b"\xc0\x00" * 50))
    await reader.readuntil(b"\r\n\r\n")
    heard = b""
    while len(packets := parse(heard)[0]) < 51:
        heard += await reader.read(10_000)
    assert packets[0][1][:1] == b"\x20"
    assert [packet for _, packet in packets[1:]] == [b"\xd0\x00"] * 50
    writer.close()


async def test_the_path_belongs_to_websockets(gateway: GatewayProcess) -> None:
    status, headers, body = await ask(gateway, "/mqtt")
    assert (status, headers["Upgrade"], body["error_code"]) == (426, "websocket", 426)
    status, headers, _ = await ask(gateway, "/mqtt", "POST")
    assert (status, headers["Allow"]) == (405, "GET")
    status, _, body = await ask(gateway, "/mqtt", Origin="https://evil.example", **UPGRADE)
    assert (status, body["message"]) == (403, "Pages of this origin may not connect")
    status, _, _ = await ask(gateway, "/mqtt/", **UPGRADE)
    assert status == 404


UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Protocol": "mqtt",
}


async def test_a_stop_closes_over_websocket_too(bootstrap: str, new_gateway: Callable[..., GatewayProcess]) -> None:
    gateway = await new_gateway(bootstrap, "--mqtt-websocket", "127.0.0.1:0").start()
    clients = [
        await PahoClient(gateway.address(listener), transport="websockets", client_id=uuid.uuid4().hex).connect()
        for listener in LISTENERS
    ]
    url = f"http://{gateway.addresses['management']}"
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/ready") as response:
            assert (await response.json())["listeners"]["mqtt_websocket"] is True
        async with session.get("/metrics") as response:
            metrics = (await response.text()).splitlines()
    assert "trivium_mqtt_connections 2.0" in metrics
    assert "trivium_http_connections 0.0" in metrics
    assert "trivium_mqtt_websocket_handshaking 0.0" in metrics
    assert 'trivium_http_answers_total{operation="openWebSocket",status="1xx"} 1.0' in metrics
    assert await gateway.stop() == 0
    for client in clients:
        await wait_until(lambda one=client: one.disconnected is not None)
        assert client.disconnected.value == 0x8B
        await client.close()


@pytest.mark.clause("MQTT-3.14.4-3")
async def test_no_will_of_a_client_that_has_said_goodbye_before_it_closed_its_websocket(
    gateway: GatewayProcess,
) -> None:
    topic = f"wills-{uuid.uuid4().hex[:8]}"
    watcher = await RawClient.connect(gateway.address("mqtt"))
    await watcher.subscribe(topic)
    async with aiohttp.ClientSession() as http:
        for number in range(5):
            socket = await http.ws_connect(f"http://{gateway.addresses['http']}/mqtt", protocols=("mqtt",))
            connect = Connect(Version.V5, f"{topic}-{number}", will=Will(topic, b"gone"))
            await socket.send_bytes(encode_packet(connect, Version.V5))
            await socket.receive_bytes()
            subscribe = Subscribe(1, (Subscription(f"{topic}-{number}", 0),))
            await socket.send_bytes(encode_packet(subscribe, Version.V5) + encode_packet(Disconnect(), Version.V5))
            await socket.close()
    last = await RawClient.connect(gateway.address("mqtt"))
    await last.publish(topic, b"last")
    assert (await watcher.message()).payload == b"last"
    last.drop()
    watcher.drop()
