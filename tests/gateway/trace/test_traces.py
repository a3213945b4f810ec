"""`POST /trace` and `trivium trace`: packets, frames and requests of real clients, bounded, and nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from gateway.process.cli import app
from gateway.trace.traces import AT_ONCE, RATE, UNREAD, Trace, TraceRequest
from protocols.mqtt import packets
from tests.support.amqp import ThreadedSender
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient, RawClient
from tests.support.waiting import wait_until

SECRET = "hunter2-canary"
BASIC = base64.b64encode(f"ann:{SECRET}".encode()).decode()


@pytest.fixture
def name() -> str:
    return f"traced-{uuid.uuid4().hex[:8]}"


class Reader:
    """The lines of a trace so far."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.lines: list[dict[str, Any]] = []
        self._answer = answer
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for line in self._answer.content:
            self.lines.append(json.loads(line))

    async def until(self, key: str, value: Any) -> dict[str, Any]:
        """Wait for a line."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [line for line in self.lines if line.get(key) == value]
            return bool(found)

        try:
            await wait_until(there)
        except TimeoutError:
            raise AssertionError(f"no {key} {value} in {self.lines}") from None
        return found[-1]

    async def end(self) -> dict[str, Any]:
        """Wait for the trace's end and return the last line."""
        await asyncio.wait_for(self._reading, 60)
        return self.lines[-1]

    def kinds(self, key: str, client: str = "") -> list[tuple[str, Any]]:
        return [
            (line["dir"], line[key]) for line in self.lines if key in line and (not client or line["client"] == client)
        ]

    def stop(self) -> None:
        self._reading.cancel()


@asynccontextmanager
async def tracing(gateway: GatewayProcess, **wanted: Any) -> AsyncIterator[Reader]:
    url = f"http://{gateway.addresses['management']}/trace"
    async with aiohttp.ClientSession() as session, session.post(url, json={"seconds": 60, **wanted}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "application/x-ndjson"
        reader = Reader(answer)
        try:
            yield reader
        finally:
            reader.stop()


async def test_mqtt_by_its_client_id_from_a_connect_to_the_next(gateway: GatewayProcess, name: str) -> None:
    """Traces a connected client and one that connects later, and no other."""
    paho = await PahoClient(gateway.address("mqtt"), client_id=name, user=SECRET, password=SECRET).connect()
    other = await PahoClient(gateway.address("mqtt"), client_id=f"{name}-other").connect()
    client = f"mqtt/{name}"
    async with tracing(gateway, client=client, lines=200) as trace:
        await trace.until("connection", "traced")
        assert await other.publish(f"{name}/x", b"other") == 0
        assert await paho.publish(f"{name}/x", b"21.5") == 0
        await paho.subscribe(f"{name}/#", 0)
        await trace.until("packet", "SUBACK")
        await paho.close()
        await trace.until("connection", "closed")
        again = await RawClient.connect(
            gateway.address("mqtt"), name, version=4, username=SECRET, password=SECRET.encode()
        )
        await again.ping()
        await trace.until("packet", "PINGRESP")
        again.drop()
    assert trace.kinds("packet") == [
        ("in", "PUBLISH"), ("out", "PUBACK"), ("in", "SUBSCRIBE"), ("out", "SUBACK"), ("in", "DISCONNECT"),
        ("in", "CONNECT"), ("out", "CONNACK"), ("in", "PINGREQ"), ("out", "PINGRESP"),
    ]  # fmt: skip
    assert {line["client"] for line in trace.lines} == {client}
    publish = next(line for line in trace.lines if line.get("packet") == "PUBLISH")
    assert (publish["topic"], publish["payload"], publish["qos"]) == (f"{name}/x", "21.5", 1)
    connect = next(line for line in trace.lines if line.get("packet") == "CONNECT")
    assert (connect["version"], connect["username"], connect["password"]) == ("3.1.1", "***", "***")
    assert SECRET not in str(trace.lines)
    await other.close()


async def test_amqp_by_its_topic_and_every_protocol_too(gateway: GatewayProcess, name: str) -> None:
    address = "{}:{}".format(*gateway.address("amqp"))
    before = await ThreadedSender(address, f"{name}-0").connect()
    async with tracing(gateway, topic=name) as trace:
        paho = await PahoClient(gateway.address("mqtt"), client_id=f"m-{name}").connect()
        assert await paho.publish("elsewhere/x", b"") == 0
        assert await paho.publish(name, b"mqtt") == 0
        await trace.until("packet", "PUBLISH")
        sender = await ThreadedSender(address, name).connect()
        assert await sender.send(b"amqp") == "ACCEPTED"
        await trace.until("frame", "disposition")
        body = {"records": [{"value": "http"}]}
        async with (
            aiohttp.ClientSession(f"http://{gateway.addresses['http']}") as http,
            http.post(
                f"/topics/{name}", json=body, headers={"Content-Type": "application/vnd.kafka.json.v2+json"}
            ) as ok,
        ):
            assert ok.status == 200
        await trace.until("answer", 200)
        await paho.close()
        await sender.close()
    assert trace.kinds("packet") == [("in", "PUBLISH")]
    frames = trace.kinds("frame")
    assert frames[0] == ("in", "attach")
    assert ("in", "transfer") in frames
    assert [line["target"] for line in trace.lines if "request" in line] == [f"/topics/{name}"]
    await before.close()


class KeptConnection:
    """Raw HTTP: request after request on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.at = "{}:{}".format(*writer.get_extra_info("sockname"))

    def ask(self, method: str, target: str, body: bytes = b"") -> None:
        fields = f"Host: localhost\r\nAuthorization: Basic {BASIC}\r\nCookie: s={SECRET}\r\n"
        fields += f"Content-Type: application/vnd.kafka.json.v2+json\r\nContent-Length: {len(body)}\r\n"
        self.writer.write(f"{method} {target} HTTP/1.1\r\n{fields}\r\n".encode() + body)

    async def answer(self) -> bytes:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 200"), head
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return await self.reader.readexactly(int(length))


async def test_http_by_its_address_with_streams_and_websockets(
    gateway: GatewayProcess, name: str, new_topic: Any
) -> None:
    topic = await new_topic(1)
    base = f"http://{gateway.addresses['http']}"
    body = b'{"records":[{"value":1}]}'
    http = KeptConnection(*await asyncio.open_connection(*gateway.address("http")))
    http.ask("POST", f"/topics/{topic}", body)  # its head is known from now on
    await http.answer()
    async with tracing(gateway, address=http.at, payload=256) as trace:
        await trace.until("connection", "traced")
        for _ in range(2):
            http.ask("POST", f"/topics/{topic}", body)
            await http.answer()
        async with aiohttp.ClientSession(base) as other, other.get("/topics") as answer:
            assert answer.status == 200
        http.ask("GET", f"/topics/{topic}/stream?from=end&limit=3&access_token=x{SECRET}")
        assert (await asyncio.wait_for(http.reader.readuntil(b"\r\n\r\n"), 60)).startswith(b"HTTP/1.1 200")
        await trace.until("answer", 200)
        await wait_until(lambda: len(trace.kinds("answer")) == 3)
    assert [line["target"] for line in trace.lines if "request" in line] == [
        f"/topics/{topic}", f"/topics/{topic}", f"/topics/{topic}/stream?from=end&limit=3&access_token=***",
    ]  # fmt: skip
    assert trace.kinds("answer") == [("out", 200)] * 3
    assert {line["client"] for line in trace.lines} == {f"http/{http.at}"}
    assert [way for way, _ in trace.kinds("body")].count("in") == 2
    async with tracing(gateway, address=http.at) as amid:  # a stream that is open already
        await amid.until("connection", "traced")
        other = await PahoClient(gateway.address("mqtt"), client_id=name).connect()
        assert await other.publish(topic, b"2") == 0
        line = await amid.until("dir", "out")
        assert line["event"] > 0
        await other.close()
    http.writer.close()
    assert SECRET not in str(trace.lines)
    assert BASIC not in str(trace.lines)
    async with aiohttp.ClientSession(base) as http, http.ws_connect("/stream", protocols=["trivium.v1"]) as websocket:
        at = "{}:{}".format(*websocket.get_extra_info("sockname"))
        async with tracing(gateway, client=f"http/{at}") as sockets:
            await sockets.until("connection", "traced")
            await websocket.send_json({"type": "subscribe", "id": "s", "topic": topic, "credit": 1})
            await websocket.receive()
            await wait_until(lambda: len(sockets.kinds("message")) >= 2)
        assert sockets.kinds("message")[0][0] == "in"
        assert '"subscribe"' in next(line["payload"] for line in sockets.lines if "message" in line)
        await websocket.send_json({"type": "unsubscribe", "id": "s"})  # untraced again, it goes on
        while (await websocket.receive_json())["type"] != "unsubscribed":
            pass


async def test_the_command_prints_lines(gateway: GatewayProcess, name: str) -> None:
    paho = await PahoClient(gateway.address("mqtt"), client_id=name).connect()
    url = f"http://{gateway.addresses['management']}"
    ran = asyncio.create_task(
        asyncio.to_thread(
            CliRunner().invoke,
            app,
            ["trace", "--client", f"mqtt/{name}", "--url", url, "--seconds", "600", "--lines", "4", "--payload", "3"],
        )
    )

    async def told() -> bool:
        await paho.publish(f"{name}/x", b"payload")
        return ran.done()

    await wait_until(told)
    done = await ran
    assert done.exit_code == 0, done.output
    assert f"mqtt/{name}  --  traced" in done.output
    assert "->  PUBLISH" in done.output
    assert "payload=pay…" in done.output
    assert "end lines" in done.output
    await paho.close()
    wrong = await asyncio.to_thread(CliRunner().invoke, app, ["trace", "--url", url])
    assert wrong.exit_code == 2
    assert "one of --client, --topic and --address is needed" in wrong.output


async def test_so_many_at_once_and_what_is_no_trace(gateway: GatewayProcess, name: str) -> None:
    url = f"http://{gateway.addresses['management']}/trace"
    async with aiohttp.ClientSession() as session:
        for wrong, text in (
            ({}, "one of client, topic and address"),
            ({"client": "mqtt/a", "topic": "b"}, "one of client, topic and address"),
            ({"client": "http/consumer/a/b"}, "trace its client's address"),
            ({"client": "mqtt/a", "seconds": 601}, "seconds"),
            ({"client": "mqtt/a", "lines": 0}, "lines"),
            ({"client": "mqtt/a", "payload": 4096}, "payload"),
            ({"client": "mqtt/a", "page": 1}, "page"),
            ([], "array"),
        ):
            async with session.post(url, json=wrong) as answer:
                assert (answer.status, text in await answer.text()) == (400, True), wrong
        for fields, body in (({}, b'{"client": "\xff"}'), ({"Content-Encoding": "gzip"}, b"no gzip")):
            async with session.post(url, data=body, headers=fields) as answer:
                assert answer.status == 400
        assert "Error handling request" not in gateway.log.read_text()
        opened = []
        try:
            while len(opened) < 10:
                answer = await session.post(url, json={"client": f"mqtt/{name}", "seconds": 600})
                opened.append(answer)
            refused = [answer for answer in opened if answer.status == 429]
            assert len(refused) >= 10 - AT_ONCE > 0
            assert f"{AT_ONCE} traces are running" in await refused[0].text()
        finally:
            for answer in opened:
                answer.close()

        async def free() -> bool:  # readers that have left make room
            async with session.post(url, json={"client": "mqtt/x", "seconds": 0.01}) as answer:
                return answer.status == 200

        await wait_until(free)


async def test_who_does_not_read_costs_a_bounded_part_of_memory_and_holds_nobody_up(
    gateway: GatewayProcess, name: str
) -> None:
    reader, writer = await asyncio.open_connection(*gateway.address("management"))
    body = json.dumps({"topic": name, "seconds": 3, "payload": 1024}).encode()
    head = f"POST /trace HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.transport.pause_reading()
    writer.write(head.encode() + body)
    client = await RawClient.connect(gateway.address("mqtt"), name)
    for number in range(2_000):
        client.send(packets.Publish(f"{name}/{number}", bytes(1024), 0))
    await client.ping()  # it is served as ever
    client.drop()
    writer.transport.resume_reading()
    told = await asyncio.wait_for(reader.read(), 60)  # it ends by itself
    writer.close()
    assert told.count(b'"PUBLISH"') <= 2 * RATE + 100


async def test_lines_rate_and_unread_bytes_are_bounded() -> None:
    trace = Trace(TraceRequest(client="mqtt/x", lines=5_000))
    for _ in range(3 * RATE):
        if trace.has_room():
            trace.add({"payload": "x" * 200})
    told = await trace.read(0)
    assert told is not None
    assert RATE <= told.count(b"\n") < RATE + 200
    summary = json.loads(trace.summary())
    assert summary["dropped"] > RATE
    slow = Trace(TraceRequest(client="mqtt/x"))
    while slow.has_room():
        slow.add({"payload": "x" * 10_000})
    told = await slow.read(0)
    assert told is not None
    assert UNREAD <= len(told) < UNREAD + 20_000
    few = Trace(TraceRequest(client="mqtt/x", lines=2))
    few.add({})
    few.add({"a": "x" * 100_000})
    assert not few.has_room()
    told = await few.read(0)
    assert told is not None
    assert b"too long to be shown" in told
    assert await few.read(0) is None
    assert json.loads(few.summary())["end"] == "lines"
