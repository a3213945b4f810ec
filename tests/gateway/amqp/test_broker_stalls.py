"""Nothing is accepted that Kafka has not stored: the broker is frozen and thawed under a sender."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import Any

from proton import Message, Timeout
from proton.utils import BlockingConnection

from protocols.amqp import outcomes

TIMEOUT = 30
FROZEN_S = 1.5
COUNT = 50


async def test_a_frozen_broker(new_broker: Any, own_front: Any) -> None:
    broker = new_broker()
    await broker.start()
    assert broker.pid is not None
    async with own_front(broker.bootstrap_servers) as front:
        frozen = asyncio.Event()
        loop = asyncio.get_running_loop()

        def client() -> tuple[int, list[int]]:
            connection = BlockingConnection(f"amqp://{front.bound}", timeout=TIMEOUT)
            sender = connection.create_sender("readings")
            sender.send(Message(body=b"first", inferred=True))
            asyncio.run_coroutine_threadsafe(freeze(), loop).result(TIMEOUT)
            deliveries = [sender.link.send(Message(body=b"%d" % number, inferred=True)) for number in range(COUNT)]
            end = time.monotonic() + FROZEN_S
            with contextlib.suppress(Timeout):
                connection.wait(lambda: any(delivery.settled for delivery in deliveries), timeout=FROZEN_S)
            assert time.monotonic() >= end
            early = sum(delivery.settled for delivery in deliveries)
            loop.call_soon_threadsafe(frozen.set)
            connection.wait(lambda: all(delivery.settled for delivery in deliveries), timeout=TIMEOUT)
            states = [int(delivery.remote_state) for delivery in deliveries]
            connection.close()
            return early, states

        async def freeze() -> None:
            os.kill(broker.pid, signal.SIGSTOP)

        running = asyncio.create_task(asyncio.to_thread(client))
        try:
            async with asyncio.timeout(TIMEOUT):
                await frozen.wait()
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        early, states = await running
        assert early == 0
        assert states == [outcomes.ACCEPTED] * COUNT
