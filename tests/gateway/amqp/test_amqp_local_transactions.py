"""proton's own transaction API against the listener and a real Kafka: all or nothing is visible."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from proton import Described, Message, Terminus, symbol
from proton.utils import LinkDetached

from gateway.amqp.server import AmqpServer
from gateway.amqp.transactions import COMMAND_BYTES, COMMAND_CREDIT
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.transactions.kafka_transaction import KafkaTransaction
from protocols.amqp import outcomes
from protocols.amqp.transactions import LOCAL_TRANSACTIONS, ROLLED_BACK, TIMED_OUT, UNKNOWN_ID
from tests.support.amqp import body_of, data
from tests.support.amqp_frames import Frames, WireClient
from tests.support.amqp_transactions import Transacted, TransactedClient
from tests.support.waiting import wait_until

WAIT_S = 60.0
MARK = b"mark "
ACCEPTED = (outcomes.ACCEPTED, "")


class Reader:
    """A read_committed reader of all records."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap

    async def visible(self, topics: Collection[str]) -> dict[str, list[bytes]]:
        """Return what is visible now, from the beginning of each topic to its last stable offset."""
        # Not `seek_to_beginning`: a pending reset to the end may be applied after it.
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
        )
        await consumer.start()
        found: dict[str, list[bytes]] = {topic: [] for topic in topics}
        try:
            partitions = [
                TopicPartition(topic, number) for topic in topics for number in range(await _count(consumer, topic))
            ]
            consumer.assign(partitions)
            ends = await consumer.end_offsets(partitions)
            async with asyncio.timeout(WAIT_S):
                while any([await consumer.position(partition) < ends[partition] for partition in partitions]):
                    for partition, records in (await consumer.getmany(timeout_ms=200)).items():
                        found[partition.topic] += [record.value for record in records]
        finally:
            await consumer.stop()
        return {topic: sorted(values) for topic, values in found.items()}

    async def ended(self, topics: Collection[str]) -> dict[str, list[bytes]]:
        """Return the same once no transaction is open: only then is a record stored now visible in each partition."""
        mark = MARK + secrets.token_bytes(8)
        producer = AIOKafkaProducer(bootstrap_servers=self._bootstrap)
        await producer.start()
        marks = 0
        try:
            for topic in topics:
                for number in sorted(await producer.partitions_for(topic)):
                    await producer.send_and_wait(topic, mark, partition=number)
                    marks += 1
        finally:
            await producer.stop()
        async with asyncio.timeout(WAIT_S):
            while True:
                found = await self.visible(topics)
                if sum(values.count(mark) for values in found.values()) == marks:
                    return {
                        topic: [value for value in values if not value.startswith(MARK)]
                        for topic, values in found.items()
                    }


async def _count(consumer: AIOKafkaConsumer, topic: str) -> int:
    while not (found := consumer.partitions_for_topic(topic)):
        await consumer._client.force_metadata_update()
    return len(found)


@pytest.fixture
def reader(bootstrap: str) -> Reader:
    return Reader(bootstrap)


@pytest.fixture
async def client(listener: AmqpServer) -> AsyncIterator[TransactedClient]:
    async with TransactedClient(listener.bound) as client:
        yield client


async def stored(bootstrap: str, topic: str, values: Collection[bytes], partition: int = 0) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    try:
        for value in values:
            await producer.send_and_wait(topic, value, partition=partition)
    finally:
        await producer.stop()


async def group_offset(bootstrap: str, group: str, topic: str) -> int:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        found = await admin.list_consumer_group_offsets(group)
    finally:
        await admin.close()
    return int(found[TopicPartition(topic, 0)].offset)


async def until_group_offset(bootstrap: str, group: str, topic: str, offset: int) -> None:
    """Poll: a transaction's offset is visible only when Kafka has written its marker."""
    async with asyncio.timeout(WAIT_S):
        while await group_offset(bootstrap, group, topic) != offset:
            pass  # the request itself takes time


@pytest.mark.clause("AMQP-4.4.1")
async def test_posts_to_two_topics_are_visible_together(
    client: TransactedClient, reader: Reader, new_topic: Any
) -> None:
    one, two = await new_topic(partitions=3), await new_topic()

    def post() -> Transacted:
        first, second = client.connection.create_sender(one), client.connection.create_sender(two)
        transaction = Transacted(client.connection)
        posted = [
            transaction.post(first, data(b"%02d" % n, annotations={"x-opt-bridge.key": str(n)})) for n in range(20)
        ]
        posted += [transaction.post(second, data(b"two"))]
        assert {transaction.outcome(delivery) for delivery in posted} == {ACCEPTED}
        return transaction

    transaction = await client.run(post)
    assert await reader.visible([one, two]) == {one: [], two: []}
    assert await client.run(transaction.end) == "committed"
    assert await reader.ended([one, two]) == {one: [b"%02d" % n for n in range(20)], two: [b"two"]}


async def test_a_rollback_leaves_nothing(client: TransactedClient, reader: Reader, new_topic: Any) -> None:
    topic = await new_topic(partitions=2)

    sender = await client.run(lambda: client.connection.create_sender(topic))

    def post(commit: bool) -> str:
        transaction = Transacted(client.connection)
        for n in range(10):
            transaction.post(sender, data(b"%s %d" % (str(commit).encode(), n)))
        return transaction.end(commit=commit)  # without waiting for the messages' outcomes, as in JMS

    assert await client.run(lambda: post(commit=False)) == "aborted"
    assert await client.run(lambda: post(commit=True)) == "committed"
    assert await reader.ended([topic]) == {topic: [b"True %d" % n for n in range(10)]}


async def test_many_transactions_one_after_the_other(
    client: TransactedClient, reader: Reader, new_topic: Any, listener: AmqpServer
) -> None:
    topic = await new_topic(partitions=2)

    def work() -> None:
        sender = client.connection.create_sender(topic)
        for n in range(30):
            transaction = Transacted(client.connection)
            for part in range(3):
                transaction.post(sender, data(b"%02d %d" % (n, part)))
            assert transaction.end(commit=n % 3 != 2) == ("aborted" if n % 3 == 2 else "committed")

    await client.run(work)
    expected = [b"%02d %d" % (n, part) for n in range(30) if n % 3 != 2 for part in range(3)]
    assert await reader.ended([topic]) == {topic: expected}
    counts = listener.statistics()
    assert (counts.transactions_committed, counts.transactions_rolled_back, counts.transactions) == (20, 10, 0)


async def test_two_transactions_of_one_session_at_a_time(
    client: TransactedClient, reader: Reader, new_topic: Any
) -> None:
    topic = await new_topic()

    def work() -> None:
        sender = client.connection.create_sender(topic)
        first, second = Transacted(client.connection), Transacted(client.connection)
        for n in range(4):
            assert first.outcome(first.post(sender, data(b"first %d" % n))) == ACCEPTED
            assert second.outcome(second.post(sender, data(b"second %d" % n))) == ACCEPTED
        assert second.end() == "committed"
        assert first.end(commit=False) == "aborted"

    await client.run(work)
    assert await reader.ended([topic]) == {topic: [b"second %d" % n for n in range(4)]}


@pytest.mark.clause("AMQP-4.4.2")
@pytest.mark.parametrize("settles", [True, False])
async def test_consume_transform_produce(  # noqa: PLR0917 - fixtures
    client: TransactedClient, backend: Any, reader: Reader, bootstrap: str, new_topic: Any, settles: bool
) -> None:
    source, target = await new_topic(), await new_topic()
    group = f"g-{source}"
    await stored(bootstrap, source, [b"%02d" % n for n in range(20)])

    def work() -> None:
        receiver = client.connection.create_receiver(f"{source}/group.id/{group}", credit=20)
        sender = client.connection.create_sender(target)
        for _ in range(2):
            transaction = Transacted(client.connection, settles=settles)
            for _ in range(10):
                transaction.post(sender, data(body_of(transaction.take(receiver)) + b"!"))
            assert transaction.end() == "committed"

    await client.run(work)
    await until_group_offset(bootstrap, group, source, 20)
    (statistics,) = [one for one in backend.log.groups.statistics() if one.group == group]
    assert statistics.commits == 1  # the offset at the start: the group has not committed it
    assert await reader.ended([target]) == {target: [b"%02d!" % n for n in range(20)]}


async def test_a_queue_and_a_subscription_in_one_transaction(
    client: TransactedClient, bootstrap: str, new_topic: Any
) -> None:
    one, two = await new_topic(), await new_topic()
    for topic in (one, two):
        await stored(bootstrap, topic, [b"a", b"b"])

    def work() -> None:
        receivers = [client.connection.create_receiver(f"{topic}/group.id/g-{topic}", credit=5) for topic in (one, two)]
        for count in (1, 1):
            transaction = Transacted(client.connection)
            for receiver in receivers:
                for _ in range(count):
                    transaction.take(receiver)
            assert transaction.end() == "committed"

    await client.run(work)
    for topic in (one, two):
        await until_group_offset(bootstrap, f"g-{topic}", topic, 2)


@pytest.mark.parametrize("settles", [True, False])
async def test_records_return_after_a_rollback(
    client: TransactedClient, bootstrap: str, new_topic: Any, settles: bool
) -> None:
    """A settled record is offered again as a failed attempt; an unsettled one stays with proton, which releases it."""
    topic = await new_topic()
    group = f"g-{topic}"
    await stored(bootstrap, topic, [b"%d" % n for n in range(5)])

    def work() -> tuple[list[bytes], list[int]]:
        receiver = client.connection.create_receiver(f"{topic}/group.id/{group}", credit=20)
        transaction = Transacted(client.connection, settles=settles)
        for _ in range(5):
            transaction.take(receiver)
        assert transaction.end(commit=False) == "aborted"
        again = Transacted(client.connection)
        found = [again.take(receiver) for _ in range(5)]
        assert again.end() == "committed"
        return [body_of(message) for message in found], [message.delivery_count for message in found]

    bodies, counts = await client.run(work)
    assert bodies == [b"%d" % n for n in range(5)]
    assert counts == [1 if settles else 0] * 5
    await until_group_offset(bootstrap, group, topic, 5)


async def test_a_record_that_is_rolled_back_too_often_is_a_dead_letter(
    start_listener: Any, reader: Reader, bootstrap: str, new_topic: Any
) -> None:
    topic, dead = await new_topic(), await new_topic()
    listener = await start_listener(amqp={"max_attempts": 3, "dead_letter_topic": dead})
    await stored(bootstrap, topic, [b"poison", b"good"])
    async with TransactedClient(listener.bound) as client:

        def work() -> list[tuple[bytes, int]]:
            receiver = client.connection.create_receiver(f"{topic}/group.id/g-{topic}", credit=5)
            seen = []
            for _ in range(4):
                transaction = Transacted(client.connection)
                message = transaction.take(receiver)
                seen.append((body_of(message), int(message.delivery_count)))
                transaction.end(commit=seen[-1][0] == b"good")
            return seen

        seen = await client.run(work)
        assert sorted(seen) == [(b"good", 0), (b"poison", 0), (b"poison", 1), (b"poison", 2)]
        await wait_until(lambda: listener.statistics().dead_letters == 1, WAIT_S)
    assert await reader.ended([dead]) == {dead: [b"poison"]}


async def test_a_receiver_that_is_closed_before_the_discharge(
    client: TransactedClient, bootstrap: str, new_topic: Any
) -> None:
    topic = await new_topic()
    group = f"g-{topic}"
    await stored(bootstrap, topic, [b"%d" % n for n in range(4)])

    def work() -> bytes:
        receiver = client.connection.create_receiver(f"{topic}/group.id/{group}", credit=3)
        transaction = Transacted(client.connection)
        transaction.take(receiver)
        transaction.take(receiver)
        receiver.close()
        assert transaction.end() == "committed"
        receiver = client.connection.create_receiver(f"{topic}/group.id/{group}", credit=3)
        return body_of(receiver.receive(WAIT_S))

    assert await client.run(work) == b"2"
    await until_group_offset(bootstrap, group, topic, 2)


async def test_a_record_behind_a_gap_is_committed_with_what_fills_it(
    client: TransactedClient, bootstrap: str, new_topic: Any
) -> None:
    topic = await new_topic()
    group = f"g-{topic}"
    await stored(bootstrap, topic, [b"a", b"b", b"c"])

    def take() -> Any:
        receiver = client.connection.create_receiver(f"{topic}/group.id/{group}", credit=3)
        assert body_of(receiver.receive(WAIT_S)) == b"a"
        transaction = Transacted(client.connection)
        receiver.receive(WAIT_S)
        transaction.transaction.accept(receiver.fetcher.unsettled.pop())
        assert transaction.end() == "committed"
        return receiver

    receiver = await client.run(take)
    assert await group_offset(bootstrap, group, topic) == 0  # it would lose `a`

    def accept() -> None:
        receiver.accept()
        assert Transacted(client.connection).end() == "committed"  # accepted messages arrived before it

    await client.run(accept)
    await until_group_offset(bootstrap, group, topic, 2)


async def test_limit(start_listener: Any, new_topic: Any) -> None:
    listener = await start_listener(amqp={"max_transactions": 2})
    async with TransactedClient(listener.bound) as client:

        def work() -> None:
            first, second = Transacted(client.connection), Transacted(client.connection)
            refused = Transacted(client.connection)
            assert (refused.ends.event, refused.ends.condition) == ("declare failed", outcomes.RESOURCE_LIMIT_EXCEEDED)
            assert first.end() == "committed"
            assert Transacted(client.connection).ends.event == "declared"
            assert second.end(commit=False) == "aborted"

        await client.run(work)


async def test_transactions_wait_for_a_producer(start_listener: Any, reader: Reader, new_topic: Any) -> None:
    listener = await start_listener(amqp={"transaction_producers": 1})
    topic = await new_topic()
    async with TransactedClient(listener.bound) as client:

        def work() -> None:
            sender = client.connection.create_sender(topic)
            first, second = Transacted(client.connection), Transacted(client.connection)
            assert first.outcome(first.post(sender, data(b"first"))) == ACCEPTED
            waiting = second.post(sender, data(b"second"))
            assert not waiting.settled
            assert first.end() == "committed"
            assert second.outcome(waiting) == ACCEPTED
            assert second.end() == "committed"

        await client.run(work)
    assert await reader.ended([topic]) == {topic: [b"first", b"second"]}
    assert listener.statistics().transaction_producers == 1


@pytest.mark.clause("AMQP-4.5.8")
async def test_time_out(start_listener: Any, reader: Reader, bootstrap: str, new_topic: Any) -> None:
    listener = await start_listener(amqp={"transaction_timeout_s": 4.0})  # all posts are accepted before the time-out
    topic, source = await new_topic(), await new_topic()
    await stored(bootstrap, source, [b"in"])
    async with TransactedClient(listener.bound) as client:

        def begin() -> tuple[Any, Any, list[Transacted]]:
            sender = client.connection.create_sender(topic)
            receiver = client.connection.create_receiver(f"{source}/group.id/g-{source}", credit=5)
            empty, first, second = (Transacted(client.connection) for _ in range(3))
            first.take(receiver)
            for transaction in (first, second):
                assert transaction.outcome(transaction.post(sender, data(b"late"))) == ACCEPTED
            return sender, receiver, [empty, first, second]

        sender, receiver, (empty, first, second) = await client.run(begin)
        await wait_until(lambda: listener.statistics().transactions_timed_out == 2, WAIT_S)
        assert await reader.ended([topic]) == {topic: []}

        def end() -> int:
            message = receiver.receive(WAIT_S)  # returned to the queue
            assert first.outcome(first.post(sender, data(b"later"))) == (outcomes.REJECTED, TIMED_OUT)
            assert (first.end(), first.ends.condition) == ("commit failed", TIMED_OUT)
            assert second.end(commit=False) == "aborted"
            assert empty.end() == "committed"  # the time-out starts with the first message
            return int(message.delivery_count)

        assert await client.run(end) == 1
    assert await reader.ended([topic]) == {topic: []}


@pytest.mark.clause("AMQP-4.3")
@pytest.mark.parametrize("how", ["coordinator closed", "connection closed", "connection lost"])
async def test_without_its_coordinator_a_transaction_is_rolled_back(
    listener: AmqpServer, reader: Reader, bootstrap: str, new_topic: Any, how: str
) -> None:
    topic, source = await new_topic(), await new_topic()
    await stored(bootstrap, source, [b"in"])
    address = f"{source}/group.id/g-{source}"
    client = await TransactedClient(listener.bound).connect()

    def work() -> Any:
        connection = client.connection
        receiver = connection.create_receiver(address, credit=5)
        sender = connection.create_sender(topic)
        transaction = Transacted(connection)
        transaction.take(receiver)
        assert transaction.outcome(transaction.post(sender, data(b"no"))) == ACCEPTED
        if how == "coordinator closed":
            link = transaction.transaction.txn_ctrl
            link.close()
            transaction.wait(lambda: bool(link.state & link.REMOTE_CLOSED))
        return receiver

    receiver = await client.run(work)
    if how == "connection closed":
        await client.close()
    elif how == "connection lost":
        for pump in tuple(listener.pumps):
            pump.abort()
    await wait_until(lambda: listener.statistics().transactions_rolled_back == 1, WAIT_S)
    assert await reader.ended([topic]) == {topic: []}
    if how == "coordinator closed":  # the receiver is still attached
        assert body_of(await client.run(lambda: receiver.receive(WAIT_S))) == b"in"
        await client.close()
        return
    async with TransactedClient(listener.bound) as other:

        def receive() -> Message:
            return other.connection.create_receiver(address, credit=1).receive(WAIT_S)

        assert body_of(await other.run(receive)) == b"in"


async def test_a_refused_message_prevents_the_commit(client: TransactedClient, reader: Reader, new_topic: Any) -> None:
    topic = await new_topic()

    def work() -> None:
        relay = client.connection.create_sender(None)
        transaction = Transacted(client.connection)
        assert transaction.outcome(transaction.post(relay, data(b"good", address=topic))) == ACCEPTED
        bad = transaction.outcome(transaction.post(relay, data(b"bad", address=f"{topic}/partitions/99")))
        assert bad == (outcomes.REJECTED, outcomes.NOT_FOUND)
        more = transaction.outcome(transaction.post(relay, data(b"more", address=topic)))
        assert more == (outcomes.REJECTED, ROLLED_BACK)
        assert (transaction.end(), transaction.ends.condition) == ("commit failed", ROLLED_BACK)
        good = Transacted(client.connection)
        good.post(relay, data(b"again", address=topic))
        assert good.end() == "committed"

    await client.run(work)
    assert await reader.ended([topic]) == {topic: [b"again"]}


async def test_a_message_that_kafka_refuses_prevents_the_commit(
    client: TransactedClient, reader: Reader, new_topic: Any
) -> None:
    topic = await new_topic(max_message_bytes="2000")

    def work() -> None:
        sender = client.connection.create_sender(topic)
        transaction = Transacted(client.connection)
        transaction.post(sender, data(b"small"))
        big = transaction.post(sender, data(bytes(1990)))  # with its headers and the batch's overhead it is too large
        assert transaction.outcome(big) == (outcomes.REJECTED, outcomes.MESSAGE_SIZE_EXCEEDED)
        assert (transaction.end(), transaction.ends.condition) == ("commit failed", ROLLED_BACK)

    await client.run(work)
    assert await reader.ended([topic]) == {topic: []}


async def test_a_body_over_its_limit_prevents_the_commit(
    client: TransactedClient, reader: Reader, new_topic: Any
) -> None:
    """With the default limit: 4 MiB of body, and half a MiB of other sections."""
    topic = await new_topic(partitions=1, max_message_bytes="10485760")
    limit = 4 << 20

    def work() -> None:
        sender = client.connection.create_sender(topic)
        transaction = Transacted(client.connection)
        transaction.post(sender, data(bytes(limit), properties={"p": "x" * 500_000}))
        assert transaction.end() == "committed"
        doomed = Transacted(client.connection)
        over = doomed.post(sender, data(bytes(limit + 1)))
        assert doomed.outcome(over) == (outcomes.REJECTED, outcomes.MESSAGE_SIZE_EXCEEDED)
        assert (doomed.end(), doomed.ends.condition) == ("commit failed", ROLLED_BACK)

    await client.run(work)
    assert await reader.ended([topic]) == {topic: [bytes(limit)]}


def command(connection: Any, link: Any, body: Any) -> tuple[int, str]:
    delivery = link.send(Message(body=body))
    connection.wait(lambda: delivery.settled, timeout=WAIT_S)
    condition = delivery.remote.condition
    return int(delivery.remote_state), "" if condition is None else str(condition.name)


@pytest.mark.clause("AMQP-4.3")
@pytest.mark.parametrize(
    ("body", "condition"),
    [
        (Described(symbol("amqp:discharge:list"), [b"nobody's", False]), UNKNOWN_ID),
        (Described(symbol("amqp:declare:list"), [b"global"]), outcomes.NOT_IMPLEMENTED),
        ("begin", outcomes.DECODE_ERROR),
        ("x" * 10_000, outcomes.DECODE_ERROR),
    ],
)
async def test_commands_that_are_refused(client: TransactedClient, body: Any, condition: str) -> None:
    def work() -> None:
        transaction = Transacted(client.connection)
        link = transaction.transaction.txn_ctrl
        assert command(client.connection, link, body) == (outcomes.REJECTED, condition)
        assert transaction.end() == "committed"  # the link stays attached

    await client.run(work)


@pytest.mark.parametrize("capability", ["amqp:distributed-transactions", "amqp:promotable-transactions"])
async def test_capabilities_of_a_coordinator(client: TransactedClient, capability: str) -> None:
    def attach(wanted: str, *, endlessly: bool = False) -> Any:
        link = client.connection.container.create_sender(client.connection.conn, None, name=wanted)
        link.target.type = Terminus.COORDINATOR
        link.target.capabilities.put_object(symbol(wanted))
        client.connection.wait(lambda: not endlessly and bool(link.state & link.REMOTE_ACTIVE), timeout=WAIT_S)
        return link

    def work() -> list[str]:
        link = attach(LOCAL_TRANSACTIONS)
        assert link.remote_target.type == Terminus.COORDINATOR
        capabilities = link.remote_target.capabilities
        capabilities.rewind()
        capabilities.next()
        with pytest.raises(LinkDetached, match=outcomes.NOT_IMPLEMENTED):
            attach(capability, endlessly=True)
        return [str(one) for one in capabilities.get_object().elements]

    offered = await client.run(work)
    assert offered == [LOCAL_TRANSACTIONS, "amqp:multi-txns-per-ssn", "amqp:multi-ssns-per-txn"]


async def test_unknown_txn_ids(client: TransactedClient, reader: Reader, bootstrap: str, new_topic: Any) -> None:
    topic, source = await new_topic(), await new_topic()
    await stored(bootstrap, source, [b"in"])

    def work() -> None:
        sender = client.connection.create_sender(topic)
        receiver = client.connection.create_receiver(f"{source}/group.id/g-{source}", credit=1)
        transaction = Transacted(client.connection)
        assert transaction.end() == "committed"
        state, condition = transaction.outcome(transaction.post(sender, data(b"stray")))
        assert (state, condition) == (-outcomes.REJECTED, UNKNOWN_ID)  # of no transaction
        transaction.take(receiver)
        with pytest.raises(LinkDetached, match=UNKNOWN_ID):
            transaction.wait(lambda: False)

    await client.run(work)
    assert await reader.ended([topic]) == {topic: []}


async def test_the_gateway_stops_with_an_open_transaction(
    backend: Any, reader: Reader, new_topic: Any, start_listener: Any
) -> None:
    topic = await new_topic()
    listener = await start_listener()
    client = await TransactedClient(listener.bound).connect()

    def work() -> None:
        sender = client.connection.create_sender(topic)
        transaction = Transacted(client.connection)
        assert transaction.outcome(transaction.post(sender, data(b"no"))) == ACCEPTED

    await client.run(work)
    listener.stop_receiving()
    assert await reader.ended([topic]) == {topic: []}
    await wait_until(lambda: listener.statistics().transactions_rolled_back == 1)
    await listener.stop(2.0)
    await client.close()


async def test_a_commit_under_way_when_the_gateway_stops_is_answered_as_what_it_is(
    start_listener: Any, reader: Reader, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await new_topic()
    listener = await start_listener()
    commit = KafkaTransaction.commit

    async def commit_at_the_stop(transaction: KafkaTransaction, retired: Any) -> None:
        listener.stop_receiving()
        await commit(transaction, retired)

    monkeypatch.setattr(KafkaTransaction, "commit", commit_at_the_stop)
    client = await TransactedClient(listener.bound).connect()

    def work() -> str:
        transaction = Transacted(client.connection)
        sender = client.connection.create_sender(topic)
        assert transaction.outcome(transaction.post(sender, data(b"yes"))) == ACCEPTED
        return transaction.end()

    assert await client.run(work) == "committed"
    await listener.stop(2.0)
    await client.close()
    assert await reader.ended([topic]) == {topic: [b"yes"]}
    assert listener.statistics().transactions_committed == 1


async def test_a_message_whose_topic_is_found_after_the_rollback_is_not_stored(
    listener: AmqpServer, reader: Reader, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin another Kafka transaction, which nobody ends."""
    topic = await new_topic()
    asked, answered = asyncio.Event(), asyncio.Event()
    look_up = Publisher.topic

    async def look_up_late(publisher: Publisher, name: str, **options: Any) -> Any:
        asked.set()
        await answered.wait()
        return await look_up(publisher, name, **options)

    monkeypatch.setattr(Publisher, "topic", look_up_late)
    monkeypatch.setattr(Publisher, "known_topic", lambda publisher, name: None)
    async with TransactedClient(listener.bound) as client:

        def begin() -> tuple[Transacted, Any]:
            transaction = Transacted(client.connection)
            sender = client.connection.create_sender(None)
            transaction.wait(lambda: sender.link.credit > 0)
            delivery = transaction.post(sender, data(b"no", address=topic))
            transaction.wait(asked.is_set)
            controller = transaction.transaction.txn_ctrl
            controller.close()
            transaction.wait(lambda: bool(controller.state & controller.REMOTE_CLOSED))
            return transaction, delivery

        transaction, delivery = await client.run(begin)
        await wait_until(lambda: listener.statistics().transactions_rolled_back == 1, WAIT_S)
        answered.set()
        assert await client.run(lambda: transaction.outcome(delivery)) == (outcomes.REJECTED, ROLLED_BACK)
    monkeypatch.undo()
    assert listener.statistics().transaction_producers == 0
    assert await reader.ended([topic]) == {topic: []}


@contextlib.asynccontextmanager
async def controller_of(listener: AmqpServer) -> AsyncIterator[WireClient]:
    """A client with a link to the coordinator."""
    host, _, port = listener.bound.rpartition(":")
    client = await WireClient.connect((host, int(port)))
    async with asyncio.timeout(WAIT_S):
        client.say(Frames.begin() + Frames.attach(coordinator=True))
        await client.header()
        while (await client.until(0x13))[5] <= 4:  # a flow of the link
            pass
        yield client
    await client.close()


DECLARE = b"\x00\x53\x77\x00\x53\x31\x45"


async def test_a_declare_behind_a_command_that_ends_the_link(listener: AmqpServer) -> None:
    """Nobody could discharge the transaction."""
    async with controller_of(listener) as client:
        client.say(Frames.transfer(0, DECLARE, settled=True) + Frames.transfer(1, DECLARE))
        assert outcomes.NOT_ALLOWED.encode() in await client.until(0x16)
        assert listener.statistics().transactions == 0


async def test_a_settled_command_that_is_too_large_ends_the_link(listener: AmqpServer) -> None:
    async with controller_of(listener) as client:
        client.say(Frames.transfer(0, bytes(COMMAND_BYTES + 1), settled=True))
        assert outcomes.DECODE_ERROR.encode() in await client.until(0x16)


async def test_credit_for_commands_comes_back_with_their_answers(listener: AmqpServer) -> None:
    async with controller_of(listener) as client:
        for number in range(3 * COMMAND_CREDIT):
            client.say(Frames.transfer(number, DECLARE))
            assert (await client.until(0x15)) is not None
        assert listener.statistics().transactions == 3 * COMMAND_CREDIT
