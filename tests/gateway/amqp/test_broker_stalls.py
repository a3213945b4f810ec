"""The broker is frozen and thawed under a sender and under receivers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from typing import Any

from proton import Message, Timeout
from proton.utils import BlockingConnection

from gateway.amqp.listener import AmqpListener
from gateway.embedded.broker import EmbeddedBroker
from protocols.amqp import outcomes
from tests.support.frozen import freeze

TIMEOUT = 60
FROZEN_S = 1.5
COUNT = 50


async def test_a_frozen_broker(stoppable: EmbeddedBroker, own_listener: Any) -> None:
    try:
        async with own_listener(stoppable.bootstrap_servers) as listener:
            await nothing_is_accepted_that_is_not_stored(listener, stoppable.pid)
            await a_drain_is_answered(listener, stoppable.pid)
    finally:
        os.kill(stoppable.pid, signal.SIGCONT)


async def nothing_is_accepted_that_is_not_stored(listener: AmqpListener, pid: int) -> None:
    def client() -> tuple[int, list[int]]:
        connection = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        sender = connection.create_sender(f"stalled-{uuid.uuid4().hex}")
        sender.send(Message(body=b"first", inferred=True))
        freeze(pid)
        deliveries = [sender.link.send(Message(body=b"%d" % number, inferred=True)) for number in range(COUNT)]
        end = time.monotonic() + FROZEN_S
        with contextlib.suppress(Timeout):
            connection.wait(lambda: any(delivery.settled for delivery in deliveries), timeout=FROZEN_S)
        assert time.monotonic() >= end
        early = sum(delivery.settled for delivery in deliveries)
        os.kill(pid, signal.SIGCONT)
        connection.wait(lambda: all(delivery.settled for delivery in deliveries), timeout=TIMEOUT)
        states = [int(delivery.remote_state) for delivery in deliveries]
        connection.close()
        return early, states

    early, states = await asyncio.to_thread(client)
    assert early == 0
    assert states == [outcomes.ACCEPTED] * COUNT


async def a_drain_is_answered(listener: AmqpListener, pid: int) -> None:
    """A receiver that has what there is gets its answer, and goes on when Kafka does."""

    def client() -> None:
        connection = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        topic = f"drained-{uuid.uuid4().hex}"
        sender = connection.create_sender(topic)
        receivers = [connection.create_receiver(source, credit=0) for source in (topic, f"{topic}/group.id/{topic}")]
        sender.send(Message(body=b"first", inferred=True))
        for receiver in receivers:
            receiver.link.flow(10)
            assert receiver.receive(TIMEOUT).body == b"first"
            receiver.accept()
        freeze(pid)
        for receiver in receivers:
            receiver.link.drain(10)
        connection.wait(lambda: not any(receiver.link.draining() for receiver in receivers), timeout=TIMEOUT)
        assert [receiver.link.credit for receiver in receivers] == [0, 0]
        os.kill(pid, signal.SIGCONT)
        for receiver in receivers:
            receiver.link.drain_mode = False
            receiver.link.flow(10)
        sender.send(Message(body=b"second", inferred=True))
        for receiver in receivers:
            assert receiver.receive(TIMEOUT).body == b"second"
        connection.close()

    await asyncio.to_thread(client)
