"""Messages that one receiver must not have: above its max-message-size (part 2.7.3), or undeliverable here (3.4.5)."""

from __future__ import annotations

from typing import Any

import pytest
from proton import Delivery, Link, Message
from proton.reactor import DurableSubscription, LinkOption, ReceiverOption
from proton.utils import BlockingConnection, BlockingReceiver

from gateway.amqp.server import AmqpServer
from tests.gateway.amqp.links.test_dead_letters import dead_lettered, headers, settle
from tests.support.amqp import TIMEOUT, as_client, body_of
from tests.support.topics import produce

LIMIT = 10_000
SMALL, LARGE = [b"0", b"2", b"4"], [b"1" * 20_000, b"3" * 30_000]
MIXED = [SMALL[0], LARGE[0], SMALL[1], LARGE[1], SMALL[2]]


class MaxSize(ReceiverOption):
    """The receiver's max-message-size."""

    def apply(self, link: Link) -> None:
        link.max_message_size = LIMIT


def bodies(receiver: BlockingReceiver, count: int) -> list[bytes]:
    """Receive and accept messages."""
    found = []
    for _ in range(count):
        found.append(body_of(receiver.receive(TIMEOUT)))
        receiver.accept()
    return found


@pytest.mark.clause("AMQP-2.7.3")
async def test_large_messages_stay_for_receivers_that_come_later(
    listener: AmqpServer, bootstrap: str, new_topic: Any
) -> None:
    """Those behind them are not delayed; the receiver with the limit never gets them, and gets later small ones."""
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, MIXED)

    def limited(connection: BlockingConnection) -> list[bytes]:
        return bodies(connection.create_receiver(f"queue://{topic}", credit=10, options=MaxSize()), len(SMALL))

    def both(connection: BlockingConnection) -> list[bytes]:
        connection.create_receiver(f"queue://{topic}", credit=10, options=MaxSize(), name="limited")
        return bodies(connection.create_receiver(f"queue://{topic}", credit=10), len(LARGE))

    assert await as_client(listener, limited) == SMALL
    assert await as_client(listener, both) == LARGE
    assert listener.statistics().too_large_for_peer >= len(LARGE)


async def test_large_messages_go_to_another_receiver_that_is_attached(
    listener: AmqpServer, bootstrap: str, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)

    def work(connection: BlockingConnection) -> tuple[list[bytes], list[bytes]]:
        limited = connection.create_receiver(f"queue://{topic}", credit=10, options=MaxSize(), name="limited")
        free = connection.create_receiver(f"queue://{topic}", credit=10, name="free")
        sender = connection.create_sender(topic)
        for body in MIXED:
            sender.send(Message(body=body))
        found: dict[BlockingReceiver, list[bytes]] = {limited: [], free: []}
        while sum(map(len, found.values())) < len(MIXED):
            connection.wait(lambda: limited.fetcher.has_message or free.fetcher.has_message, timeout=TIMEOUT)
            for receiver, bodies_ in found.items():
                if receiver.fetcher.has_message:
                    bodies_.extend(bodies(receiver, 1))
        return found[limited], found[free]

    to_limited, to_free = await as_client(listener, work)
    assert not set(to_limited) & set(LARGE)
    assert sorted(to_limited + to_free) == sorted(MIXED)


async def test_a_large_message_that_no_receiver_takes_is_a_dead_letter(
    start_listener: Any, bootstrap: str, new_topic: Any
) -> None:
    topic, dead = await new_topic(partitions=1), await new_topic(partitions=1)
    listener: AmqpServer = await start_listener(amqp={"dead_letter_topic": dead})
    await produce(bootstrap, topic, MIXED[:3])

    def limited(connection: BlockingConnection) -> list[bytes]:
        return bodies(connection.create_receiver(f"queue://{topic}", credit=10, options=MaxSize()), 2)

    assert await as_client(listener, limited) == SMALL[:2]
    letter = await dead_lettered(bootstrap, dead)
    assert letter.value == LARGE[0]
    assert headers(letter)["dead-letter.condition"] == "amqp:link:message-size-exceeded"
    assert str(LIMIT) in headers(letter)["dead-letter.reason"]


async def test_a_subscription_keeps_a_large_message_for_a_link_that_takes_it(
    listener: AmqpServer, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)

    def subscribed(connection: BlockingConnection, *options: LinkOption) -> BlockingReceiver:
        every = [DurableSubscription(), *options]
        return connection.create_receiver(topic, credit=10, name="mine", options=every)

    def limited(connection: BlockingConnection) -> list[bytes]:
        receiver = subscribed(connection, MaxSize())
        sender = connection.create_sender(topic)
        for body in MIXED:
            sender.send(Message(body=body))
        return bodies(receiver, len(SMALL))

    def free(connection: BlockingConnection) -> list[bytes]:
        return bodies(subscribed(connection), len(LARGE))

    assert await as_client(listener, limited, container_id=f"c-{topic}") == SMALL
    assert await as_client(listener, free, container_id=f"c-{topic}") == LARGE


@pytest.mark.clause("AMQP-3.4.5")
async def test_undeliverable_here_without_a_dead_letter_topic(
    listener: AmqpServer, bootstrap: str, new_topic: Any
) -> None:
    """The message does not come to this link again, not even when it asks for more, and stays for others."""
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"not mine", b"mine"])

    def work(connection: BlockingConnection) -> list[list[bytes]]:
        first = connection.create_receiver(f"queue://{topic}", credit=10, name="first")
        found = [[body_of(first.receive(TIMEOUT))]]
        settle(first, Delivery.MODIFIED, failed=True, undeliverable=True)
        found.append(bodies(first, 1))
        second = connection.create_receiver(f"queue://{topic}", credit=10, name="second")
        found.append([body_of(second.receive(TIMEOUT))])
        settle(second, Delivery.MODIFIED, failed=True)  # back to the group: to any link but the first
        found.append(bodies(second, 1))
        return found

    assert await as_client(listener, work) == [[b"not mine"], [b"mine"], [b"not mine"], [b"not mine"]]


async def test_receivers_of_a_temporary_queue(start_listener: Any, new_topic: Any) -> None:
    """A large message goes to the receiver that takes it, and is dropped without one."""
    listener: AmqpServer = await start_listener(amqp={"reply_topic": await new_topic(partitions=1)})

    def work(connection: BlockingConnection) -> tuple[list[bytes], list[bytes]]:
        limited = connection.create_receiver(None, credit=10, dynamic=True, options=MaxSize())
        address = limited.link.remote_source.address
        free = connection.create_receiver(address, credit=10)
        sender = connection.create_sender(address)
        for body in LARGE:
            sender.send(Message(body=body))
        found = bodies(free, len(LARGE))
        free.close()
        sender.send(Message(body=LARGE[0]))
        sender.send(Message(body=b"end"))
        return found, bodies(limited, 1)

    assert await as_client(listener, lambda connection: tuple(map(sorted, work(connection)))) == (LARGE, [b"end"])
