"""Answers as bytes are the same as those that aiohttp writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from gateway.net.http.http_server import HttpServer
from gateway.rest.server.answers import control_answer, direct_answer
from gateway.settings.config import SecurityConfig
from tests.support.listeners import BareHttpServer, listening

BODY = b'{"offsets":[]}'
GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


async def answer(request: web.BaseRequest) -> web.Response:
    return control_answer(BODY)


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def server() -> AsyncIterator[HttpServer]:
    """A server that answers every request with `BODY`."""
    refuse = lambda status, text: web.Response(status=status)  # noqa: E731
    server = BareHttpServer("test", answer, refuse, SecurityConfig(), head_timeout_s=20)
    listening(server)
    await server.start()
    yield server
    await server.stop(1)


async def connect(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.bound.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_direct_answer_equals_aiohttps(server: HttpServer) -> None:
    def lines(answer: bytes) -> list[bytes]:
        """Sorted, without the time."""
        return sorted(line for line in answer.split(b"\r\n") if not line.startswith(b"Date: "))

    reader, writer = await connect(server)
    writer.write(GET)
    async with asyncio.timeout(60):
        theirs = await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(len(BODY))
    writer.close()
    assert lines(direct_answer(BODY)) == lines(theirs)


async def test_answers_of_one_connection_follow_each_other(server: HttpServer) -> None:
    reader, writer = await connect(server)
    writer.write(GET * 500)
    async with asyncio.timeout(60):
        for _ in range(500):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"\r\nContent-Length: %d\r\n" % len(BODY) in head
            assert await reader.readexactly(len(BODY)) == BODY
    writer.close()


def test_the_time_in_a_head_is_of_this_second(monkeypatch: pytest.MonkeyPatch) -> None:
    for second, text in ((0, b"00:00:00"), (1, b"00:00:01")):
        monkeypatch.setattr("gateway.rest.server.answers.time.time", lambda second=second: second + 0.9)
        assert b"Date: Thu, 01 Jan 1970 %b GMT\r\n" % text in direct_answer(BODY)
