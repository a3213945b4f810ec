"""Quick answers are the same as aiohttp's own, whatever is changed in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from aiohttp import web

from gateway.config import SecurityConfig
from gateway.net.http_server import HttpServer
from gateway.rest.server.quick_answer import Head, QuickAnswer
from tests.support.listeners import listening

BODY = b'{"offsets":[]}'
FIELDS = {"Content-Type": "application/vnd.kafka.v2+json", "Server": "trivium"}
HEAD = Head(FIELDS)
Change = Callable[[web.Response], object]


def compressed(answer: web.Response) -> None:
    """Ask for a compression."""
    answer.enable_compression(web.ContentCoding.gzip)


CHANGES: dict[str, Change] = {
    "none": lambda answer: None,
    "field": lambda answer: answer.headers.update({"Traceparent": "00-1"}),
    "close": lambda answer: answer.force_close(),
    "cookie": lambda answer: answer.set_cookie("a", "b"),
    "gzip": compressed,
    "status": lambda answer: answer.set_status(201),
    "chunked": lambda answer: answer.enable_chunked_encoding(),
}
CASES = [
    (version, fields, change)
    for version, fields in (
        ("1.1", ""),
        ("1.1", "Connection: close\r\n"),
        ("1.0", ""),
        ("1.0", "Connection: keep-alive\r\n"),
    )
    for change in CHANGES
    if (version, change) != ("1.0", "chunked")  # there are none
]


class Server:
    """Answers `/quick/CHANGE` with a quick answer and any other path with aiohttp's own."""

    def __init__(self) -> None:
        self.http = HttpServer(
            "test",
            self.handle,
            lambda status, text: web.Response(status=status),
            SecurityConfig(),
            head_timeout_s=20,
        )

    async def handle(self, request: web.BaseRequest) -> web.Response:
        _, kind, change = request.path.split("/")
        quick = kind == "quick"
        answer = QuickAnswer(BODY, HEAD) if quick else web.Response(body=BODY, headers=FIELDS)
        CHANGES[change](answer)
        return answer

    async def ask(self, method: str, path: str, version: str, fields: str) -> list[bytes]:
        """Return the answers to a request and to a second one that closes; sorted lines without the time."""
        host, _, port = self.http.bound.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        last = "GET /plain/none HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
        writer.write(f"{method} {path} HTTP/{version}\r\nHost: here\r\n{fields}\r\n{last}".encode())
        async with asyncio.timeout(60):
            answer = await reader.read(-1)
        writer.close()
        return sorted(line for line in answer.split(b"\r\n") if not line.startswith(b"Date: "))


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def server() -> AsyncIterator[Server]:
    """One server for all."""
    server = Server()
    listening(server.http)
    await server.http.start()
    yield server
    await server.http.stop(1)


@pytest.mark.parametrize(("version", "fields", "change"), CASES)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
async def test_a_quick_answer_equals_aiohttps(
    server: Server, method: str, version: str, fields: str, change: str
) -> None:
    ours = await server.ask(method, f"/quick/{change}", version, fields)
    theirs = await server.ask(method, f"/plain/{change}", version, fields)
    assert any(line.startswith(b"HTTP/1.") for line in ours)
    assert ours == theirs


async def test_answers_of_one_connection_follow_each_other(server: Server) -> None:
    host, _, port = server.http.bound.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /quick/none HTTP/1.1\r\nHost: here\r\n\r\n" * 500)
    async with asyncio.timeout(60):
        for _ in range(500):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) in head
            assert await reader.readexactly(len(BODY)) == BODY
    writer.close()


def test_the_time_in_a_head_is_of_this_second(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(FIELDS)
    for second, text in ((0, b"00:00:00"), (1, b"00:00:01")):
        monkeypatch.setattr("gateway.rest.server.quick_answer.time.time", lambda second=second: second + 0.9)
        assert b"Date: Thu, 01 Jan 1970 %b GMT\r\n" % text in head.now()
