"""Thousands of receivers on one connection share their requests to Kafka."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.amqp.conftest import StartListener
from tests.support.amqp_frames import Frames, WireClient
from tests.support.assembled import Assembled

MANY = 600
TIMEOUT = 60
ATTACH, DETACH = 0x12, 0x16


@pytest.mark.parametrize("topics", [1, 3])
async def test_receivers_share_their_questions_to_kafka(
    backend: Assembled, start_listener: StartListener, new_topic: Any, topics: int
) -> None:
    listener = await start_listener(amqp={"links_per_session": MANY})
    names = [await new_topic() for _ in range(topics)]
    host, _, port = listener.bound.rpartition(":")
    client = await WireClient.connect((host, int(port)))
    try:
        before = backend.log.lookup.requests
        client.say(Frames.begin())
        for number in range(MANY):
            client.say(Frames.attach(f"r-{number}", number, sending=False, address=names[number % topics]))
        async with asyncio.timeout(TIMEOUT):
            await client.header()
            for _ in range(MANY):
                await client.until(ATTACH)
        # Metadata and end offsets, for hundreds of topics per request.
        assert backend.log.lookup.requests - before <= 2 * topics + MANY // 50
        for number in range(MANY):  # one by one
            client.say(Frames.frame(Frames.performative(DETACH, Frames.uint(number), Frames.TRUE)))
        async with asyncio.timeout(TIMEOUT):
            for _ in range(MANY):
                await client.until(DETACH)
    finally:
        await client.close()
