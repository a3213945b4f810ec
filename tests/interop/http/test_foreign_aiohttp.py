"""aiohttp's client as its users run it: records, a consumer, an upload of lines, events and a WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.conftest import NewTopicFactory
from tests.support.gateway import GatewayProcess

JSON_RECORDS = {"Content-Type": "application/vnd.kafka.json.v2+json"}
CONTROL = {"Content-Type": "application/vnd.kafka.v2+json"}
LONG_S = 60.0


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[aiohttp.ClientSession]:
    """A session for the gateway's HTTP listener."""
    timeout = aiohttp.ClientTimeout(total=LONG_S)
    async with aiohttp.ClientSession("http://" + gateway.addresses["http"], timeout=timeout) as session:
        yield session


async def ask(client: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Send a request with `body` as JSON; return the status and body of the answer."""
    headers = None if body is None else CONTROL
    async with client.request(method, path, data=None if body is None else json.dumps(body), headers=headers) as answer:
        return answer.status, await answer.json(content_type=None) if answer.status != 204 else None


async def store(client: aiohttp.ClientSession, topic: str, *values: object) -> None:
    """Produce a record for each value in one request."""
    body = {"records": [{"value": value} for value in values]}
    async with client.post(f"/topics/{topic}", json=body, headers=JSON_RECORDS) as answer:
        told = await answer.json(content_type=None)
        assert answer.status == 200, told
        assert all("offset" in place for place in told["offsets"]), told


async def test_records_are_published_polled_committed_and_the_consumer_is_deleted(
    client: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    await store(client, topic, *range(5))
    path = f"/consumers/{topic}/instances/first"
    create = {"name": "first", "format": "json", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    assert (await ask(client, "POST", f"/consumers/{topic}", create))[0] == 200
    assert await ask(client, "POST", f"{path}/subscription", {"topics": [topic]}) == (204, None)
    values: list[int] = []
    async with asyncio.timeout(LONG_S):
        while len(values) < 5:
            status, records = await ask(client, "GET", f"{path}/records?timeout=2000")
            assert status == 200, records
            values += [record["value"] for record in records]
    assert values == [0, 1, 2, 3, 4]
    assert await ask(client, "POST", f"{path}/offsets") == (204, None)
    assert await ask(client, "DELETE", path) == (204, None)
    status, gone = await ask(client, "GET", f"{path}/records")
    assert (status, gone["error_code"]) == (404, 404)


async def test_an_upload_gets_a_report_for_each_line_immediately(
    client: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    reports: asyncio.Queue[int] = asyncio.Queue()

    async def lines() -> AsyncIterator[bytes]:
        for number in range(4):
            yield json.dumps({"key": "k", "value": number}).encode() + b"\n"
            assert await reports.get() == number  # the next line is sent only after this report

    headers = {"Content-Type": "application/x-ndjson"}
    async with client.post(f"/topics/{topic}/records", data=lines(), headers=headers) as answer:
        assert answer.status == 200
        async for line in answer.content:
            reports.put_nowait(json.loads(line)["offset"])
    assert reports.empty()


async def events(answer: aiohttp.ClientResponse) -> list[tuple[str, int]]:
    """Return the id and value of each event until the stream ends."""
    text = (await answer.read()).decode()
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(":"))
        if "data" in fields:
            found.append((fields["id"], json.loads(fields["data"])["value"]))
    return found


async def test_an_event_stream_resumes_after_the_last_id(
    client: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    await store(client, topic, *range(4))
    path = f"/topics/{topic}/stream?from=beginning&limit=2"
    async with client.get(path) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        first = await events(answer)
    async with client.get(path, headers={"Last-Event-ID": first[-1][0]}) as answer:
        second = await events(answer)
    assert [value for _, value in first + second] == [0, 1, 2, 3]


async def test_a_websocket_subscribes_with_credit_and_publishes(
    client: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    await store(client, topic, *range(4))
    async with client.ws_connect("/stream", protocols=("trivium.v1",)) as socket, asyncio.timeout(LONG_S):
        assert socket.protocol == "trivium.v1"
        await socket.send_json({"type": "subscribe", "id": "s", "topic": topic, "from": "beginning", "credit": 3})
        values: list[int] = []
        while len(values) < 3:
            said = await socket.receive_json()
            values += [said["record"]["value"]] if said["type"] == "record" else []
        await socket.send_json({"type": "produce", "id": "p", "topic": topic, "records": [{"value": 4}]})
        while (said := await socket.receive_json())["type"] != "produced":
            assert said["type"] != "record", "no more than there is credit for"
        assert said["offsets"] == [{"partition": 0, "offset": 4}]
        await socket.send_json({"type": "credit", "id": "s", "credit": 10})
        while len(values) < 5:
            said = await socket.receive_json()
            values += [said["record"]["value"]] if said["type"] == "record" else []
    assert values == [0, 1, 2, 3, 4]
