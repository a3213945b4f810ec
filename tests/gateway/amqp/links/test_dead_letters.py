"""Dead letters of a group's receivers: rejected, failed too often, undeliverable here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from proton import Condition, ConnectionException, Delivery
from proton.utils import BlockingConnection

from gateway.amqp.server import AmqpServer
from tests.support.amqp import TIMEOUT, as_client, body_of
from tests.support.topics import produce, read_all
from tests.support.waiting import wait_until


def settle(receiver: Any, state: int, **local: Any) -> None:
    """Settle the oldest delivery that was received."""
    delivery = receiver.fetcher.unsettled[0]
    for name, value in local.items():
        setattr(delivery.local, name, value)
    receiver.settle(state)


def headers(record: Any) -> dict[str, str]:
    return {name: value.decode() for name, value in record.headers if name.startswith("dead-letter.")}


async def dead_lettered(bootstrap: str, topic: str) -> Any:
    """Return the only dead letter; it may be stored a moment later, because no client waits for it."""
    async with asyncio.timeout(60):
        while not (letters := await read_all(bootstrap, topic)):
            pass
    (letter,) = letters
    return letter


async def test_rejected_is_a_dead_letter(start_listener: Any, bootstrap: str, new_topic: Any) -> None:
    """It has the receiver's error; the record is committed, though the receiver detaches immediately."""
    topic, dead = await new_topic(partitions=1), await new_topic(partitions=1)
    listener: AmqpServer = await start_listener(amqp={"dead_letter_topic": dead})
    await produce(bootstrap, topic, [b"poison", b"good"], key=b"k", headers=[("unit", b"C")])
    address = f"{topic}/group.id/{topic}"

    def reject(connection: BlockingConnection) -> bytes:
        receiver = connection.create_receiver(address, credit=1)
        found = body_of(receiver.receive(TIMEOUT))
        settle(receiver, Delivery.REJECTED, condition=Condition("app:no-json", "at line 1"))
        receiver.close()
        return found

    def go_on(connection: BlockingConnection) -> bytes:
        receiver = connection.create_receiver(address, credit=1)
        found = body_of(receiver.receive(TIMEOUT))
        receiver.accept()
        return found

    assert await as_client(listener, reject) == b"poison"
    assert await as_client(listener, go_on) == b"good"
    letter = await dead_lettered(bootstrap, dead)
    assert (letter.key, letter.value, dict(letter.headers)["unit"]) == (b"k", b"poison", b"C")
    assert headers(letter) == {
        "dead-letter.topic": topic,
        "dead-letter.partition": "0",
        "dead-letter.offset": "0",
        "dead-letter.group": topic,
        "dead-letter.attempts": "1",
        "dead-letter.condition": "app:no-json",
        "dead-letter.reason": "at line 1",
    }
    await wait_until(lambda: listener.statistics().dead_letters == 1)


async def test_failed_too_often_is_a_dead_letter(start_listener: Any, bootstrap: str, new_topic: Any) -> None:
    """Released is no failed attempt; the header's delivery-count counts the failed ones."""
    topic = await new_topic(partitions=1)
    dead = await new_topic(partitions=1)
    listener: AmqpServer = await start_listener(amqp={"dead_letter_topic": dead, "max_attempts": 2})
    await produce(bootstrap, topic, [b"poison", b"good"])

    def work(connection: BlockingConnection) -> list[tuple[bytes, int]]:
        receiver = connection.create_receiver(f"{topic}/group.id/{topic}", credit=1)
        found = []
        for state, failed in ((Delivery.RELEASED, False), (Delivery.MODIFIED, True), (Delivery.MODIFIED, True)):
            while True:
                message = receiver.receive(TIMEOUT)
                if body_of(message) == b"poison":
                    break
                found.append((body_of(message), message.delivery_count))
                receiver.accept()
            found.append((b"poison", message.delivery_count))
            settle(receiver, state, failed=failed)
        return found

    found = await as_client(listener, work)
    assert [count for value, count in found if value == b"poison"] == [0, 0, 1]
    letter = await dead_lettered(bootstrap, dead)
    assert letter.value == b"poison"
    assert headers(letter)["dead-letter.condition"] == "too-many-attempts"
    assert headers(letter)["dead-letter.attempts"] == "2"


async def test_a_connection_that_is_lost_with_a_record_has_failed(
    start_listener: Any, bootstrap: str, new_topic: Any
) -> None:
    """A receiver that crashes on a record counts; one that detaches does not. Another one keeps the group."""
    topic = await new_topic(partitions=1)
    dead = await new_topic(partitions=1)
    listener: AmqpServer = await start_listener(amqp={"dead_letter_topic": dead, "max_attempts": 1})
    quiet: AmqpServer = await start_listener()
    await produce(bootstrap, topic, [b"poison", b"good"])
    address = f"{topic}/group.id/{topic}"
    loop = asyncio.get_running_loop()
    held = asyncio.Event()

    def hold(connection: BlockingConnection) -> tuple[bytes, int]:
        message = connection.create_receiver(address, credit=0).receive(TIMEOUT)  # which grants exactly one credit
        return body_of(message), message.delivery_count

    def die() -> None:
        connection = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        assert hold(connection) == (b"poison", 2)
        loop.call_soon_threadsafe(held.set)
        with pytest.raises(ConnectionException):
            connection.wait(lambda: False, timeout=TIMEOUT)

    idle = await asyncio.to_thread(BlockingConnection, f"amqp://{quiet.bound}", timeout=TIMEOUT)
    await asyncio.to_thread(idle.create_receiver, address, credit=0)
    assert await as_client(listener, hold) == (b"poison", 0)
    assert await as_client(listener, hold) == (b"poison", 1)
    dying = asyncio.create_task(asyncio.to_thread(die))
    await held.wait()
    for pump in list(listener.pumps):
        pump.abort()
    await dying
    assert await as_client(listener, hold) == (b"good", 0)
    letter = await dead_lettered(bootstrap, dead)
    assert (letter.value, headers(letter)["dead-letter.condition"]) == (b"poison", "too-many-attempts")
    await asyncio.to_thread(idle.close)


async def test_undeliverable_here_goes_to_another_receiver(start_listener: Any, bootstrap: str, new_topic: Any) -> None:
    """Without another receiver it becomes a dead letter."""
    topic = await new_topic(partitions=1)
    dead = await new_topic(partitions=1)
    listener: AmqpServer = await start_listener(amqp={"dead_letter_topic": dead})
    await produce(bootstrap, topic, [b"x"])

    def work(connection: BlockingConnection) -> list[tuple[bytes, int]]:
        first = connection.create_receiver(f"{topic}/group.id/{topic}", credit=10, name="first")
        second = connection.create_receiver(f"{topic}/group.id/{topic}", credit=10, name="second")
        connection.wait(lambda: bool(first.fetcher.has_message or second.fetcher.has_message), timeout=TIMEOUT)
        found = []
        receivers = [first, second] if first.fetcher.has_message else [second, first]
        for receiver in receivers:
            message = receiver.receive(TIMEOUT)
            found.append((body_of(message), message.delivery_count))
            settle(receiver, Delivery.MODIFIED, failed=True, undeliverable=True)
        return found

    assert await as_client(listener, work) == [(b"x", 0), (b"x", 1)]
    letter = await dead_lettered(bootstrap, dead)
    assert headers(letter)["dead-letter.condition"] == "undeliverable-here"
    assert headers(letter)["dead-letter.attempts"] == "2"


async def test_a_record_without_dead_letter_is_offered_again(
    start_listener: Any, bootstrap: str, new_topic: Any
) -> None:
    """No record is committed before its dead letter is stored: here the topic does not exist."""
    topic = await new_topic(partitions=1)
    listener: AmqpServer = await start_listener(amqp={"dead_letter_topic": "no-such-{topic}"})
    await produce(bootstrap, topic, [b"x"])

    def work(connection: BlockingConnection) -> list[bytes]:
        receiver = connection.create_receiver(f"{topic}/group.id/{topic}", credit=1)
        found = [body_of(receiver.receive(TIMEOUT))]
        receiver.reject()
        found.append(body_of(receiver.receive(TIMEOUT)))
        receiver.accept()
        return found

    assert await as_client(listener, work) == [b"x", b"x"]
    assert listener.statistics().dead_letters_failed == 1
