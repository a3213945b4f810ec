"""Receivers with selectors share a queue as in JMS: records that one does not select stay for the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from proton import Described, Timeout, symbol
from proton.reactor import Filter
from proton.utils import BlockingConnection

from flowcontrol.offsets import read_ledger
from gateway.amqp.server import AmqpServer
from gateway.kafka.driver.kafka_consumer import committed_positions
from gateway.kafka.groups.delivery import ready
from tests.gateway.amqp.conftest import amqp_listener
from tests.support.amqp import TIMEOUT, as_client, body_of
from tests.support.amqp_transactions import Transacted, TransactedClient
from tests.support.assembled import Assembled, assembled

SELECTOR = symbol("apache.org:selector-filter:string")


async def produce(bootstrap: str, topic: str, kinds: str, partitions: int = 1) -> None:
    """Store a record for each letter, with its index as the value, in the partitions by turns."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for number, kind in enumerate(kinds):
            headers = [("k", kind.encode())]
            await producer.send(topic, b"%d" % number, partition=number % partitions, headers=headers)


def chosen(kind: str) -> Filter:
    return Filter({symbol("s"): Described(SELECTOR, f"k = '{kind}'")})


class Receiver:
    """A queue's receiver in proton's blocking client."""

    def __init__(self, connection: BlockingConnection, queue: str, kind: str, credit: int = 10) -> None:
        options = chosen(kind) if kind else None
        name = f"{queue}-{kind}-{Receiver.count}"
        Receiver.count += 1
        self._receiver: Any = connection.create_receiver(f"queue://{queue}", name=name, options=options, credit=credit)

    count = 0

    def take(self, count: int) -> list[int]:
        """Receive and accept."""
        found = []
        for _ in range(count):
            found.append(int(body_of(self._receiver.receive(TIMEOUT))))
            self._receiver.accept()
        return found

    def rest(self) -> list[int]:
        """Return the messages that arrive although none should."""
        try:
            return [int(body_of(self._receiver.receive(0.5)))]
        except Timeout:
            return []


def numbers(kinds: str, kind: str) -> list[int]:
    return [number for number, one in enumerate(kinds) if one == kind]


async def test_unselected_records_stay_for_the_others(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    """Receivers one after the other, receivers at the same time, and after a lost connection."""
    topic, kinds = await new_topic(partitions=1), "ABCABCABCABCABC"
    await produce(bootstrap, topic, kinds)

    def one_kind(connection: BlockingConnection) -> list[int]:
        return Receiver(connection, topic, "A").take(5)

    def others(connection: BlockingConnection) -> list[list[int]]:
        second = Receiver(connection, topic, "B")
        found = [second.take(5)]
        third = Receiver(connection, topic, "C")  # while another receiver is attached
        found.append(third.take(5))
        rest = Receiver(connection, topic, "")
        return [*found, rest.rest()]

    assert await as_client(listener, one_kind) == numbers(kinds, "A")
    assert await as_client(listener, others) == [numbers(kinds, "B"), numbers(kinds, "C"), []]


async def test_a_slow_receiver_stops_no_other(
    listener: AmqpServer, backend: Assembled, bootstrap: str, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do records that none selects; the slow receiver gets its records in order, also newly stored ones."""
    monkeypatch.setattr(ready, "WAITING_RECORDS", 50)
    topic, kinds = await new_topic(partitions=1), "ABC" * 400
    await produce(bootstrap, topic, kinds)

    def receive(connection: BlockingConnection) -> list[list[int]]:
        slow = Receiver(connection, topic, "A", credit=1)
        quick = Receiver(connection, topic, "B", credit=100)
        return [quick.take(400), slow.take(400)]

    quick, slow = await as_client(listener, receive)
    assert (quick, slow) == (numbers(kinds, "B"), numbers(kinds, "A"))

    def rest(connection: BlockingConnection) -> list[int]:
        return Receiver(connection, topic, "").take(400)

    assert await as_client(listener, rest) == numbers(kinds, "C")


async def test_a_restarted_gateway_knows_what_was_settled_behind_a_gap(bootstrap: str, new_topic: Any) -> None:
    """The committed offset stays before unselected records; accepted records are not delivered again."""
    topic, kinds = await new_topic(partitions=2), "BAABCA" * 50
    await produce(bootstrap, topic, kinds, partitions=2)
    async with assembled(bootstrap, create=False) as side, amqp_listener(side) as listener:
        assert sorted(await as_client(listener, lambda c: Receiver(c, topic, "A").take(150))) == numbers(kinds, "A")
    async with assembled(bootstrap, create=False) as side, amqp_listener(side) as listener:
        got = await as_client(listener, lambda c: Receiver(c, topic, "B").take(100))
        assert sorted(got) == numbers(kinds, "B")
    async with assembled(bootstrap, create=False) as side, amqp_listener(side) as listener:

        def rest(connection: BlockingConnection) -> list[int]:
            receiver = Receiver(connection, topic, "")
            return [*receiver.take(50), *receiver.rest()]

        assert sorted(await as_client(listener, rest)) == numbers(kinds, "C")


async def test_another_gateway_goes_on_where_the_first_was(
    listener: AmqpServer, bootstrap: str, new_topic: Any
) -> None:
    """A second gateway is assigned partitions while the first has receivers."""
    topic, kinds = await new_topic(partitions=2), "AABB" * 50
    await produce(bootstrap, topic, kinds, partitions=2)
    async with assembled(bootstrap, create=False) as side, amqp_listener(side) as other:

        def receive(connection: BlockingConnection) -> list[list[int]]:
            first = Receiver(connection, topic, "A").take(100)
            Receiver(connection, topic, "C")  # proton's last outcome leaves with the next frame
            second = BlockingConnection(f"amqp://{other.bound}", timeout=TIMEOUT)
            try:
                there = Receiver(second, topic, "B").take(50)  # of its assigned partition
                connection.close()  # then it is assigned the other one, too
                return [first, there]
            finally:
                second.close()

        first, there = await as_client(listener, receive)
    assert sorted(first) == numbers(kinds, "A")
    assert len(set(there)) == 50
    rest = await as_client(listener, lambda c: Receiver(c, topic, "").take(50))
    assert sorted([*there, *rest]) == numbers(kinds, "B")


async def test_records_retired_behind_a_gap_are_committed_with_the_transaction(bootstrap: str, new_topic: Any) -> None:
    """While the records before it are not settled."""
    topic, kinds = await new_topic(partitions=1), "BABA"
    await produce(bootstrap, topic, kinds)
    async with (
        assembled(bootstrap, create=False) as side,
        amqp_listener(side) as listener,
        TransactedClient(listener.bound) as client,
    ):

        def retire() -> str:
            receiver: Any = client.connection.create_receiver(f"queue://{topic}", options=chosen("A"), credit=10)
            transaction = Transacted(client.connection)
            assert [int(body_of(transaction.take(receiver))) for _ in range(2)] == [1, 3]
            return transaction.end()

        assert await client.run(retire) == "committed"
        async with AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=topic, enable_auto_commit=False) as other:
            partition = TopicPartition(topic, 0)
            [stored] = (await committed_positions(other, [partition])).values()
    assert stored.offset == 0
    ledger = read_ledger(0, stored.metadata)
    assert ledger is not None
    assert (list(ledger.open.runs()), ledger.end) == ([(0, 1), (2, 3)], 4)


async def test_a_subscription_s_selector_takes_the_rest_away(
    listener: AmqpServer, backend: Assembled, bootstrap: str, new_topic: Any
) -> None:
    """Records that a subscription does not select are committed, because no other receiver can get them."""
    topic = await new_topic(partitions=1)

    def receive(connection: BlockingConnection) -> list[int]:
        receiver: Any = connection.create_receiver(f"{topic}::S{topic}", options=chosen("A"), credit=10)
        asyncio.run_coroutine_threadsafe(produce(bootstrap, topic, "BABA"), loop).result(TIMEOUT)
        found = []
        for _ in range(2):
            found.append(int(body_of(receiver.receive(TIMEOUT))))
            receiver.accept()
        return found

    loop = asyncio.get_running_loop()
    assert await as_client(listener, receive) == [1, 3]
    assert all(one.unselected == 0 for one in backend.log.groups.statistics())
