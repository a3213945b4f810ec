"""A rate holds for clients that connect again and again, or ask in parallel; who pays a debt waits a bounded time."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest

from protocols.mqtt import packets
from tests.gateway.rest.conftest import read_topic
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.mqtt_packets import encode_packet

RATE, BURST, READ, FLOODS = 200, 200, 400, 5
CONFIG = f"""
[[limits.rules]]
per = "principal"
in_messages_per_s = {RATE}
"""
SLACK_MS = 100  # timestamps are in milliseconds, and the gateway reads at the beginning of a turn
NewTopic = Callable[..., Awaitable[str]]


@pytest.fixture(scope="module")
async def limited(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    gateway = await GatewayProcess(tmp_path_factory.mktemp("again"), bootstrap, config=CONFIG).start()
    yield gateway
    assert await gateway.stop() == 0


async def flood_mqtt(gateway: GatewayProcess, topic: str) -> None:
    """Connect, publish in the same segment as CONNECT, and leave."""
    client = await RawClient.open(gateway.address("mqtt"))
    connect = packets.Connect(version=packets.Version.V5, client_id=uuid.uuid4().hex, clean_start=True, keep_alive=60)
    publish = packets.Publish(f"{topic}/a", b"x")
    said = [encode_packet(packet, packets.Version.V5) for packet in (connect, *[publish] * READ)]
    client.send_bytes(b"".join(said))
    await client.expect(packets.Connack)
    client.send(packets.Disconnect())
    client.close_writing()
    await client.expect_end()
    client.drop()


async def flood_websocket(gateway: GatewayProcess, topic: str) -> None:
    url = f"http://{gateway.addresses['http']}/stream"
    async with aiohttp.ClientSession() as http, http.ws_connect(url, protocols=["trivium.v1"]) as socket:
        records = [{"key": f"{topic}/a", "value": number} for number in range(READ)]
        await socket.send_json({"type": "produce", "id": "1", "topic": topic, "records": records})
        assert (await socket.receive_json(timeout=60))["type"] == "produced"


@pytest.mark.part("live websockets")
@pytest.mark.parametrize("flood", [flood_mqtt, flood_websocket], ids=["mqtt", "websocket"])
async def test_the_rate_of_a_principal_holds_over_reconnects(
    limited: GatewayProcess,
    bootstrap: str,
    new_topic: NewTopic,
    flood: Callable[[GatewayProcess, str], Awaitable[None]],
) -> None:
    topic = await new_topic(partitions=1)
    async with asyncio.TaskGroup() as group:
        for _ in range(FLOODS):
            group.create_task(flood(limited, topic))
        honest = await RawClient.connect(limited.address("mqtt"))
        await honest.publish(f"{topic}/a", b"honest", 1)  # it waits for its turn only
        await honest.disconnect()
    times = [record.timestamp for record in await read_topic(bootstrap, topic, FLOODS * READ + 1)]
    for number, first in enumerate(times):
        count = sum(one <= first + 1000 for one in times[number:])
        assert count <= BURST + READ + RATE * (1000 + SLACK_MS) / 1000


async def test_requests_that_begin_together_do_not_exceed_the_rate(
    limited: GatewayProcess, bootstrap: str, new_topic: NewTopic
) -> None:
    """Each began before there was a debt; those whose bodies come later are refused, and nothing of them is stored."""
    topic = await new_topic(partitions=1)
    body = json.dumps({"records": [{"value": number} for number in range(READ)]}).encode()
    head = (
        f"POST /topics/{topic} HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.kafka.json.v2+json\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    sockets = [await asyncio.open_connection(*limited.address("http"), local_addr=("127.0.0.9", 0)) for _ in range(5)]
    for reader, writer in sockets:
        writer.write(head.encode())
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
    for _, writer in sockets:
        writer.write(body)
    answers = [await reader.read() for reader, _ in sockets]
    for _, writer in sockets:
        writer.close()
    assert sorted(answer.split()[1] for answer in answers) == [b"200", *[b"429"] * 4]
    assert len(await read_topic(bootstrap, topic, READ)) == READ
