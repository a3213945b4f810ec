"""Receivers with filters, with proton's blocking client and a real Kafka: positions, partitions, selectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from proton import Described, int32, symbol, timestamp, ulong
from proton.reactor import Filter, Selector
from proton.utils import BlockingConnection, LinkDetached

from gateway.amqp.server import AmqpServer
from protocols.amqp import outcomes
from protocols.amqp.links import Terminus, TerminusKind
from tests.support.amqp import TIMEOUT, as_client, body_of, data

FIRST_TIME = 1_700_000_000_000
SELECTOR = symbol("apache.org:selector-filter:string")
NOWHERE = Terminus(TerminusKind.NONE)
OFFSET_SPEC = symbol("rabbitmq:stream-offset-spec")


async def produce(bootstrap: str, topic: str, *records: tuple[bytes, int, str]) -> None:
    """Store records of (value, partition, colour), with timestamps a second apart."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for number, (value, partition, colour) in enumerate(records):
            headers = [("colour", colour.encode())]
            at = FIRST_TIME + number * 1000
            await producer.send_and_wait(topic, value, partition=partition, headers=headers, timestamp_ms=at)


def offset_spec(value: Any) -> dict[Any, Any]:
    return {OFFSET_SPEC: Described(OFFSET_SPEC, value)}


def selector(text: str, descriptor: Any = SELECTOR) -> dict[Any, Any]:
    return {symbol("chosen"): Described(descriptor, text)}


def values(receiver: Any, count: int) -> list[str]:
    found = []
    for _ in range(count):
        found.append(body_of(receiver.receive(TIMEOUT)).decode())
        receiver.accept()
    return found


def echoed(receiver: Any) -> list[str]:
    """The names of the filters in the gateway's attach."""
    data = receiver.link.remote_source.filter
    data.rewind()
    return sorted(data.get_object()) if data.next() else []


NAMES: Iterator[str] = (f"link{number}" for number in range(1000))


def receiver_of(connection: BlockingConnection, address: str, filters: dict[Any, Any], credit: int = 50) -> Any:
    return connection.create_receiver(address, credit=credit, name=next(NAMES), options=Filter(filters))


async def test_start_positions(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    """Partition 0 has a, c, e; partition 1 has b, d, f. Then one more is stored in each."""
    topic = await new_topic(partitions=2)
    await produce(bootstrap, topic, *[(b"abcdef"[n : n + 1], n % 2, "red") for n in range(6)])
    cases: list[tuple[str, dict[Any, Any], str, str]] = [
        (topic, offset_spec("first"), "abcdef", "gh"),
        (f"/queues/{topic}", offset_spec("first"), "abcdef", "gh"),
        (topic, offset_spec("last"), "ef", "gh"),
        (topic, offset_spec("next"), "", "gh"),
        (topic, offset_spec(timestamp(FIRST_TIME + 2500)), "def", "gh"),
        (f"{topic}/partitions/1", offset_spec(ulong(1)), "df", "h"),
        (f"{topic}/partitions/1", {}, "", "h"),
        (topic, {symbol("io.strimzi:partition-filter:int"): int32(0)}, "", "g"),
        (
            topic,
            {symbol("io.strimzi:partition-filter:int"): int32(0), symbol("io.strimzi:offset-filter:long"): 2},
            "e",
            "g",
        ),
        (f"{topic}/ConsumerGroups/$Default/Partitions/0", selector("amqp.annotation.x-opt-offset > '0'"), "ce", "g"),
        (topic, selector("amqp.annotation.x-opt-offset > '-1'"), "abcdef", "gh"),
        (topic, selector(f"amqp.annotation.x-opt-enqueued-time > '{FIRST_TIME + 3000}'"), "ef", "gh"),
        (topic, selector("amqp.annotation.x-opt-offset > '@latest'", ulong(0x000001370000000A)), "", "gh"),
        (topic, {**offset_spec("first"), **selector("amqp.annotation.x-opt-bridge.partition = 1")}, "bdf", "h"),
    ]

    def receive(connection: BlockingConnection) -> None:
        receivers = [receiver_of(connection, address, filters) for address, filters, _, _ in cases]
        for partition, value in ((0, "g"), (1, "h")):
            connection.create_sender(f"{topic}/partitions/{partition}").send(data(value.encode()))
        for receiver, (address, filters, old, new) in zip(receivers, cases, strict=True):
            expected = old + new
            assert sorted(values(receiver, len(expected))) == list(expected), (address, filters)
            assert echoed(receiver) == sorted(filters), (address, filters)
        assert not any(receiver.fetcher.has_message for receiver in receivers)

    await as_client(listener, receive)


async def test_a_selector_at_the_tail(listener: AmqpServer, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)

    def receive(connection: BlockingConnection) -> tuple[list[str], list[str], list[str]]:
        by_jms = receiver_of(
            connection, topic, selector("weight > 2.5 AND colour IN ('red')", ulong(0x0000468C00000004))
        )
        options = Selector("JMSCorrelationID LIKE 'order-%' OR colour IS NULL")
        by_name = connection.create_receiver(topic, credit=50, name="by-name", options=options)
        unknown = receiver_of(connection, topic, {symbol("rabbitmq:stream-filter"): Described(symbol("x"), "y")})
        sender = connection.create_sender(topic)
        for body, colour, weight, correlation in (
            (b"1", "red", 3, None), (b"2", "red", 2, "order-7"), (b"3", "blue", 3, None), (b"4", None, None, None),
            (b"5", "red", 2.75, "order-8"),
        ):  # fmt: skip
            own = {"colour": colour, "weight": weight} if colour else None
            sender.send(data(body, properties=own, correlation_id=correlation))
        assert (echoed(by_jms), echoed(by_name), echoed(unknown)) == (["chosen"], ["selector"], [])
        return values(by_jms, 2), values(by_name, 3), values(unknown, 5)

    assert await as_client(listener, receive) == (["1", "5"], ["2", "4", "5"], ["1", "2", "3", "4", "5"])


async def test_selectors_in_a_group(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    """Each record is delivered to a member that selects it; records that none selects stay in the queue."""
    topic = await new_topic(partitions=2)
    colours = ["red", "blue", "green"]
    records = [(b"%d" % n, n % 2, colours[n % 3]) for n in range(30)]
    await produce(bootstrap, topic, *records)
    address = f"{topic}/group.id/{topic}"

    def share(connection: BlockingConnection) -> list[list[str]]:
        blue = receiver_of(connection, address, selector("colour = 'blue'"), credit=0)
        red = receiver_of(connection, address, selector("colour = 'red'"))
        first = values(red, 10)  # though no receiver takes the blue ones
        receiver_of(connection, address, selector("colour = 'yellow'"))  # is offered the waiting blue records
        blue.link.flow(50)
        return [first, values(blue, 10)]

    def rest(connection: BlockingConnection) -> list[str]:
        receiver = receiver_of(connection, address, {})
        green = values(receiver, 10)
        connection.create_sender(f"{topic}/partitions/0").send(data(b"last"))
        return [*sorted(green, key=int), *values(receiver, 1)]

    red, blue = await as_client(listener, share)
    assert sorted(red, key=int) == [str(n) for n in range(0, 30, 3)]
    assert sorted(blue, key=int) == [str(n) for n in range(1, 30, 3)]
    assert await as_client(listener, rest) == [*(str(n) for n in range(2, 30, 3)), "last"]


async def test_no_local(listener: AmqpServer, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)

    def receive(connection: BlockingConnection) -> list[str]:
        no_local = {symbol("no-local"): Described(ulong(0x0000468C00000003), [])}
        receiver = receiver_of(connection, topic, no_local)
        connection.create_sender(topic).send(data(b"own"))
        other = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        other.create_sender(topic).send(data(b"other"))
        other.close()
        return values(receiver, 1)

    assert await as_client(listener, receive) == ["other"]


async def test_selectors_at_a_temporary_queue(start_listener: Any, new_topic: Any) -> None:
    """JMS clients wait like this for one reply each, by its correlation-id."""
    listener = await start_listener(amqp={"reply_topic": await new_topic(partitions=1)})

    def receive(connection: BlockingConnection) -> list[list[str]]:
        filters = Filter(selector("JMSCorrelationID = 'one'"))
        one = connection.create_receiver(None, dynamic=True, credit=10, name="one", options=filters)
        address = str(one.link.remote_source.address)
        two = receiver_of(connection, address, selector("JMSCorrelationID = 'two'"))
        assert echoed(one) == echoed(two) == ["chosen"]
        with pytest.raises(LinkDetached, match=outcomes.NOT_ALLOWED):
            receiver_of(connection, address, offset_spec("first"))
        sender = connection.create_sender(address)
        for body, correlation in ((b"1", "two"), (b"2", "three"), (b"3", "two"), (b"4", None), (b"5", "one")):
            sender.send(data(body, correlation_id=correlation))
        found = [values(two, 2), values(one, 1)]
        one_more = receiver_of(connection, address, {})
        sender.send(data(b"6"))
        return [*found, values(one_more, 1)]

    assert await as_client(listener, receive) == [["1", "3"], ["5"], ["6"]]


@pytest.mark.parametrize(
    ("address", "filters", "condition"),
    [
        ("{topic}", selector("colour = "), outcomes.INVALID_FIELD),
        ("{topic}/group.id/g", selector("colour LIKE 5"), outcomes.INVALID_FIELD),
        ("{topic}", offset_spec("soon"), outcomes.INVALID_FIELD),
        ("{topic}", offset_spec(ulong(0)), outcomes.INVALID_FIELD),
        ("{topic}/partitions/0", offset_spec(ulong(1)), outcomes.PRECONDITION_FAILED),
        ("{topic}/partitions/7", offset_spec("first"), outcomes.NOT_FOUND),
        ("{topic}/group.id/g", offset_spec("first"), outcomes.NOT_ALLOWED),
    ],
)
@pytest.mark.clause("AMQP-2.6.3")
async def test_filters_that_are_refused(
    listener: AmqpServer, new_topic: Any, address: str, filters: dict[Any, Any], condition: str
) -> None:
    """Two partitions, nothing in them."""
    topic = await new_topic(partitions=2)

    def attach(connection: BlockingConnection) -> int:
        with pytest.raises(LinkDetached, match=condition) as caught:
            receiver_of(connection, address.format(topic=topic), filters)
        return int(caught.value.link.remote_source.type)

    assert await as_client(listener, attach) == 0  # a null source: the refusal of an attach
