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
from proton.reactor import AtMostOnce, Copy
from proton.utils import BlockingConnection

from gateway.amqp.server import AmqpServer
from gateway.embedded.broker import EmbeddedBroker
from protocols.amqp import outcomes
from tests.support.amqp import body_of, until_drained
from tests.support.frozen import freeze

TIMEOUT = 60
FROZEN_S = 1.5
DRAINED_S = 0.5
COUNT = 50


async def test_a_frozen_broker(stoppable: EmbeddedBroker, own_listener: Any) -> None:
    try:
        async with own_listener(stoppable.bootstrap_servers) as listener:
            await nothing_is_accepted_that_is_not_stored(listener, stoppable.pid)
            await a_drain_waits_for_what_there_is(listener, stoppable.pid)
            await a_drain_is_answered(listener, stoppable.pid)
    finally:
        os.kill(stoppable.pid, signal.SIGCONT)


async def nothing_is_accepted_that_is_not_stored(listener: AmqpServer, pid: int) -> None:
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


async def a_drain_waits_for_what_there_is(listener: AmqpServer, pid: int) -> None:
    """Part 2.6.7: a drain uses credit for all available messages, however slow Kafka is."""

    def client() -> None:
        connection = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        topic = f"waited-{uuid.uuid4().hex}"
        sources = (topic, f"{topic}/group.id/{topic}")
        sender = connection.create_sender(topic)
        receivers = [connection.create_receiver(source, credit=0) for source in sources]
        for number in range(3):
            sender.send(Message(body=b"%d" % number, inferred=True))
        browser = connection.create_receiver(f"queue://{topic}", credit=0, options=[Copy(), AtMostOnce()])
        receivers.append(browser)
        freeze(pid)
        for receiver in receivers:
            receiver.link.drain(10)
        with contextlib.suppress(Timeout):
            connection.wait(lambda: not all(one.link.draining() for one in receivers), timeout=DRAINED_S)
        early = [not one.link.draining() for one in receivers]
        os.kill(pid, signal.SIGCONT)
        until_drained(connection, *receivers)
        assert early == [False] * 3
        for receiver in receivers:
            assert [body_of(message) for message, _ in receiver.fetcher.incoming] == [b"0", b"1", b"2"]
        connection.close()

    await asyncio.to_thread(client)


async def a_drain_is_answered(listener: AmqpServer, pid: int) -> None:
    """A receiver that has all messages gets its drain answered, and receives again when Kafka answers."""

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
        until_drained(connection, *receivers)
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
