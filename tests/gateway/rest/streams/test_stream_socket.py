"""The socket of an endless answer, over a real connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowcontrol.budget import UNBOUNDED
from gateway.config import SecurityConfig
from gateway.net.writes import Writes
from gateway.rest.streams.stream_socket import StreamSocket
from gateway.security.authentication import Authenticator
from tests.support.listeners import entrance
from tests.support.waiting import wait_until


class Stream:
    """A stream without records."""

    subject = "stream"
    is_closed = False

    def writable(self) -> None: ...

    def closed(self) -> None:
        self.is_closed = True


async def test_an_ended_stream_whose_client_reads_nothing_loses_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.rest.streams.stream_socket.UNREAD_S", 0.1)
    stream, loop = Stream(), asyncio.get_running_loop()
    accepted: asyncio.Queue[asyncio.BaseTransport] = asyncio.Queue()

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.put_nowait(transport)

    server = await loop.create_server(Accepted, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.transport.pause_reading()
    transport: Any = await accepted.get()
    socket = StreamSocket(Writes(), UNBOUNDED, stream)
    socket.begin(transport, entrance(Authenticator(SecurityConfig())))
    socket.send(bytes(32 * 1024 * 1024))
    socket.end()
    await wait_until(lambda: stream.is_closed)
    writer.transport.abort()
    server.close()
