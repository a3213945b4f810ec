"""The fault bench's proxy: the effect of each fault on the bytes, and on which connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from loadtest.faults.proxy import Proxy

LIMIT_S = 60.0


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname())
    await proxy.start()
    yield proxy
    await proxy.stop()
    server.close()
    await server.wait_closed()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), LIMIT_S)


async def test_bytes_are_passed_on_delayed_and_throttled(proxy: Proxy) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(*proxy.address)
    assert await ask(reader, writer, b"x" * 100_000) == b"x" * 100_000
    proxy.delay_s = 0.1
    begun = loop.time()
    assert await ask(reader, writer, b"late") == b"late"
    assert round(loop.time() - begun, 3) >= 0.2, "each way"
    proxy.delay_s, proxy.rate = 0.0, 1000.0
    begun = loop.time()
    for _ in range(3):
        assert await ask(reader, writer, b"y" * 50) == b"y" * 50
    assert round(loop.time() - begun, 3) >= 0.1, "what follows waits for what went before"
    proxy.rate = None
    assert await ask(reader, writer, b"z" * 100_000) == b"z" * 100_000
    writer.close()
    assert proxy.accepted == 1


async def test_a_cut_is_in_the_middle_and_resets(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_connection(*proxy.address)
    assert await ask(reader, writer, b"whole") == b"whole"
    proxy.cut(1)
    writer.write(b"0123456789")
    got = b""
    with contextlib.suppress(ConnectionResetError):
        got = await asyncio.wait_for(reader.read(), LIMIT_S)
    assert len(got) < 10
    assert proxy.cuts == 1
    writer.close()
    other_reader, other = await asyncio.open_connection(*proxy.address)
    assert await ask(other_reader, other, b"again") == b"again"
    other.close()


async def test_silence_holds_everything_and_loses_nothing(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_connection(*proxy.address)
    assert await ask(reader, writer, b"before") == b"before"
    proxy.block()
    writer.write(b"held")
    late_reader, late = await asyncio.open_connection(*proxy.address)
    late.write(b"new")
    answers = [asyncio.ensure_future(one.read(10)) for one in (reader, late_reader)]
    done, _ = await asyncio.wait(answers, timeout=0.2)
    assert not done
    proxy.unblock()
    assert [await asyncio.wait_for(one, LIMIT_S) for one in answers] == [b"held", b"new"]
    writer.close()
    late.close()


async def test_forgotten_connections_get_no_bytes_and_others_work(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_connection(*proxy.address)
    assert await ask(reader, writer, b"before") == b"before"
    proxy.forget()
    writer.write(b"anybody?")
    answer = asyncio.ensure_future(reader.read(10))
    other_reader, other = await asyncio.open_connection(*proxy.address)
    assert await ask(other_reader, other, b"new") == b"new"
    done, _ = await asyncio.wait({answer}, timeout=0.2)
    assert not done, "neither an answer nor an end"
    other.close()
    writer.close()
    answer.cancel()
