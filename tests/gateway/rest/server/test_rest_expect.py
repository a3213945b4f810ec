"""Expect: 100-continue over raw sockets: a client that is refused has sent no body."""

import asyncio
from typing import Any

import pytest

from tests.gateway.rest.conftest import Gateway, running_gateway


async def first_answer(gateway: Gateway, topic: str, length: int, more: str = "") -> bytes:
    """The first head that comes, while none of the body is sent."""
    host, _, port = gateway.listener.bound.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            f"POST /topics/{topic} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            f"Expect: 100-continue\r\nContent-Length: {length}\r\n{more}\r\n".encode()
        )
        async with asyncio.timeout(60):
            return await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("length", "more", "status"),
    [
        (100, "", b"100"),
        (1 << 30, "", b"413"),
        (100, "Content-Encoding: rot13\r\n", b"415"),
        (100, "Authorization: Basic !\r\n", b"401"),
    ],
)
async def test_100_continue_or_a_refusal_comes_before_the_body(
    gateway: Gateway, new_topic: Any, length: int, more: str, status: bytes
) -> None:
    assert (await first_answer(gateway, await new_topic(partitions=1), length, more)).split()[1] == status


async def test_100_continue_is_not_sent_while_kafka_is_slow_or_the_gateway_stops(
    bootstrap: str, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap) as gateway:
        host, _, port = gateway.listener.bound.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        gateway.publisher.gate.change(False)
        assert (await first_answer(gateway, topic, 100)).split()[1] == b"503"
        gateway.publisher.gate.change(True)
        assert (await first_answer(gateway, topic, 100)).split()[1] == b"100"
        gateway.listener.stop_receiving()
        writer.write(b"POST /topics/t HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        async with asyncio.timeout(60):
            assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == b"503"
        writer.close()
