"""Attempts that outlive the last receiver of a group, and the gateway; what a crash brings again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from proton import ConnectionException
from proton.utils import BlockingConnection

from flowcontrol.marks import Marks, read_marks
from gateway.amqp.server import AmqpServer
from tests.support.amqp import TIMEOUT, as_client, body_of, data
from tests.support.gateway import GatewayProcess
from tests.support.topics import produce, read_all
from tests.support.waiting import wait_until


async def committed(bootstrap: str, group: str) -> Any:
    """Return the group's commit in partition 0 of the topic with its name, or None."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        return (await admin.list_consumer_group_offsets(group)).get(TopicPartition(group, 0))
    finally:
        await admin.close()


class Worker:
    """The only receiver of a queue; it takes what it gets, and settles nothing."""

    def __init__(self, topic: str) -> None:
        self.seen: list[tuple[bytes, int]] = []
        self._topic = topic
        self._loop = asyncio.get_running_loop()
        self._holds = asyncio.Event()

    async def hold(self, address: str, count: int, lose: Callable[[], Any]) -> None:
        """Receive records; then `lose` ends the connection from outside."""
        self._holds.clear()
        work = asyncio.create_task(asyncio.to_thread(self._hold, address, count))
        await self._holds.wait()
        await lose()
        await work

    def _hold(self, address: str, count: int) -> None:
        connection = BlockingConnection(f"amqp://{address}", timeout=TIMEOUT)
        receiver = connection.create_receiver(f"queue://{self._topic}", credit=0)
        messages = [receiver.receive(TIMEOUT) for _ in range(count)]  # each grants exactly one credit
        self.seen += [(body_of(message), message.delivery_count) for message in messages]
        self._loop.call_soon_threadsafe(self._holds.set)
        with pytest.raises(ConnectionException):
            connection.wait(lambda: False, timeout=TIMEOUT)


async def test_a_message_on_which_its_only_worker_dies_becomes_a_dead_letter(
    start_listener: Any, bootstrap: str, new_topic: Any
) -> None:
    topic, dead = await new_topic(partitions=1), await new_topic(partitions=1)
    listener: AmqpServer = await start_listener(amqp={"dead_letter_topic": dead, "max_attempts": 3})
    await produce(bootstrap, topic, [b"poison", b"good"])
    worker = Worker(topic)

    async def die() -> None:
        for pump in list(listener.pumps):
            pump.abort()

    for _ in range(4):
        await worker.hold(str(listener.bound), 1, die)
    assert worker.seen == [(b"poison", 0), (b"poison", 1), (b"poison", 2), (b"good", 0)]
    assert [letter.value for letter in await read_all(bootstrap, dead)] == [b"poison"]


async def test_a_worker_that_closes_and_returns_sees_that_it_had_the_message(
    start_listener: Any, bootstrap: str, new_topic: Any
) -> None:
    """A close in order is no failed attempt: there is no dead letter."""
    topic = await new_topic(partitions=1)
    listener: AmqpServer = await start_listener(amqp={"dead_letter_topic": f"{topic}-dlq", "max_attempts": 2})
    await produce(bootstrap, topic, [b"a", b"b"])

    def work(connection: BlockingConnection) -> list[int]:
        receiver = connection.create_receiver(f"queue://{topic}", credit=2)
        return [receiver.receive(TIMEOUT).delivery_count for _ in range(2)]

    assert [await as_client(listener, work) for _ in range(5)] == [[count] * 2 for count in range(5)]


def count_all(address: str, topic: str, count: int) -> dict[bytes, int]:
    """Receive and accept records; return their delivery-counts."""
    connection = BlockingConnection(f"amqp://{address}", timeout=TIMEOUT)
    receiver = connection.create_receiver(f"queue://{topic}", credit=count)
    found = {}
    for _ in range(count):
        message = receiver.receive(TIMEOUT)
        found[body_of(message)] = message.delivery_count
        receiver.accept()
    connection.close()
    return found


async def test_after_a_crash_of_the_gateway_what_was_handed_out_is_marked(
    new_gateway: Any, bootstrap: str, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    values = [b"%d" % number for number in range(20)]
    await produce(bootstrap, topic, values)
    gateway: GatewayProcess = await new_gateway(bootstrap).start()
    worker = Worker(topic)

    crashes = 0

    async def is_marked() -> bool:
        commit = await committed(bootstrap, topic)
        marks = read_marks(commit.offset, commit.metadata) if commit is not None else Marks({})
        return (marks.begin, marks.end, len(marks.tries)) == (0, 5, 5 if crashes else 0)

    async def crash() -> None:
        await wait_until(is_marked)
        await gateway.kill()

    for crashes in range(2):
        await worker.hold(gateway.addresses["amqp"], 5, crash)
        assert worker.seen == [(value, crashes) for value in values[:5]]
        worker.seen.clear()
        await gateway.start()
    found = await asyncio.to_thread(count_all, gateway.addresses["amqp"], topic, 20)
    assert found == {value: 2 if number < 5 else 0 for number, value in enumerate(values)}


async def test_what_is_settled_slowly_is_committed_at_once(
    listener: AmqpServer, bootstrap: str, new_topic: Any
) -> None:
    """A crash brings again what was not committed: with one commit a second this takes nine seconds."""
    topic, other = await new_topic(partitions=1), await new_topic()
    await produce(bootstrap, topic, [b"%d" % number for number in range(10)])
    loop = asyncio.get_running_loop()

    def work(connection: BlockingConnection) -> float:
        receiver, sender = connection.create_receiver(f"queue://{topic}", credit=1), connection.create_sender(other)
        began = time.monotonic()
        for number in range(1, 10):
            receiver.receive(TIMEOUT)
            receiver.accept()
            sender.send(data(b"x"))  # and with it what the receiver has accepted, which proton has only queued
            asyncio.run_coroutine_threadsafe(until(number), loop).result(TIMEOUT)
        return time.monotonic() - began

    async def until(offset: int) -> None:
        async def is_committed() -> bool:
            commit = await committed(bootstrap, topic)
            return commit is not None and commit.offset == offset

        await wait_until(is_committed)

    assert await as_client(listener, work) < 6
