"""Queues and subscriptions: consumer groups that outlive a receiver's link."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from proton import UNDESCRIBED, Array, Data, Terminus, symbol
from proton.reactor import AtMostOnce, Copy, DurableSubscription, ReceiverOption, Selector
from proton.utils import BlockingConnection, LinkDetached

from gateway.amqp.server import AmqpServer
from protocols.amqp import outcomes
from tests.support.amqp import TIMEOUT, as_client, body_of, data, until_drained
from tests.support.topics import produce


class Capabilities(ReceiverOption):
    """The capabilities that a receiver asks for."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def apply(self, receiver: Any) -> None:
        receiver.source.capabilities.put_object(Array(UNDESCRIBED, Data.SYMBOL, *map(symbol, self.names)))


class NoSource(ReceiverOption):
    """An attach with a null source and only the link's name."""

    def apply(self, receiver: Any) -> None:
        receiver.source.type = Terminus.UNSPECIFIED


def take(receiver: Any, count: int = 1) -> list[bytes]:
    found = []
    for _ in range(count):
        found.append(body_of(receiver.receive(TIMEOUT)))
        receiver.accept()
    return found


def capabilities(receiver: Any) -> list[str]:
    """The source in the gateway's attach."""
    found = receiver.link.remote_source.capabilities
    found.rewind()
    found.next()
    return [str(name) for name in found.get_py_array().elements]


async def committed(admin: AIOKafkaAdminClient, group: str) -> dict[Any, Any]:
    found: dict[Any, Any] = await admin.list_consumer_group_offsets(group)
    return found


async def until_deleted(admin: AIOKafkaAdminClient, group: str) -> None:
    pause = asyncio.Event()
    async with asyncio.timeout(TIMEOUT):
        while await committed(admin, group):
            try:
                await asyncio.wait_for(pause.wait(), 0.05)
            except TimeoutError:
                continue


async def test_a_queue_keeps_messages_until_they_are_accepted(
    listener: AmqpServer, bootstrap: str, new_topic: Any
) -> None:
    """Messages sent before a receiver attached are shared by receivers; accepted ones are not delivered again."""
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"0", b"1", b"2"])

    def receive(connection: BlockingConnection) -> list[bytes]:
        first = connection.create_receiver(topic, credit=1, options=Capabilities("queue"))
        assert capabilities(first) == ["queue"]
        found = take(first, 2)
        first.close()
        return found + take(connection.create_receiver(f"queue://{topic}", credit=1), 1)

    assert await as_client(listener, receive) == [b"0", b"1", b"2"]


async def test_a_browser_takes_nothing(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    """It sees all messages, the answer to a drain marks the end, and a receiver gets them afterwards."""
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"%d" % number for number in range(3)])

    def work(connection: BlockingConnection) -> tuple[list[bytes], list[bytes]]:
        browser = connection.create_receiver(f"queue://{topic}", credit=0, options=[Copy(), AtMostOnce()])
        browser.link.drain(100)
        until_drained(connection, browser)
        seen = [body_of(message) for message, _ in browser.fetcher.incoming]
        browser.close()
        return seen, take(connection.create_receiver(f"queue://{topic}", credit=5), 3)

    assert await as_client(listener, work) == ([b"0", b"1", b"2"], [b"0", b"1", b"2"])


async def test_a_durable_subscription(
    listener: AmqpServer, bootstrap: str, new_topic: Any, admin: AIOKafkaAdminClient
) -> None:
    """It starts when it is created, outlives its link, and ends when the terminus is closed."""
    topic = await new_topic(partitions=1)
    container = f"plant-{topic}"
    group = f"{container}:alarms"
    await produce(bootstrap, topic, [b"before"])

    def subscribe(connection: BlockingConnection) -> None:
        receiver = connection.create_receiver(topic, credit=5, name="alarms", options=DurableSubscription())
        connection.create_sender(topic).send(data(b"0"))
        assert take(receiver) == [b"0"]
        receiver.link.detach()

    def resume(connection: BlockingConnection) -> list[bytes]:
        receiver = connection.create_receiver(None, credit=5, name="alarms", options=NoSource())
        assert receiver.link.remote_source.address == topic
        assert receiver.link.remote_source.durability == Terminus.DELIVERIES
        found = take(receiver, 2)
        receiver.close()
        return found

    def unknown(connection: BlockingConnection) -> None:
        with pytest.raises(LinkDetached, match=outcomes.NOT_FOUND):
            connection.create_receiver(None, name="alarms", options=NoSource())

    await as_client(listener, subscribe, container_id=container)
    await produce(bootstrap, topic, [b"1", b"2"])
    assert await as_client(listener, resume, container_id=container) == [b"1", b"2"]
    await until_deleted(admin, group)
    await as_client(listener, unknown, container_id=container)


async def test_a_durable_subscription_with_another_selector_begins_anew(
    listener: AmqpServer, bootstrap: str, new_topic: Any
) -> None:
    """As JMS says (2.0, 8.3.3): as if it had been ended. With the same one it goes on; another topic is another one."""
    topics = [await new_topic(partitions=1) for _ in range(2)]
    container = f"plant-{topics[0]}"

    def receive(topic: str, text: str, count: int) -> Any:
        def work(connection: BlockingConnection) -> list[bytes]:
            options = [DurableSubscription(), Selector(text)]
            receiver = connection.create_receiver(topic, credit=5, name="alarms", options=options)
            connection.create_sender(topic).send(data(b"new"))
            found = take(receiver, count)
            receiver.link.detach()
            return found

        return as_client(listener, work, container_id=container)

    first, other = "x IS NULL", "y IS NULL"
    assert await receive(topics[0], first, 1) == [b"new"]
    await produce(bootstrap, topics[0], [b"waits"])
    assert await receive(topics[0], first, 2) == [b"waits", b"new"]
    await produce(bootstrap, topics[0], [b"for the former"])
    assert await receive(topics[0], other, 1) == [b"new"]
    await produce(bootstrap, topics[1], [b"before"])
    assert await receive(topics[1], other, 1) == [b"new"]
    await produce(bootstrap, topics[1], [b"waits"])
    assert await receive(topics[1], other, 2) == [b"waits", b"new"]


async def test_a_shared_subscription_in_use_has_one_selector(listener: AmqpServer, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    shared = [DurableSubscription(), Capabilities("shared", "global")]

    def work(connection: BlockingConnection) -> None:
        connection.create_receiver(topic, name=f"s-{topic}|1", options=[*shared, Selector("x IS NULL")])
        connection.create_receiver(topic, name=f"s-{topic}|2", options=[*shared, Selector("x IS NULL")])
        with pytest.raises(LinkDetached, match="another selector"):
            connection.create_receiver(topic, name=f"s-{topic}|3", options=[*shared, Selector("y IS NULL")])

    await as_client(listener, work)


async def test_a_subscription_is_for_one_link(listener: AmqpServer, new_topic: Any) -> None:
    """Another attach, from another connection of the container, steals it."""
    topic = await new_topic(partitions=1)
    container = f"plant-{topic}"

    def attach(connection: BlockingConnection) -> list[bytes]:
        former = connection.create_receiver(topic, credit=5, name="alarms", options=DurableSubscription())
        other = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT, container_id=container)
        latter = other.create_receiver(topic, credit=5, name="alarms", options=DurableSubscription())
        with pytest.raises(LinkDetached, match=outcomes.STOLEN):
            former.receive(TIMEOUT)
        other.create_sender(topic).send(data(b"x"))
        found = take(latter)
        other.close()
        return found

    assert await as_client(listener, attach, container_id=container) == [b"x"]


async def test_shared_subscriptions(
    listener: AmqpServer, bootstrap: str, new_topic: Any, admin: AIOKafkaAdminClient
) -> None:
    """Links of one name share its messages, across containers if it is global; a volatile one ends with them."""
    topic = await new_topic(partitions=1)
    wanted = Capabilities("topic", "shared", "global")

    def receive(connection: BlockingConnection) -> list[bytes]:
        assert "SHARED-SUBS" in [str(name) for name in connection.conn.remote_offered_capabilities]
        other = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT, container_id="other")
        first = connection.create_receiver(topic, credit=0, name=f"{topic}|global-volatile1", options=wanted)
        assert capabilities(first) == ["topic", "shared", "global"]
        second = other.create_receiver(topic, credit=0, name=f"{topic}|global-volatile2", options=wanted)
        sender = connection.create_sender(topic)
        for number in range(2):
            sender.send(data(b"%d" % number))
        # Each grants one credit when it receives: proton would top up earlier credit, and the first would get both.
        found = [body_of(first.receive(TIMEOUT)), body_of(second.receive(TIMEOUT))]
        first.accept()
        second.accept()
        other.close()
        return found

    assert sorted(await as_client(listener, receive, container_id="one")) == [b"0", b"1"]
    await until_deleted(admin, f"{topic}:volatile")


async def test_a_named_subscription_outlives_its_receivers(listener: AmqpServer, new_topic: Any) -> None:
    """`T::S` is consumer group S from now on; closing its link does not delete it."""
    topic = await new_topic(partitions=1)

    def receive(connection: BlockingConnection) -> list[bytes]:
        address = f"{topic}::sub-{topic}"
        sender = connection.create_sender(topic)
        sender.send(data(b"before"))
        connection.create_receiver(address, credit=0).close()
        sender.send(data(b"after"))
        return take(connection.create_receiver(address, credit=1, name="second"))

    assert await as_client(listener, receive) == [b"after"]


async def test_a_group_of_another_topic_is_not_deleted(
    listener: AmqpServer, bootstrap: str, new_topic: Any, admin: AIOKafkaAdminClient
) -> None:
    """A client that knows a group's name cannot delete its commits in topics to which it has no right."""
    topic, other = await new_topic(partitions=1), await new_topic(partitions=1)
    await produce(bootstrap, other, [b"x"])
    wanted = Capabilities("shared", "global")

    def work(connection: BlockingConnection) -> None:
        receiver = connection.create_receiver(f"{other}/group.id/{other}", credit=1)
        take(receiver)
        receiver.close()
        option = [DurableSubscription(), wanted]
        connection.create_receiver(topic, credit=1, name=other, options=option).close()
        # Another attach waits until the first link has ended, with or without deleting the group.
        connection.create_receiver(topic, credit=1, name=other, options=option).close()

    await as_client(listener, work)
    assert other in {partition.topic for partition in await committed(admin, other)}
