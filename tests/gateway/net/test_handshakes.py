"""TLS handshakes in progress: counted, limited in time, and nothing is left of one that fails."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trustme

from gateway.net import handshakes
from gateway.net.handshakes import HANDSHAKE_BYTES
from gateway.net.listener import Listener
from gateway.net.strangers import Strangers
from gateway.security.entrance import Entrance
from tests.support.listeners import one_listener
from tests.support.waiting import wait_until

AUTHORITY = trustme.CA()
HALF_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"r" * 32
"""The beginning of a record of 512 bytes."""


class Served(asyncio.Protocol):
    """The protocol behind the handshake."""

    def __init__(self) -> None:
        self.heard = b""
        self.is_open = False
        self.is_at_end = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert transport.get_extra_info("ssl_object") is not None
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        assert self.is_open
        self.heard += data

    def eof_received(self) -> None:
        self.is_at_end = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False


class Server:
    """A TLS listener, its connections, and their strangers' count."""

    def __init__(self) -> None:
        self.strangers = Strangers(1 << 20)
        self.came: list[Served] = []
        self.listening: Listener | None = None

    def make(self, entrance: Entrance) -> Served:
        self.came.append(Served())
        return self.came[-1]

    async def open(self, directory: Path) -> None:
        path = directory / "server.pem"
        AUTHORITY.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        self.listening = one_listener(self.make, tls=context, strangers=self.strangers)
        await self.listening.start()

    @property
    def port(self) -> int:
        assert self.listening is not None
        return int(self.listening.bound.rpartition(":")[2])

    @property
    def held(self) -> int:
        return self.strangers.statistics().bytes


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server()
    await made.open(tmp_path)
    yield made
    assert made.listening is not None
    made.listening.close()


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    return context


Leave = Callable[[Server, asyncio.StreamWriter], Awaitable[None]]


async def close(server: Server, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def reset(server: Server, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def talk_nonsense(server: Server, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\xff" * 600)


async def see_the_listener_stop(server: Server, writer: asyncio.StreamWriter) -> None:
    assert server.listening is not None
    server.listening.close()


@pytest.mark.parametrize("begun", [b"", HALF_HELLO])
@pytest.mark.parametrize("leave", [close, reset, talk_nonsense, see_the_listener_stop])
async def test_nothing_is_left_of_one_that_breaks_off(server: Server, begun: bytes, leave: Leave) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(begun)
    await wait_until(lambda: server.held == HANDSHAKE_BYTES)
    await leave(server, writer)
    await wait_until(lambda: server.held == 0)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(1000)
    writer.close()
    assert server.came == []
    assert server.strangers.statistics().dropped_total == 0


@pytest.mark.parametrize("begun", [b"", HALF_HELLO])
async def test_a_silent_handshake_is_aborted_in_time(
    server: Server, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(begun)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(reader.readexactly(1), 60)
    writer.close()
    await wait_until(lambda: server.held == 0)
    assert server.came == []


async def test_data_together_with_the_end_of_the_handshake_is_received_and_not_counted(server: Server) -> None:
    """The client's last flight and its first bytes leave together, and an end of file behind them."""
    said = b"x" * 100_000
    for _ in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting())
        writer.write(said)
        writer.close()
    await wait_until(lambda: len(server.came) == 20 and all(not one.is_open for one in server.came))
    assert all(one.heard == said for one in server.came)
    assert server.held == 0
