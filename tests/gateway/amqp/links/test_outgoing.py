"""Deliveries to a receiving peer, with proton's blocking client and a real Kafka."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from aiokafka import AIOKafkaProducer
from proton import Delivery, Endpoint, Message
from proton.reactor import AtMostOnce
from proton.utils import BlockingConnection, LinkDetached

from gateway.amqp.server import AmqpServer
from protocols.amqp import outcomes
from tests.support.amqp import Temporary, data

TIMEOUT = 60
T = TypeVar("T")


async def as_client(listener: AmqpServer, work: Callable[[BlockingConnection], T]) -> T:
    def run() -> T:
        connection = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        try:
            return work(connection)
        finally:
            connection.close()

    return await asyncio.to_thread(run)


async def produce(bootstrap: str, topic: str, values: list[bytes], **fields: Any) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    try:
        for value in values:
            await producer.send(topic, value, **fields)
    finally:
        await producer.stop()


def body(message: Message) -> bytes:
    found = message.body
    assert isinstance(found, memoryview | bytes)
    return bytes(found)


async def test_a_plain_record(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic()
    headers = [
        ("content-type", b"text/plain"),
        ("correlation-id", b"corr-1"),
        ("reply-to", b"replies/x"),
        ("unit", b"C"),
    ]
    await produce(bootstrap, topic, [b"21.5"], key=b"kitchen/temp", headers=headers, partition=1)

    def receive(connection: BlockingConnection) -> Message:
        receiver = connection.create_receiver(f"{topic}/group.id/{topic}")
        message = receiver.receive(TIMEOUT)
        receiver.accept()
        return message

    message = await as_client(listener, receive)
    assert body(message) == b"21.5"
    assert message.content_type == "text/plain"
    assert message.correlation_id == "corr-1"
    assert message.reply_to == "replies/x"
    assert message.properties == {"unit": "C"}
    assert message.annotations is not None
    assert message.annotations["x-opt-bridge.key"] == "kitchen/temp"
    assert message.annotations["x-opt-bridge.partition"] == 1
    assert message.annotations["x-opt-bridge.offset"] == 0


async def test_an_accepted_record_is_not_given_again(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"%d" % number for number in range(10)])
    address = f"{topic}/group.id/{topic}"

    def take(connection: BlockingConnection, count: int) -> list[bytes]:
        receiver = connection.create_receiver(address, credit=count)
        found = []
        for _ in range(count):
            found.append(body(receiver.receive(TIMEOUT)))
            receiver.accept()
        receiver.close()
        return found

    assert await as_client(listener, lambda connection: take(connection, 4)) == [b"0", b"1", b"2", b"3"]
    assert await as_client(listener, lambda connection: take(connection, 6)) == [
        b"%d" % number for number in range(4, 10)
    ]


async def test_unsettled_records_of_a_lost_link_go_back(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"a", b"b"])
    address = f"{topic}/group.id/{topic}"

    def receive(connection: BlockingConnection) -> tuple[list[bytes], list[bytes]]:
        first = connection.create_receiver(address, credit=2, name="first")
        lost = [body(first.receive(TIMEOUT)) for _ in range(2)]
        first.close()
        second = connection.create_receiver(address, credit=2, name="second")
        again = []
        for _ in range(2):
            again.append(body(second.receive(TIMEOUT)))
            second.accept()
        return lost, again

    lost, again = await as_client(listener, receive)
    assert lost == again == [b"a", b"b"]


@pytest.mark.parametrize(("state", "count"), [(Delivery.RELEASED, 0), (Delivery.MODIFIED, 1)])
async def test_returned_records_are_offered_again(
    listener: AmqpServer, bootstrap: str, new_topic: Any, state: Any, count: int
) -> None:
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"again"])

    def receive(connection: BlockingConnection) -> Message:
        receiver = connection.create_receiver(f"{topic}/group.id/{topic}", credit=10)
        first = receiver.receive(TIMEOUT)
        assert first.delivery_count == 0
        if state is Delivery.MODIFIED:
            receiver.fetcher.unsettled[0].local.failed = True
        receiver.settle(state)
        second = receiver.receive(TIMEOUT)
        receiver.accept()
        return second

    message = await as_client(listener, receive)
    assert body(message) == b"again"
    assert message.delivery_count == count


@pytest.mark.parametrize("kind", ["group", "temporary queue"])
async def test_released_records_return_immediately_and_in_their_places(
    start_listener: Any, new_topic: Any, kind: str
) -> None:
    """In any order, and several times (part 3.4.4)."""
    topic = await new_topic(partitions=1)
    listener = await start_listener(amqp={"reply_topic": await new_topic()})

    def work(connection: BlockingConnection) -> tuple[list[list[bytes]], float]:
        address = f"queue://{topic}"
        if kind == "temporary queue":
            maker = connection.create_sender(None, options=Temporary("temporary-queue"))
            address = maker.link.remote_target.address
        sender = connection.create_sender(address)
        for number in range(20):
            sender.send(data(b"%d" % number))
        receiver = connection.create_receiver(address, credit=20)
        rounds: list[list[bytes]] = []
        began = time.monotonic()
        for _ in range(8):
            messages = [receiver.receive(TIMEOUT) for _ in range(20)]
            assert not any(message.delivery_count for message in messages)
            rounds.append([body(message) for message in messages])
            deliveries = list(receiver.fetcher.unsettled)
            receiver.fetcher.unsettled.clear()
            for delivery in deliveries[::3] + deliveries[1::3] + deliveries[2::3]:
                delivery.update(Delivery.RELEASED)
                delivery.settle()
            receiver.link.flow(20)
        took = time.monotonic() - began
        return rounds, took

    rounds, took = await as_client(listener, work)
    assert rounds == [[b"%d" % number for number in range(20)]] * 8
    assert took < 3  # with a back-off that doubles it was 15 s


async def test_rejected_records_are_not_offered_again(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"poison", b"good"])

    def receive(connection: BlockingConnection) -> list[bytes]:
        receiver = connection.create_receiver(f"{topic}/group.id/{topic}", credit=1)
        found = [body(receiver.receive(TIMEOUT))]
        receiver.reject()
        found.append(body(receiver.receive(TIMEOUT)))
        receiver.accept()
        return found

    assert await as_client(listener, receive) == [b"poison", b"good"]
    assert listener.statistics().rejected_by_peer >= 1


async def test_the_end_of_the_log_is_fixed_at_the_attach(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"old"])

    def receive(connection: BlockingConnection) -> tuple[bytes, bytes]:
        one = connection.create_receiver(topic, credit=5, name="one")
        settled = connection.create_receiver(topic, credit=5, name="two", options=AtMostOnce())
        connection.create_sender(topic).send(Message(body=b"new", inferred=True))
        found = body(one.receive(TIMEOUT)), body(settled.receive(TIMEOUT))
        one.accept()
        return found

    assert await as_client(listener, receive) == (b"new", b"new")


async def test_credit_is_demand(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    """A receiver gets exactly as many messages as it grants credit, and none is lost in between."""
    topic = await new_topic(partitions=1)
    count = 300

    def receive(connection: BlockingConnection) -> list[bytes]:
        receiver = connection.create_receiver(topic, credit=0)
        sender = connection.create_sender(topic)
        for number in range(count):
            connection.wait(lambda: sender.link.credit > 0, timeout=TIMEOUT)
            sender.link.send(Message(body=b"%d" % number, inferred=True))
        sender.send(Message(body=b"last", inferred=True))
        assert not receiver.fetcher.has_message
        found: list[bytes] = []
        while len(found) < count:
            step = min(7, count - len(found))
            receiver.link.flow(step)
            for _ in range(step):
                connection.wait(lambda: receiver.fetcher.has_message, timeout=TIMEOUT)
                found.append(body(receiver.fetcher.pop()))
                receiver.accept()
            assert receiver.link.credit == 0
        return found

    assert await as_client(listener, receive) == [b"%d" % number for number in range(count)]


@pytest.mark.clause("AMQP-2.6.7")
async def test_drain_gives_the_credit_back(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"one"])

    def receive(connection: BlockingConnection) -> bytes:
        receiver = connection.create_receiver(f"{topic}/group.id/{topic}", credit=0)
        receiver.link.drain(10)
        connection.wait(lambda: not receiver.link.draining(), timeout=TIMEOUT)
        assert receiver.link.credit == 0
        return body(receiver.receive(TIMEOUT))

    assert await as_client(listener, receive) == b"one"


@pytest.mark.clause("AMQP-2.6.7")
async def test_a_drain_may_come_before_the_attach_is_answered(
    listener: AmqpServer, bootstrap: str, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"one"])

    def receive(connection: BlockingConnection) -> int:
        link = connection.container.create_receiver(connection.conn, f"{topic}/group.id/{topic}")
        link.drain(10)
        assert not link.state & Endpoint.REMOTE_ACTIVE
        connection.wait(lambda: not link.draining(), timeout=TIMEOUT)
        return int(link.queued)

    assert await as_client(listener, receive) == 1


async def test_unsettled_is_bounded(start_listener: Any, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    listener = await start_listener(amqp={"max_unsettled": 5})
    await produce(bootstrap, topic, [b"%d" % number for number in range(12)])

    def receive(connection: BlockingConnection) -> tuple[int, list[bytes]]:
        receiver = connection.create_receiver(f"{topic}/group.id/{topic}", credit=100)
        connection.wait(lambda: len(receiver.fetcher.incoming) == 5, timeout=TIMEOUT)
        at_first = listener.statistics().unsettled
        found = []
        for _ in range(12):
            found.append(body(receiver.receive(TIMEOUT)))
            receiver.accept()
        return at_first, found

    at_first, found = await as_client(listener, receive)
    assert at_first == 5
    assert found == [b"%d" % number for number in range(12)]


async def test_expired_records_are_skipped(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"stale"], headers=[("expiry", b"1000")])
    await produce(bootstrap, topic, [b"fresh"])

    def receive(connection: BlockingConnection) -> bytes:
        receiver = connection.create_receiver(f"{topic}/group.id/{topic}", credit=1)
        found = body(receiver.receive(TIMEOUT))
        receiver.accept()
        return found

    assert await as_client(listener, receive) == b"fresh"
    assert listener.statistics().expired == 1


@pytest.mark.parametrize(
    ("address", "condition"),
    [
        ("no-such-topic", outcomes.NOT_FOUND),
        ("no-such-topic/group.id/g", outcomes.NOT_FOUND),
        ("__consumer_offsets", outcomes.UNAUTHORIZED_ACCESS),
        ("{topic}/group.id/", outcomes.INVALID_FIELD),
        ("{topic}::", outcomes.INVALID_FIELD),
        ("{topic}/some/key", outcomes.NOT_IMPLEMENTED),
        ("{topic}/partitions/99", outcomes.NOT_FOUND),
    ],
)
@pytest.mark.clause("AMQP-2.6.3")
async def test_sources_that_are_refused(listener: AmqpServer, new_topic: Any, address: str, condition: str) -> None:
    topic = await new_topic()

    def attach(connection: BlockingConnection) -> None:
        with pytest.raises(LinkDetached, match=condition):
            connection.create_receiver(address.format(topic=topic))

    await as_client(listener, attach)


async def test_two_links_of_a_group_share_the_records(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=4)
    values = [b"%d" % number for number in range(40)]
    for number in range(4):
        await produce(bootstrap, topic, values[number::4], partition=number)

    def receive(connection: BlockingConnection) -> list[bytes]:
        links = [connection.create_receiver(f"{topic}/group.id/{topic}", credit=50, name=f"link{n}") for n in range(2)]
        connection.wait(lambda: sum(len(link.fetcher.incoming) for link in links) == 40, timeout=TIMEOUT)
        found = []
        for link in links:
            while link.fetcher.has_message:
                found.append(body(link.fetcher.pop()))
                link.accept()
        return found

    assert sorted(await as_client(listener, receive)) == sorted(values)
