"""Server-sent events: no record is missed, repeated or dropped if clients read slowly, disconnect or reconnect."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import trustme
from aiokafka import AIOKafkaConsumer, TopicPartition

from gateway.settings.config import AccessRule, SecurityConfig
from tests.conftest import NewTopicFactory
from tests.gateway.rest.conftest import JSON_RECORDS, Gateway, ask, raw_exchange, running_gateway
from tests.support.waiting import wait_until


class Event(NamedTuple):
    id: str | None
    kind: str | None
    data: Any


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    """Yield events without comments; also events without data, since they update the position."""
    fields: dict[str, str] = {}
    async for line in response.content:
        text = line.decode().rstrip("\n")
        if text:
            name, _, value = text.partition(": ")
            fields[name] = value
        elif fields:
            data = fields.get("data")
            yield Event(fields.get("id"), fields.get("event"), None if data is None else json.loads(data))
            fields = {}


async def some(response: aiohttp.ClientResponse, count: int) -> list[Event]:
    """The next `count` events with data."""
    found: list[Event] = []
    async with asyncio.timeout(60):
        async for event in events(response):
            if event.data is not None:
                found.append(event)
            if len(found) == count:
                break
    return found


@asynccontextmanager
async def stream(http: aiohttp.ClientSession, topic: str, query: str = "", **headers: str) -> AsyncIterator[Any]:
    async with http.get(f"/topics/{topic}/stream?{query}", headers=headers) as response:
        assert response.status == 200, await response.read()
        assert response.content_type == "text/event-stream"
        yield response


async def store(http: aiohttp.ClientSession, topic: str, values: Any, **more: Any) -> None:
    records = [{"value": value, **more} for value in values]
    assert (await ask(http, "POST", f"/topics/{topic}", {"records": records}, headers=JSON_RECORDS))[0] == 200


def values(found: list[Event]) -> list[Any]:
    return [event.data["value"] for event in found]


async def test_records_stored_from_now_on_come_in_order(
    http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    await store(http, topic, ["old"])
    async with stream(http, topic) as one, stream(http, topic, "format=binary") as two:
        await store(http, topic, range(5))
        found = await some(one, 5)
        assert values(found) == list(range(5))
        assert [event.id for event in found] == [f"0:{offset}" for offset in range(2, 7)]
        assert values(await some(two, 5)) == ["MA==", "MQ==", "Mg==", "Mw==", "NA=="]


async def test_a_client_that_reconnects_continues_after_the_last_event(
    http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=3)
    await store(http, topic, range(20))
    seen: list[Any] = []
    position = "0:0,1:0,2:0"
    for _ in range(4):
        async with stream(http, topic, "from=end", **{"Last-Event-ID": position}) as response:
            found = await some(response, 5)
            seen += values(found)
            assert found[-1].id is not None
            position = found[-1].id
    assert sorted(seen) == list(range(20))
    async with stream(http, topic, f"from={position}") as response:
        await store(http, topic, ["new"])
        assert values(await some(response, 1)) == ["new"]


async def test_places_limits_and_filters(http: aiohttp.ClientSession, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=2)
    for number in range(8):
        await store(http, topic, [number], key=f"k{number % 4}", partition=number % 2, timestamp=1000 + number)
    for query, expected in (
        ("from=beginning&limit=8", list(range(8))),
        ("from=beginning&partition=1&limit=4", [1, 3, 5, 7]),
        ("partition=0&offset=2&limit=2", [4, 6]),
        ("timestamp=1006&limit=2", [6, 7]),
        ("from=beginning&key=k1&key=k2&limit=4", [1, 2, 5, 6]),
        ("from=beginning&header=gw.protocol:http&limit=8", list(range(8))),
    ):
        async with stream(http, topic, query) as response:
            body = await asyncio.wait_for(response.read(), 60)
            data = [json.loads(line[6:])["value"] for line in body.splitlines() if line.startswith(b"data: ")]
            assert sorted(data) == expected, query
    async with stream(http, topic, "duration=1") as response:
        assert await asyncio.wait_for(response.read(), 60) == b"retry: 2000\n\n"
    path = f"/topics/{topic}/stream"
    for query, status in (("from=0:9", 416), ("partition=4", 404), ("offset=1", 422), ("limit=0", 400)):
        assert (await ask(http, "GET", f"{path}?{query}"))[0] == status, query
    assert (await ask(http, "GET", path, headers={"Accept": "application/json"}))[0] == 406
    assert (await ask(http, "GET", path, headers={"Last-Event-ID": "x"}))[0] == 422
    assert (await ask(http, "GET", "/topics/__internal/stream"))[0] == 403


async def test_a_slow_client_misses_nothing_and_delays_no_others(
    gateway: Gateway, http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    host, _, port = gateway.listener.bound.rpartition(":")
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, (host, int(port)))
    await loop.sock_sendall(slow, f"GET /topics/{topic}/stream HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    before = gateway.counts("streams")
    await wait_until(lambda: gateway.counts("streams").open == before.open + 1)
    async with stream(http, topic) as quick:
        fell_behind = gateway.live_reader.statistics().fell_behind
        sent = 0
        while gateway.live_reader.statistics().fell_behind == fell_behind:  # as many as the sockets' buffers hold
            await store(http, topic, ["x" * 60_000] * 10)
            assert len(await some(quick, 10)) == 10
            sent += 10
            assert sent < 2000
        await store(http, topic, ["last"])
        assert values(await some(quick, 1)) == ["last"]
    received = bytearray()
    async with asyncio.timeout(60):
        while b'"last"' not in received[-1000:]:
            received += await loop.sock_recv(slow, 1 << 20)
    offsets = [int(part.split(b"\n")[0].split(b":")[-1]) for part in bytes(received).split(b"id: ")[1:]]
    offsets = [offset for number, offset in enumerate(offsets) if not number or offset != offsets[number - 1]]
    assert offsets == list(range(1, sent + 2))
    slow.close()
    await wait_until(lambda: gateway.counts("streams").open == before.open)


async def test_silence_is_filled_with_a_position(bootstrap: str, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=2)
    async with (
        running_gateway(bootstrap, http={"stream_heartbeat_s": 0.05}) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
        stream(http, topic, "key=none") as response,
    ):
        await store(http, topic, range(3), key="other", partition=1)
        async with asyncio.timeout(60):
            async for event in events(response):
                assert event.data is None
                if event.id == "0:0,1:3":
                    break


async def test_a_group_is_committed_after_the_records_that_the_client_has(
    bootstrap: str, gateway: Gateway, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    group = f"{topic}-group"
    async with aiohttp.ClientSession(gateway.url) as http:
        await store(http, topic, range(10))
        async with stream(http, topic, f"group={group}&from=beginning&limit=4") as response:
            found = await some(response, 4)
            assert values(found) == [0, 1, 2, 3]
            assert found[0].id is None
            assert await asyncio.wait_for(response.read(), 60) == b""
        await wait_until(lambda: gateway.counts("streams").open == 0)
        async with stream(http, topic, f"group={group}&limit=6") as response:
            assert values(await some(response, 6)) == [4, 5, 6, 7, 8, 9]
            await asyncio.wait_for(response.read(), 60)
        for query in ("partition=0", "offset=1&partition=0", "timestamp=1", "from=0:1"):
            status, _ = await ask(http, "GET", f"/topics/{topic}/stream?group={group}&{query}")
            assert status == 422, query
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=group)
    await consumer.start()
    try:
        async with asyncio.timeout(60):
            while await consumer.committed(TopicPartition(topic, 0)) != 10:  # noqa: ASYNC110 - Kafka tells nobody
                await asyncio.sleep(0.05)
    finally:
        await consumer.stop()


async def test_records_that_a_lost_client_did_not_get_come_again(gateway: Gateway, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    query = f"group={topic}-group&from=beginning"
    async with aiohttp.ClientSession(gateway.url) as http:
        for _ in range(4):
            await store(http, topic, ["x" * 50_000] * 15)
        host, _, port = gateway.listener.bound.rpartition(":")
        lost = socket.socket()
        lost.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lost.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(lost, (host, int(port)))
        await loop.sock_sendall(lost, f"GET /topics/{topic}/stream?{query} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with asyncio.timeout(60):
            assert await loop.sock_recv(lost, 1000)
            await wait_until(lambda: gateway.counts("streams").open == 1)
        lost.close()
        await wait_until(lambda: gateway.counts("streams").open == 0)
        async with stream(http, topic, query) as response:
            last = (await some(response, 1))[0].data["offset"]
            assert last < 59, "it cannot have read so much"
            async with asyncio.timeout(60):
                while last < 59:
                    last = (await some(response, 1))[0].data["offset"]


async def test_forbidden_keys_are_not_sent_and_groups_need_the_whole_topic(
    bootstrap: str, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    rules = (AccessRule(action="subscribe", topic=f"{topic}/open/#"), AccessRule(action="publish", topic=f"{topic}/#"))
    async with (
        running_gateway(bootstrap, security=SecurityConfig(access=rules)) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        for key in ("open/a", "shut/a", "open/b"):
            await store(http, topic, [key], key=key)
        async with stream(http, topic, "from=beginning") as response:
            assert values(await some(response, 2)) == ["open/a", "open/b"]
        assert (await ask(http, "GET", f"/topics/{topic}/stream?group=g"))[0] == 403


async def test_too_many_streams_are_refused_and_those_of_a_gateway_that_stops_end(
    bootstrap: str, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    async with (
        running_gateway(bootstrap, http={"max_streams": 2}) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
        stream(http, topic) as one,
        stream(http, topic) as two,
    ):
        status, answer = await ask(http, "GET", f"/topics/{topic}/stream")
        assert status == 503, answer
        await store(http, topic, ["last"])
        assert values(await some(one, 1)) == ["last"]
        gateway.listener.stop_receiving()
        body = await asyncio.wait_for(two.read(), 60)
        assert b'"last"' in body
        assert re.fullmatch(rb"(retry: [0-9]+\n\n)?", await asyncio.wait_for(one.read(), 60))
        await wait_until(lambda: gateway.counts("streams").open == 0)


async def test_old_http_and_what_comes_behind_the_request(gateway: Gateway, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    request = f"GET /topics/{topic}/stream?duration=0 HTTP/1."
    answer = await raw_exchange(gateway.listener.bound, f"{request}0\r\nHost: x\r\n\r\n".encode())
    assert b" 505 " in answer.split(b"\r\n")[0]
    twice = f"{request}1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    answer = await raw_exchange(gateway.listener.bound, twice)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"0\r\n\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"Connection: close" in answer


@pytest.mark.part("live websockets")
async def test_over_tls(bootstrap: str, new_topic: NewTopicFactory, tmp_path: Path) -> None:
    topic = await new_topic(partitions=1)
    authority = trustme.CA()
    server = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(server))
    security = SecurityConfig(tls_cert=server, tls_key=server)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    async with running_gateway(bootstrap, security=security) as gateway:
        url = f"https://{gateway.listener.bound}"
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(ssl=trust)) as http:
            await store(http, topic, ["x" * 10_000] * 50)
            async with stream(http, topic, "from=beginning&limit=50") as response:
                assert len(await some(response, 50)) == 50
                assert await asyncio.wait_for(response.read(), 60) == b""
            for first in (0, 20):  # records settled in the first do not come again
                async with stream(http, topic, f"group={topic}-group&from=beginning&limit=20") as response:
                    found = await some(response, 20)
                    assert found[0].data["offset"] == first
                    assert await asyncio.wait_for(response.read(), 60) == b""
                await wait_until(lambda: gateway.counts("streams").open == 0)
            await store(http, topic, ["last"])
            async with http.ws_connect("/stream", protocols=["trivium.v1"]) as socket:
                await socket.send_json({"type": "subscribe", "id": "s", "topic": topic, "from": "0:50"})
                async with asyncio.timeout(60):
                    assert (await socket.receive_json())["type"] == "subscribed"
                    assert (await socket.receive_json())["record"]["value"] == "last"
