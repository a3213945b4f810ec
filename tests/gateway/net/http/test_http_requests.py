"""HTTP/1.1 itself over raw sockets: heads, framing and pipelines, whole and byte by byte (RFC 9110, RFC 9112)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.net.http.http_server import HttpServer
from gateway.settings.config import SecurityConfig
from tests.support.listeners import BareHttpServer, listening
from tests.support.waiting import wait_until

GOOD = b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /%d HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8\r\n\r\n\r\n\r\n\r\n\r\n"
BROKEN = (
    b"NO SUCH THING\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"GET /x HTTP/1.1\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: localhost\r\nX Y: 1\r\n\r\n",
)


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    body = await request.content.read()
    return web.Response(text=f"{request.method} {request.raw_path} {len(body)}\n")


def refuse(status: int, reason: str) -> web.StreamResponse:
    answer = web.Response(status=status, text=f"{reason}\n")
    answer.force_close()
    return answer


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[HttpServer]:
    served = BareHttpServer("echo", echo, refuse, SecurityConfig(), head_timeout_s=30.0)
    listening(served)
    await served.start()
    yield served
    await served.stop(1.0)


async def converse(server: HttpServer, *parts: bytes) -> list[tuple[int, bytes]]:
    """Send the parts one after the other; status and body of each answer, until it closes."""
    host, _, port = server.bound.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answers = []
    try:
        async with asyncio.timeout(60):
            for part in parts:
                writer.write(part)
                await writer.drain()
            while True:
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except (asyncio.IncompleteReadError, ConnectionResetError):
                    return answers
                fields = dict(line.split(b": ", 1) for line in head.lower().splitlines()[1:] if line)
                bodyless = head.split()[1] == b"204"
                body = b"" if bodyless else await reader.readexactly(int(fields.get(b"content-length", 0)))
                answers.append((int(head.split()[1]), body))
                if fields.get(b"connection") == b"close":
                    return answers
    finally:
        writer.close()


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("count", [1, 3, 40])
async def test_good_requests_in_front_of_a_bad_one_are_answered(server: HttpServer, broken: bytes, count: int) -> None:
    requests = [GOOD % number if number % 2 else POST % number for number in range(count)]
    sent = b"".join(requests) + broken
    for parts in ((sent,), (sent[:50], sent[50:]), (b"".join(requests), broken)):
        answers = await converse(server, *parts)
        expected = [(200, b"GET /%d 0\n" % n if n % 2 else b"POST /%d 8\n" % n) for n in range(count)]
        assert answers[:-1] == expected
        assert answers[-1][0] == 400


async def test_byte_by_byte_it_is_the_same(server: HttpServer) -> None:
    sent = POST % 1 + GOOD % 2 + POST % 3 + BROKEN[0]
    answers = await converse(server, *(sent[place : place + 1] for place in range(len(sent))))
    assert [status for status, _ in answers] == [200, 200, 200, 400]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_however_it_is_split_it_is_the_same(server: HttpServer, data: st.DataObject) -> None:
    requests = data.draw(st.lists(st.sampled_from([GOOD % 1, POST % 2]), max_size=5))
    sent = b"".join(requests) + data.draw(st.sampled_from(BROKEN))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(sent)), max_size=6)))
    parts = [sent[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True) if begin < end]
    answers = await converse(server, *parts)
    assert [status for status, _ in answers] == [200] * len(requests) + [400]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n", 400),  # RFC 9112 section 3.2
        (b"GET / HTTP/1.0\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost:\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nhOST: localhost\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a/b\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: user@a\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a,b\r\n", 200),  # a name by its grammar, without a dot
        (b"GET / HTTP/1.1\r\nHost: a:b\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a:1:2\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: [::1\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: \xff\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: [::1]:80\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1:\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n", 421),
        (b"GET http://localhost/x HTTP/1.1\r\nHost: whatever.example\r\n", 200),
        (b"GET http://evil.example/x HTTP/1.1\r\nHost: localhost\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: x\r\nExpect: 200-ok\r\n", 417),  # RFC 9110 section 10.1.1
        (b"GET / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue, more\r\n", 417),
        (b"GET / HTTP/1.0\r\nHost: x\r\nExpect: 200-ok\r\n", 200),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n", 501),  # RFC 9112 section 6.1
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, gzip\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, chunked\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n", 400),
        (b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n", 200),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 1\r\n", 400),
    ],
)
async def test_heads(server: HttpServer, head: bytes, status: int) -> None:
    sent = head + b"Connection: close\r\n\r\n" + (b"0\r\n\r\n" if b"hunked" in head else b"")
    for parts in ((sent,), tuple(sent[place : place + 1] for place in range(len(sent)))):
        answers = await converse(server, *parts)
        assert [found for found, _ in answers] == [status], answers


@pytest.mark.parametrize("framing", [b"Content-Length: 8000000\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_a_body_that_looks_like_heads_costs_what_a_body_costs(server: HttpServer, framing: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + framing + b"\r\n"
    chunked = framing.startswith(b"T")
    before, after = (b"7a1200\r\n", b"\r\n0\r\n\r\n") if chunked else (b"", b"")
    costs = []
    for body in (b"0" * 8_000_000, b"\r\n\r\n" * 2_000_000):
        began = time.process_time()
        assert await converse(server, head + before + body + after) == [(200, b"POST / 8000000\n")]
        costs.append(time.process_time() - began)
    assert costs[1] < 10 * costs[0] + 0.5  # it took a hundred times as long: 0.1 s in each turn of the loop


async def test_a_slow_body_does_not_delay_the_error_of_a_later_request(server: HttpServer) -> None:
    """With more requests than the parser queues, and a body that is larger than its buffer."""
    large = b"POST /9 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 400000\r\n\r\n" + b"\r\n\r\n" * 100_000
    answers = await converse(server, large, GOOD % 1 * 100 + BROKEN[0])
    assert answers[0] == (200, b"POST /9 400000\n")
    assert [status for status, _ in answers[1:]] == [200] * 100 + [400]


@pytest.mark.parametrize("value", [b"x" * 70_000])
async def test_bytes_behind_a_bad_request_are_not_kept(server: HttpServer, value: Any) -> None:
    answers = await converse(server, GOOD % 1 + BROKEN[0] + value, value)
    assert [status for status, _ in answers][:2] == [200, 400]


async def test_a_kicked_client_that_reads_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.net.http.http_requests.LEAVE_S", 0.1)

    async def large(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=bytes(32 * 1024 * 1024))

    served = BareHttpServer("large", large, refuse, SecurityConfig(), head_timeout_s=30.0)
    listening(served)
    await served.start()
    host, _, port = served.bound.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.transport.pause_reading()
    writer.write(GOOD % 1)
    await wait_until(lambda: any(one._unread is not None for one in served.connections))
    served.connections[0].kick()
    await wait_until(lambda: not served.connections and not served.listeners[0].connections)
    writer.transport.abort()
    await served.stop(1.0)
