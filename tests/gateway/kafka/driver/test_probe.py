"""The readiness probe, with a broker and with servers that are none."""

from __future__ import annotations

import asyncio

import pytest

from gateway.kafka.driver.probe import broker_answers


async def test_broker_answers(bootstrap):
    host, _, port = bootstrap.rpartition(":")
    assert await broker_answers(host, int(port))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x7f\xff\xff\xff",
        b"\x00\x00\x00\x04\x00\x00\x00\x01",
        b"\x00\x00\x00\x08\x00\x00\x00\x01\x00\x00\x00\x00",  # no broker is unfenced yet
        b"\x00\x00\x00\x08\x00\x00\x00\x02\x00\x00\x00\x01",  # the answer to something else
    ],
)
async def test_others_do_not(answer):
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        assert not await broker_answers(*server.sockets[0].getsockname())


async def test_silence_and_nobody():
    done = asyncio.Event()

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        done.set()

    server = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    async with server:
        assert not await broker_answers(*address, timeout_s=0.05)
        await done.wait()
    assert not await broker_answers(*address)
