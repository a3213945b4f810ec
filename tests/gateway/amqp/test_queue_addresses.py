"""Which addresses are queues, what a queue's address with a key receives, and what a browser is shown."""

from __future__ import annotations

from typing import Any

import pytest
from proton import Message, symbol
from proton.reactor import Copy, ReceiverOption
from proton.utils import BlockingConnection, LinkDetached
from pydantic import ValidationError

from gateway.amqp.server import AmqpServer
from gateway.settings.protocols import AddressRule
from protocols.amqp import outcomes
from tests.gateway.amqp.test_queue_selectors import chosen, produce
from tests.support.amqp import TIMEOUT, as_client, body_of, data


class Queue(ReceiverOption):
    """The capability of a queue."""

    def apply(self, receiver: Any) -> None:
        receiver.source.capabilities.put_object(symbol("queue"))


def take(receiver: Any, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        found.append(body_of(receiver.receive(TIMEOUT)))
        receiver.accept()
    return found


async def test_a_plain_address_may_be_a_queue(start_listener: Any, new_topic: Any) -> None:
    jobs, live = await new_topic(partitions=1), await new_topic(partitions=1)
    rules = (
        AddressRule(pattern=f"{jobs}/live/#", type="topic"),
        AddressRule(pattern=f"{jobs}/#", type="queue"),
    )
    listener: AmqpServer = await start_listener(amqp={"addresses": rules})

    def receive(connection: BlockingConnection) -> list[list[bytes]]:
        sender = connection.create_sender(jobs)
        for number in range(4):
            sender.send(data(b"%d" % number))  # before a receiver attaches: a queue keeps the messages
        connection.create_sender(f"{jobs}/urgent").send(data(b"now"))
        one = connection.create_receiver(jobs, name="one", credit=2)
        found = take(one, 2)
        one.close()
        found += take(connection.create_receiver(jobs, name="two", credit=5), 3)
        by_key = take(connection.create_receiver(f"{jobs}/urgent", credit=5), 1)
        live_reader = connection.create_receiver(live, credit=5)
        connection.create_sender(live).send(data(b"live"))
        with pytest.raises(LinkDetached, match=outcomes.NOT_IMPLEMENTED):
            connection.create_receiver(f"{jobs}/live/x")
        return [found, by_key, take(live_reader, 1)]

    assert await as_client(listener, receive) == [
        [b"0", b"1", b"2", b"3", b"now"],  # each record once; records with a key belong to the topic, too
        [b"now"],
        [b"live"],
    ]


async def test_a_queue_receives_what_can_be_sent_to_it(listener: AmqpServer, new_topic: Any) -> None:
    """An address with a key: its receivers share only the records with this key."""
    topic = await new_topic(partitions=2)

    def receive(connection: BlockingConnection) -> list[list[bytes]]:
        for address in (f"queue://{topic}/a/b", f"queue://{topic}/c", f"/queues/{topic}/a/b"):
            sender = connection.create_sender(address)
            for k in "AB":
                sender.send(data(f"{address[-1]}{k}".encode(), properties={"k": k}))
        selecting = connection.create_receiver(f"queue://{topic}/a/b", name="s", options=chosen("A"), credit=5)
        found = [take(selecting, 2)]
        rest = connection.create_receiver(f"{topic}/a/b", name="r", options=Queue(), credit=5)
        found.append(take(rest, 2))
        browser = connection.create_receiver(f"queue://{topic}/c", name="b", options=Copy(), credit=5)
        found.append(take(browser, 2))
        return found

    assert await as_client(listener, receive) == [[b"bA", b"bA"], [b"bB", b"bB"], [b"cA", b"cB"]]


async def test_a_browser_is_shown_what_is_not_settled(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    """Also records after one that no receiver has selected, and then new records."""
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, "ABABA")

    def browse(connection: BlockingConnection) -> list[list[bytes]]:
        def shown(count: int, name: str) -> list[bytes]:
            browser: Any = connection.create_receiver(f"queue://{topic}", name=name, options=Copy(), credit=10)
            found = take(browser, count)
            browser.close()
            return found

        before = shown(5, "first")
        receiver: Any = connection.create_receiver(f"queue://{topic}", name="a", options=chosen("B"), credit=10)
        take(receiver, 2)
        receiver.close()
        connection.create_sender(topic).send(data(b"new"))
        return [before, shown(4, "second")]

    assert await as_client(listener, browse) == [[b"0", b"1", b"2", b"3", b"4"], [b"0", b"2", b"4", b"new"]]


@pytest.mark.parametrize("binary", [True, False], ids=["data", "text"])
async def test_a_large_body_with_all_sections(listener: AmqpServer, new_topic: Any, binary: bool) -> None:
    """By default 4 MiB of body besides other sections, in a topic with a limit above that."""
    topic = await new_topic(partitions=1, max_message_bytes="10485760")
    content = b"x" * (4 << 20)

    def exchange(connection: BlockingConnection) -> Message:
        message = data(content) if binary else Message(body=content.decode())
        message.id, message.correlation_id, message.subject = "i" * 500, "c" * 500, "s" * 500
        message.durable, message.priority, message.ttl = True, 7, 60.0
        message.properties = {f"p{number}": "v" * 500 for number in range(60)}
        message.annotations = {symbol("x-opt-a"): "a" * 500}
        message.instructions = {symbol("x-opt-d"): "d" * 500}
        sender: Any = connection.create_sender(topic)
        assert sender.link.remote_max_message_size >= len(content)
        receiver: Any = connection.create_receiver(topic, credit=1)
        sender.send(message)
        return receiver.receive(TIMEOUT)

    got = await as_client(listener, exchange)
    assert (body_of(got) if binary else str(got.body).encode()) == content
    assert (got.priority, got.subject, len(got.properties)) == (7, "s" * 500, 60)


@pytest.mark.parametrize("pattern", ["", "a/#/b", "a#", "a/b+"])
def test_a_pattern_is_a_filter(pattern: str) -> None:
    with pytest.raises(ValidationError):
        AddressRule(pattern=pattern, type="queue")
