"""The opening handshake over real sockets, on a separate listener, with the pump behind it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.net.http.upgrade import WebSocketEndpoint, WebSocketServer
from gateway.net.listener import ListenError
from gateway.security.origins import Origins
from gateway.settings.config import Address, SecurityConfig
from tests.support.lines import EchoServer
from tests.support.listeners import listening
from tests.support.waiting import wait_until
from tests.support.websocket import BINARY, CLOSE, PING, PONG, TEXT, close_frame, frame, handshake, parse


class Server:
    """A WebSocket listener for two subprotocols with the same meaning, of which the first is preferred."""

    def __init__(self, group: asyncio.TaskGroup, tls: ssl.SSLContext | None, timeout_s: float) -> None:
        self.listener = EchoServer(group.create_task)
        self.sessions = self.listener.sessions
        origins = Origins(SecurityConfig(origins=("https://good.example",)))
        endpoint = WebSocketEndpoint(dict.fromkeys(("mqtt", "mqttv3.1"), self.listener), origins)
        self.listening = WebSocketServer("mqtt_websocket", endpoint, SecurityConfig(), handshake_timeout_s=timeout_s)
        listening(self.listening, tls=tls)

    async def connect(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.listening.bound.rpartition(":")
        return await asyncio.open_connection(host, int(port), **options)

    async def open(self, request: bytes = b"", **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a WebSocket by hand; returns the streams after a valid handshake."""
        reader, writer = await self.connect(**options)
        writer.write(request or handshake())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        return reader, writer

    async def ask(self, request: bytes) -> tuple[int, dict[str, str]]:
        """Return status and fields (names in lower case) of the answer."""
        reader, writer = await self.connect()
        writer.write(request)
        async with asyncio.timeout(60):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            if not head[0].startswith("HTTP/1.1 101"):
                await reader.read()  # it closes
        writer.close()
        fields = dict(line.split(": ", 1) for line in head[1:] if line)
        return int(head[0].split()[1]), {name.lower(): value for name, value in fields.items()}


@contextlib.asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None, timeout_s: float = 20.0) -> AsyncIterator[Server]:
    async with asyncio.TaskGroup() as group:
        server = Server(group, tls, timeout_s)
        await server.listener.start()
        await server.listening.start()
        try:
            yield server
        finally:
            server.listening.stop_receiving()
            server.listener.stop_accepting()
            await server.listening.stop(2)
            await server.listener.pumps.close(2)


async def frames_until_close(reader: asyncio.StreamReader) -> list[tuple[int, bytes]]:
    async with asyncio.timeout(60):
        frames, rest = parse(await reader.read())
    assert rest == b""
    return frames


@pytest.mark.clause("MQTT-6.0.0-2", "MQTT311-6.0.0-2")
@pytest.mark.clause("MQTT-6.0.0-4", "MQTT311-6.0.0-4")
async def test_a_foreign_client_talks_and_leaves() -> None:
    async with serving() as server, aiohttp.ClientSession() as session:
        url = f"http://{server.listening.bound}/any/path"
        async with session.ws_connect(url, protocols=("other", "mqttv3.1", "mqtt"), compress=15) as client:
            assert client.protocol == "mqtt"
            assert client.compress == 0
            await client.send_bytes(b"one\ntwo\nthr")
            assert await client.receive_bytes() == b"one!\ntwo!\n"
            await client.send_bytes(b"ee\n")
            assert await client.receive_bytes() == b"three!\n"
            await client.ping(b"there?")
            assert server.listening.statistics().handshaking == 0
            assert [pump.peer for pump in server.listener.pumps] == ["{}:{}".format(*client.get_extra_info("sockname"))]
        assert client.close_code == 1000
        await wait_until(lambda: not server.listener.pumps)
        assert server.sessions[0].gone == ["closed"]
        assert server.listener.accepted == 1


async def test_our_close_is_a_close_frame_and_the_answer_closes_the_socket() -> None:
    async with serving() as server, aiohttp.ClientSession() as session:
        async with session.ws_connect(f"http://{server.listening.bound}", protocols=("mqttv3.1",)) as client:
            assert client.protocol == "mqttv3.1"
            await client.send_bytes(b"bye\n" + b"more\n" * 20_000)
            assert await client.receive_bytes() == b"bye!\n"
            closing = await client.receive()
            assert (closing.type, closing.data) == (aiohttp.WSMsgType.CLOSE, 1000)
        await wait_until(lambda: server.sessions[0].gone)
        assert b"more" not in server.sessions[0].seen


async def test_a_peer_that_never_answers_our_close_frame_is_let_go() -> None:
    async with serving() as server:
        reader, writer = await server.open()
        writer.write(frame(b"bye\n"))
        assert await frames_until_close(reader) == [(BINARY, b"bye!\n"), (CLOSE, b"\x03\xe8")]
        writer.close()


@pytest.mark.clause("MQTT-6.0.0-1", "MQTT311-6.0.0-1")
async def test_a_text_frame_ends_the_connection_and_the_reason_can_be_read() -> None:
    async with serving() as server:
        reader, writer = await server.open()
        writer.write(frame(b"good\n") + frame(b"text\n", TEXT) + frame(b"more\n") * 20_000)
        (opcode, payload), (last, reason) = await frames_until_close(reader)
        assert (opcode, payload) == (BINARY, b"good!\n")
        assert (last, int.from_bytes(reason[:2])) == (CLOSE, 1003)
        writer.close()
        await wait_until(lambda: not server.listener.pumps)


async def test_a_peer_that_leaves_without_a_close_frame() -> None:
    async with serving() as server:
        reader, writer = await server.open()
        writer.write(frame(b"a\n") + frame(b"half")[:7])
        assert await reader.readexactly(5) == frame(b"a!\n", masked=False)
        writer.write_eof()
        assert await frames_until_close(reader) == [(CLOSE, b"\x03\xe8")]
        writer.close()
        await wait_until(lambda: server.sessions[0].gone == ["closed"])


async def test_frames_may_follow_the_request_at_once_and_a_pause_holds_them_in_the_kernel() -> None:
    async with serving() as server:
        reader, writer = await server.open(handshake() + frame(b"wait\na\n") + frame(b"b\n"))
        await wait_until(lambda: server.sessions[0].pump is not None and not server.sessions[0].pump.reading)
        writer.write(frame(b"c\n") + frame(b"", PING))
        assert server.sessions[0].seen == [b"wait"]
        server.sessions[0].go.set()
        expected = [b"a!\nb!\n", b"c!\n", b""]
        frames, data = [], b""
        while len(frames) < len(expected):
            data += await reader.read(100)
            frames, _ = parse(data)
        assert frames == list(zip([BINARY, BINARY, PONG], expected, strict=True))
        writer.close()


async def test_a_large_message_behind_the_request_is_received_completely() -> None:
    async with serving() as server:
        _reader, writer = await server.open(handshake() + frame(b"x" * 3_000_000 + b"\n"))
        await wait_until(lambda: [len(line) for line in server.sessions[0].seen] == [3_000_000])
        writer.close()


async def test_no_task_stays_with_a_websocket() -> None:
    async with serving() as server:
        before = len(asyncio.all_tasks())
        opened = [await server.open() for _ in range(10)]
        await wait_until(lambda: len(asyncio.all_tasks()) <= before)
        assert len(server.listener.pumps) == 10
        for reader, writer in opened:
            writer.write(frame(b"still here\n"))
            assert (await reader.readexactly(14))[2:] == b"still here!\n"
            writer.close()


REFUSALS: dict[str, tuple[bytes, int, dict[str, str]]] = {
    "no upgrade": (handshake(Upgrade=None, Connection=None), 426, {"upgrade": "websocket", "connection": "Upgrade"}),
    "no connection": (handshake(Connection=None), 426, {"upgrade": "websocket"}),
    "another upgrade": (handshake(Upgrade="h2c"), 426, {"upgrade": "websocket"}),
    "old version": (handshake(sec_websocket_version="8"), 426, {"sec-websocket-version": "13"}),
    "no version": (handshake(sec_websocket_version=None), 426, {"sec-websocket-version": "13"}),
    "no key": (handshake(sec_websocket_key=None), 400, {}),
    "short key": (handshake(sec_websocket_key="AAAA"), 400, {}),
    "key no base64": (handshake(sec_websocket_key="\u00e9" * 12), 400, {}),
    "no subprotocol": (handshake(sec_websocket_protocol=None), 400, {}),
    "other subprotocols": (handshake(sec_websocket_protocol="MQTT, amqp ,"), 400, {}),
    "another method": (handshake().replace(b"GET", b"POST"), 405, {"allow": "GET"}),
    "HTTP/1.0": (handshake().replace(b"HTTP/1.1", b"HTTP/1.0"), 400, {}),
    "with a body": (handshake(Content_Length="4") + b"body", 400, {}),
    "foreign page": (handshake(Origin="https://evil.example"), 403, {}),
    "no HTTP": (b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x00\r\n\r\n", 400, {}),
}


@pytest.mark.clause("MQTT-6.0.0-3", "MQTT311-6.0.0-3")
@pytest.mark.parametrize("case", REFUSALS)
async def test_a_bad_handshake_is_answered_and_closed(case: str) -> None:
    request, status, fields = REFUSALS[case]
    async with serving() as server:
        answered, headers = await server.ask(request)
        assert answered == status
        assert headers.items() >= fields.items()
        assert server.listener.accepted == 0


@pytest.mark.parametrize(
    "request_",
    [
        handshake(Origin="https://good.example"),
        handshake(Upgrade="WebSocket", Connection="keep-alive, upgrade"),
        handshake(sec_websocket_protocol="other,mqttv3.1 , mqtt"),
        handshake(sec_websocket_extensions="permessage-deflate; client_max_window_bits"),
    ],
)
async def test_good_handshakes(request_: bytes) -> None:
    async with serving() as server:
        status, headers = await server.ask(request_)
        assert status == 101
        assert headers["sec-websocket-protocol"] == "mqtt"
        assert headers["sec-websocket-accept"] == "kfIpniVDq3itXuXlgok9QafX8IE="
        assert "sec-websocket-extensions" not in headers
        assert headers["server"] == "trivium"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=400), at=st.integers(0, 200), length=st.integers(0, 20))
async def test_a_damaged_handshake_harms_no_other_connection(
    one_server: Server, data: bytes, at: int, length: int
) -> None:
    good = handshake() + frame(b"a\n") + close_frame(1000)
    reader, writer = await one_server.connect()
    writer.write(good[:at] + data + good[at + length :])
    writer.write_eof()
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
    writer.close()


@pytest.fixture(scope="module")
async def one_server() -> AsyncIterator[Server]:
    ready: asyncio.Queue[Server] = asyncio.Queue()
    over = asyncio.Event()

    async def serve() -> None:
        async with serving(timeout_s=0.2) as server:
            ready.put_nowait(server)
            await over.wait()
            await wait_until(lambda: not server.listener.pumps)

    async with asyncio.TaskGroup() as group:
        group.create_task(serve())
        yield await ready.get()
        over.set()


async def test_a_slow_handshake_times_out() -> None:
    async with serving(timeout_s=1) as server:
        reader, writer = await server.connect()
        writer.write(handshake()[:-2])
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
        reader, writer = await server.open()  # the time limit is only for the handshake
        loop = asyncio.get_running_loop()
        began = loop.time()
        await wait_until(lambda: loop.time() - began > 1.2)
        writer.write(frame(b"a\n"))
        assert await reader.readexactly(5) == frame(b"a!\n", masked=False)
        writer.close()


async def test_no_new_websocket_once_the_subprotocol_stops() -> None:
    async with serving() as server:
        reader, writer = await server.open()
        server.listener.stop_accepting()
        status, headers = await server.ask(handshake())
        assert (status, headers["retry-after"]) == (503, "1")
        writer.write(frame(b"still\n"))
        assert await reader.readexactly(9) == frame(b"still!\n", masked=False)
        server.listening.stop_receiving()
        assert not server.listening.listeners[0].accepting
        writer.close()


async def test_over_tls_with_the_clients_certificate() -> None:
    authority = trustme.CA()
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    for context, name in ((ours, "localhost"), (theirs, "device-7")):
        authority.configure_trust(context)
        authority.issue_cert(name).configure_cert(context)
    ours.verify_mode = ssl.CERT_REQUIRED
    async with serving(ours) as server:
        reader, writer = await server.open(ssl=theirs, server_hostname="localhost")
        (pump,) = server.listener.pumps
        assert pump.transport is not None
        names = pump.transport.get_extra_info("peercert")["subjectAltName"]
        assert names == (("DNS", "device-7"),)
        writer.write(frame(b"bye\n"))
        assert await frames_until_close(reader) == [(BINARY, b"bye!\n"), (CLOSE, b"\x03\xe8")]
        writer.close()


async def test_an_address_in_use_is_named_with_its_key() -> None:
    async with serving() as server:
        endpoint = WebSocketEndpoint({}, Origins(SecurityConfig()))
        twice = WebSocketServer("mqtt_websocket", endpoint, SecurityConfig(), handshake_timeout_s=1)
        listening(twice, Address(server.listening.bound), key="mqtt.websocket_address")
        with pytest.raises(ListenError, match=r"^mqtt\.websocket_address: 127\.0\.0\.1:\d+ is in use"):
            await twice.start()
