"""Credit and outcomes of a sending peer, with proton's blocking client and a real Kafka."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from proton import ConnectionException, Delivery, Message, symbol
from proton.reactor import AtMostOnce
from proton.utils import BlockingConnection, LinkDetached, SendException

from gateway.amqp.server import AmqpServer
from gateway.settings.config import AccessRule, SecurityConfig
from mapping.outcomes import Outcome
from protocols.amqp import outcomes
from tests.support.amqp import as_client, data
from tests.support.topics import read_all

TIMEOUT = 60


async def test_keys_headers_and_partitions(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=4)

    def send(connection: BlockingConnection) -> None:
        plain = connection.create_sender(topic)
        plain.send(data(b"by key", annotations={symbol("x-opt-bridge.key"): "k"}, properties={"unit": "C"}))
        plain.send(data(b"by annotation", annotations={symbol("x-opt-bridge.partition"): 3}))
        connection.create_sender(f"/topics/{topic}/partitions/2").send(data(b"by address"))
        connection.create_sender(f"topic://{topic}/kitchen/temp").send(data(b"by rest"))

    await as_client(listener, send)
    found = {record.value: record for record in await read_all(bootstrap, topic)}
    assert found[b"by key"].key == b"k"
    headers = dict(found[b"by key"].headers)
    assert headers["gw.protocol"] == b"amqp10"
    assert headers["unit"] == b"C"
    assert found[b"by annotation"].partition == 3
    assert found[b"by address"].partition == 2
    assert found[b"by rest"].key == b"kitchen/temp"


async def test_order_and_number(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    """More messages than the window, sent without waiting: all stored, in order, all accepted."""
    topic = await new_topic(partitions=1)
    count = 3000

    def send(connection: BlockingConnection) -> list[int]:
        sender = connection.create_sender(topic)
        link = sender.link
        deliveries = []
        for number in range(count):
            connection.wait(lambda: link.credit > 0, timeout=TIMEOUT)
            deliveries.append(link.send(data(b"%d" % number)))
        connection.wait(lambda: all(delivery.settled for delivery in deliveries), timeout=TIMEOUT)
        return [int(delivery.remote_state) for delivery in deliveries]

    assert await as_client(listener, send) == [outcomes.ACCEPTED] * count
    assert [record.value for record in await read_all(bootstrap, topic)] == [b"%d" % number for number in range(count)]
    assert listener.statistics().incoming[Outcome.STORED] >= count


async def test_settled_transfers_are_stored_too(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)

    def send(connection: BlockingConnection) -> None:
        sender = connection.create_sender(topic, options=AtMostOnce())
        for number in range(50):
            connection.wait(lambda: sender.link.credit > 0, timeout=TIMEOUT)
            sender.link.send(data(b"%d" % number)).settle()
        last = connection.create_sender(topic, name="last")
        last.send(data(b"last"))  # the same connection: what was sent before is stored before

    await as_client(listener, send)
    values = [record.value for record in await read_all(bootstrap, topic)]
    assert values == [b"%d" % number for number in range(50)] + [b"last"]


@pytest.mark.parametrize(
    ("address", "condition"),
    [
        ("no-such-topic", outcomes.NOT_FOUND),
        ("__consumer_offsets", outcomes.UNAUTHORIZED_ACCESS),
        ("bad name", outcomes.NOT_FOUND),
        ("{topic}/partitions/99", outcomes.NOT_FOUND),
        ("{topic}/group.id/g", outcomes.INVALID_FIELD),
    ],
)
@pytest.mark.clause("AMQP-2.6.3")
async def test_targets_that_are_refused(
    listener: AmqpServer, new_topic: Any, address: str | None, condition: str
) -> None:
    topic = await new_topic()

    def attach(connection: BlockingConnection) -> None:
        with pytest.raises(LinkDetached, match=condition):
            connection.create_sender(address.format(topic=topic) if address else None)
        connection.create_sender(topic, name="other").send(data(b"x"))  # the connection stays open

    await as_client(listener, attach)


async def test_messages_that_cannot_be_mapped_are_refused_alone(
    listener: AmqpServer, bootstrap: str, new_topic: Any
) -> None:
    """Also between others that arrive together, and several in a row; the others keep their order."""
    topic = await new_topic(partitions=1)
    broken = b"\x00\x53\x75\xa0\x09short"
    bodies = [broken if number % 7 in (0, 3, 4) or number == 99 else b"%d" % number for number in range(100)]

    def send(connection: BlockingConnection) -> list[int]:
        sender = connection.create_sender(topic)
        link = sender.link
        connection.wait(lambda: link.credit >= len(bodies), timeout=TIMEOUT)
        deliveries = []
        for number, body in enumerate(bodies):
            deliveries.append(link.delivery(b"%d" % number))
            link.stream(body if body is broken else data(body).encode())
            link.advance()
        connection.wait(lambda: all(delivery.settled for delivery in deliveries), timeout=TIMEOUT)
        return [int(delivery.remote_state) for delivery in deliveries]

    wanted = [outcomes.REJECTED if body is broken else outcomes.ACCEPTED for body in bodies]
    assert await as_client(listener, send) == wanted
    assert [record.value for record in await read_all(bootstrap, topic)] == [one for one in bodies if one is not broken]


async def test_a_record_too_large_is_refused_alone(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1, max_message_bytes="2000")

    def send(connection: BlockingConnection) -> tuple[int, int, str]:
        sender = connection.create_sender(topic)
        link = sender.link
        deliveries = []
        for body in (b"before", bytes(1990), bytes(5000), b"after"):
            connection.wait(lambda: link.credit > 0, timeout=TIMEOUT)
            deliveries.append(link.send(data(body)))
        connection.wait(lambda: all(delivery.settled for delivery in deliveries), timeout=TIMEOUT)
        states = [int(delivery.remote_state) for delivery in deliveries]
        assert states == [outcomes.ACCEPTED, outcomes.REJECTED, outcomes.REJECTED, outcomes.ACCEPTED]
        conditions = {delivery.remote.condition.name for delivery in deliveries[1:3]}
        return link.remote_max_message_size, len(deliveries), conditions.pop() if len(conditions) == 1 else ""

    limit, _, condition = await as_client(listener, send)
    assert condition == outcomes.MESSAGE_SIZE_EXCEEDED
    assert limit == 2000
    assert [record.value for record in await read_all(bootstrap, topic)] == [b"before", b"after"]


async def test_the_limit_of_a_body_is_the_bodys(start_listener: Any, bootstrap: str, new_topic: Any) -> None:
    """A body of exactly the limit is stored whatever the other sections; one byte more is refused, also in a run."""
    limit = 100_000
    listener = await start_listener(amqp={"max_body_bytes": limit, "max_message_bytes": 2 * limit})
    topic = await new_topic(partitions=1)
    aside = {
        "properties": {f"p{number}": "x" * 900 for number in range(50)},
        "annotations": {symbol("x-opt-large"): "y" * 20_000},
        "subject": "s" * 5_000,
        "reply_to": "r" * 5_000,
    }

    def send(connection: BlockingConnection) -> list[tuple[int, str | None]]:
        sender = connection.create_sender(topic)
        link = sender.link
        assert link.remote_max_message_size == 2 * limit
        deliveries = []
        for message in (
            data(bytes(limit), **aside), data(bytes(limit + 1)), data(bytes(limit + 1), **aside),
            Message("z" * limit, **aside), Message("z" * (limit + 1)), data(bytes(limit)),
            *(data(bytes(size)) for size in (10, 11, 12, 13, limit + 1, limit)),  # a run of equal messages
        ):  # fmt: skip
            connection.wait(lambda: link.credit > 0, timeout=TIMEOUT)
            deliveries.append(link.send(message))
        connection.wait(lambda: all(delivery.settled for delivery in deliveries), timeout=TIMEOUT)
        return [
            (int(delivery.remote_state), delivery.remote.condition and delivery.remote.condition.name)
            for delivery in deliveries
        ]

    told = await as_client(listener, send)
    stored, refused = (outcomes.ACCEPTED, None), (outcomes.REJECTED, outcomes.MESSAGE_SIZE_EXCEEDED)
    assert told == [stored, refused, refused, stored, refused, stored, *[stored] * 4, refused, stored]
    sizes = [len(record.value) for record in await read_all(bootstrap, topic)]
    assert sizes == [limit, limit, limit, 10, 11, 12, 13, limit]


async def test_an_invalid_message_is_rejected(listener: AmqpServer, new_topic: Any) -> None:
    topic = await new_topic()

    def send(connection: BlockingConnection) -> Any:
        sender = connection.create_sender(topic)
        link = sender.link
        connection.wait(lambda: link.credit > 0, timeout=TIMEOUT)
        delivery = link.delivery("bad")
        link.stream(b"\x00\x53\x73\xff")
        link.advance()
        connection.wait(lambda: delivery.settled, timeout=TIMEOUT)
        bad = (delivery.remote_state, delivery.remote.condition.name)
        sender.send(data(b"good"))
        with pytest.raises(SendException):
            sender.send(data(b"bad", annotations={symbol("x-opt-bridge.partition"): 99}))
        return bad

    assert await as_client(listener, send) == (Delivery.REJECTED, outcomes.DECODE_ERROR)


async def test_rights(start_listener: Any, new_topic: Any) -> None:
    allowed, denied, partly = await new_topic(), await new_topic(), await new_topic()
    rules = (
        AccessRule(action="publish", topic=allowed),
        AccessRule(action="publish", topic=f"{partly}/mine/#"),
    )
    listener = await start_listener(security=SecurityConfig(access=rules))

    def attach(connection: BlockingConnection) -> None:
        connection.create_sender(allowed).send(data(b"x"))
        with pytest.raises(LinkDetached, match=outcomes.UNAUTHORIZED_ACCESS):
            connection.create_sender(denied)
        for address in (allowed, f"{allowed}/group.id/g"):
            with pytest.raises(LinkDetached, match=outcomes.UNAUTHORIZED_ACCESS):
                connection.create_receiver(address)
        sender = connection.create_sender(partly)
        sender.send(data(b"x", annotations={symbol("x-opt-bridge.key"): "mine/a"}))
        with pytest.raises(SendException):
            sender.send(data(b"x", annotations={symbol("x-opt-bridge.key"): "theirs"}))

    await as_client(listener, attach)


async def test_credit_stops_with_the_budget(start_listener: Any, backend: Any, new_topic: Any) -> None:
    """With the process budget shut no credit is granted; when it opens, it is."""
    topic = await new_topic()
    listener = await start_listener(amqp={"link_credit": 4})
    budget = backend.log.publisher.budget
    shut = asyncio.Event()

    def work(connection: BlockingConnection, loop: asyncio.AbstractEventLoop) -> tuple[int, int]:
        sender = connection.create_sender(topic)
        link = sender.link
        connection.wait(lambda: link.credit == 4, timeout=TIMEOUT)
        loop.call_soon_threadsafe(shut_budget)
        asyncio.run_coroutine_threadsafe(shut.wait(), loop).result(TIMEOUT)
        for number in range(4):  # messages within the granted credit are stored and settled
            sender.send(data(b"%d" % number))
        spent = link.credit
        loop.call_soon_threadsafe(budget.give, budget.bytes_limit)
        connection.wait(lambda: link.credit > 0, timeout=TIMEOUT)
        sender.send(data(b"more"))
        return spent, link.credit

    def shut_budget() -> None:
        budget.take(budget.bytes_limit)
        shut.set()

    loop = asyncio.get_running_loop()
    spent, credit = await as_client(listener, lambda connection: work(connection, loop))
    assert spent == 0
    assert credit > 0


async def test_a_lost_connection_loses_nothing_and_breaks_nothing(
    listener: AmqpServer, backend: Any, bootstrap: str, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)

    accepted = asyncio.Event()
    loop = asyncio.get_running_loop()

    def send() -> None:
        connection = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        sender = connection.create_sender(topic)
        sender.send(data(b"accepted"))
        for _ in range(10):
            sender.link.send(data(b"unanswered"))
        loop.call_soon_threadsafe(accepted.set)
        with pytest.raises(ConnectionException):
            connection.wait(lambda: False, timeout=TIMEOUT)

    running = asyncio.create_task(asyncio.to_thread(send))
    await accepted.wait()
    for pump in list(listener.pumps):
        pump.abort()
    await running
    await listener.pumps.close(TIMEOUT)
    await backend.log.publisher.drain(TIMEOUT)
    statistics = listener.statistics()
    assert (statistics.open_connections, statistics.senders) == (0, 0)
    assert backend.log.publisher.budget.records == 0
    assert "accepted" in {record.value.decode() for record in await read_all(bootstrap, topic)}


async def test_stopping_closes(start_listener: Any, new_topic: Any) -> None:
    topic = await new_topic()
    listener = await start_listener()
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()

    def client() -> str:
        connection = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        connection.create_sender(topic).send(data(b"x"))
        loop.call_soon_threadsafe(ready.set)
        with pytest.raises(Exception, match="stopping"):
            connection.wait(lambda: False, timeout=TIMEOUT)
        condition = connection.conn.remote_condition
        return condition.name if condition is not None else ""

    running = asyncio.create_task(asyncio.to_thread(client))
    await ready.wait()
    listener.stop_receiving()
    await listener.stop(2.0)
    assert await running == outcomes.CONNECTION_FORCED


async def test_a_window_grows_while_kafka_is_not_crowded(start_listener: Any, new_topic: Any) -> None:
    """It starts with the smallest and reaches the largest, whose messages are less than a batch."""
    topic = await new_topic(partitions=1)
    listener = await start_listener(amqp={"link_credit": 400, "link_credit_least": 20})
    count = 1500

    def send(connection: BlockingConnection) -> tuple[int, int, int]:
        sender = connection.create_sender(topic)
        link = sender.link
        connection.wait(lambda: link.credit > 0, timeout=TIMEOUT)
        first = link.credit
        deliveries = []
        for number in range(count):
            connection.wait(lambda: link.credit > 0, timeout=TIMEOUT)
            deliveries.append(link.send(data(b"%d" % number)))
        connection.wait(lambda: all(delivery.settled for delivery in deliveries), timeout=TIMEOUT)
        connection.wait(lambda: link.credit > 200, timeout=TIMEOUT)
        return first, link.credit, listener.statistics().window

    first, last, window = await as_client(listener, send)
    assert (first, window) == (20, 400)
    assert 200 < last <= 400
