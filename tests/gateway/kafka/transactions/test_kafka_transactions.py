"""Kafka transactions: the pool of producers, what fences one, and where records go."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from gateway.kafka.contracts import Result
from gateway.kafka.publish.partitioner import partition_of
from gateway.kafka.publish.sender_partitions import RememberedSender
from gateway.kafka.transactions import kafka_transaction as module
from gateway.kafka.transactions.kafka_transaction import KafkaTransaction, TransactionFailed, Transactions
from gateway.kafka.transactions.transactional_producers import TransactionalProducerPool
from gateway.settings.config import KafkaConfig
from mapping.outcomes import Outcome
from mapping.record import Record

WAIT_S = 60.0
SENDER = RememberedSender()
BUSY = Result(outcome=Outcome.BUSY, reason="rolled back")


class Fates:
    """The results of tokens."""

    def __init__(self) -> None:
        self.of: dict[Any, Result] = {}

    def settle(self, tokens: Sequence[Any], result: Result) -> None:
        for token in tokens:
            assert token not in self.of
            self.of[token] = result

    def outcomes(self) -> set[Outcome]:
        return {result.outcome for result in self.of.values()}


@contextlib.asynccontextmanager
async def opened(kit: Any, bootstrap: str, *, limit: int = 4, **options: Any) -> AsyncIterator[Transactions]:
    loop = asyncio.get_running_loop()
    config = KafkaConfig(bootstrap_servers=bootstrap)
    async with kit(bootstrap) as one, asyncio.TaskGroup() as group:
        producer_pool = TransactionalProducerPool(
            config,
            limit=limit,
            timeout_s=60,
            spawn=group.create_task,
            clock=loop.time,
            **{"name": uuid.uuid4().hex[:12], "used_ids_file": None, **options},
        )
        producer_pool.start()
        yield Transactions(producer_pool, one.publisher, spawn=group.create_task)
        await producer_pool.stop()


async def visible(bootstrap: str, topic: str, count: int) -> list[Any]:
    """Return the first `count` committed records of a topic's only partition."""
    # Not `seek_to_beginning`: a pending reset to the end may come after it.
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    async with consumer, asyncio.timeout(WAIT_S):
        consumer.assign([TopicPartition(topic, 0)])
        return [await consumer.getone() for _ in range(count)]


async def run(transactions: Transactions, topic: str, values: Sequence[bytes]) -> Fates:
    """Commit one transaction."""
    fates = Fates()
    transaction = transactions.begin(fates.settle)
    for value in values:
        transaction.submit(Record(topic, None, value), value, SENDER)
    await transaction.stored()
    await transaction.commit(())
    return fates


async def end(transaction: KafkaTransaction) -> None:
    with pytest.raises(TransactionFailed):
        await transaction.commit(())
    await transaction.abort(BUSY)


async def test_keys_find_their_partitions(kit: Any, bootstrap: str, new_topic: Any, read_topic: Any) -> None:
    topic = await new_topic(partitions=5)
    async with opened(kit, bootstrap) as transactions:
        fates = Fates()
        transaction = transactions.begin(fates.settle)
        keys = [b"key %d" % n for n in range(30)]
        for key in keys:
            transaction.submit(
                Record(topic, key, b"v" * 10_000, (("h", b"x"),), timestamp=1_700_000_000_000), key, SENDER
            )
        transaction.submit(Record(topic, None, b"four", partition=4), "four", SENDER)
        await transaction.stored()
        await transaction.commit(())
        assert fates.outcomes() == {Outcome.STORED}
        assert {key: fates.of[key].partition for key in keys} == {key: partition_of(key, 5) for key in keys}
        assert fates.of["four"].partition == 4
    for number, records in (await read_topic(bootstrap, topic)).items():
        for record in records:
            assert record.value == b"four" or (
                partition_of(record.key, 5) == number
                and record.headers == (("h", b"x"),)
                and record.timestamp == 1_700_000_000_000
            )


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        (Record("", b"k", b"v", partition=9), Outcome.UNKNOWN_TOPIC),
        (Record("", b"k", b"v", timestamp=-5), Outcome.UNFIT),
        (Record("", b"k", b"v", (("\ud800", b""),)), Outcome.UNFIT),
        (Record("", b"k", bytes(5000)), Outcome.TOO_LARGE),
        (Record("", None, b"v"), Outcome.UNFIT),
        (Record("t-nobody-has-made-it", b"k", b"v"), Outcome.UNKNOWN_TOPIC),
        (Record("__internal", b"k", b"v"), Outcome.DENIED),
    ],
)
async def test_a_record_that_is_refused(
    kit: Any, bootstrap: str, new_topic: Any, record: Record, outcome: Outcome
) -> None:
    topic = await new_topic(partitions=1, max_message_bytes="4000", cleanup_policy="compact")
    async with opened(kit, bootstrap) as transactions:
        fates = Fates()
        transaction = transactions.begin(fates.settle)
        transaction.submit(Record(topic, b"good", b"v"), "good", SENDER)
        await transaction.stored()
        bad = Record(record.topic or topic, *[getattr(record, name) for name in record.__struct_fields__[1:]])
        transaction.submit(bad, "bad", SENDER)
        await transaction.stored()
        assert {token: result.outcome for token, result in fates.of.items()} == {"good": Outcome.STORED, "bad": outcome}
        await end(transaction)
        await run_keyed(transactions, topic)
    assert [record.value for record in await visible(bootstrap, topic, 1)] == [b"next"]


async def run_keyed(transactions: Transactions, topic: str) -> None:
    transaction = transactions.begin(Fates().settle)
    transaction.submit(Record(topic, b"k", b"next"), 0, SENDER)
    await transaction.stored()
    await transaction.commit(())


async def test_a_fenced_producer_is_replaced(kit: Any, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    name = uuid.uuid4().hex[:12]
    async with opened(kit, bootstrap, name=name, limit=1) as transactions:
        assert (await run(transactions, topic, [b"before"])).outcomes() == {Outcome.STORED}
        fates = Fates()
        transaction = transactions.begin(fates.settle)
        transaction.submit(Record(topic, None, b"fenced"), 0, SENDER)
        await transaction.stored()
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"trivium-{name}-0"):
            await end(transaction)
        assert (await run(transactions, topic, [b"after"])).outcomes() == {Outcome.STORED}
        assert transactions.producer_pool.producers == 1
    assert [record.value for record in await visible(bootstrap, topic, 2)] == [b"before", b"after"]


async def test_a_fenced_producer_fails_what_is_submitted(kit: Any, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    name = uuid.uuid4().hex[:12]
    async with opened(kit, bootstrap, name=name, limit=1) as transactions:
        fates = Fates()
        transaction = transactions.begin(fates.settle)
        transaction.submit(Record(topic, None, b"stored"), "stored", SENDER)
        await transaction.stored()
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"trivium-{name}-0"):
            transaction.submit(Record(topic, None, b"fenced"), "fenced", SENDER)
            await transaction.stored()
            assert fates.of["stored"].outcome is Outcome.STORED
            assert fates.of["fenced"].outcome is not Outcome.STORED
            assert transaction.failure is not None
            await end(transaction)
        assert (await run(transactions, topic, [b"after"])).outcomes() == {Outcome.STORED}
    assert [record.value for record in await visible(bootstrap, topic, 1)] == [b"after"]


async def test_the_pool(kit: Any, bootstrap: str, new_topic: Any) -> None:
    """It respects its limit, further calls wait in order, and a cancelled call is forgotten."""
    async with opened(kit, bootstrap, limit=2) as transactions:
        pool = transactions.producer_pool
        async with asyncio.timeout(WAIT_S):
            first, second = await pool.acquire(), await pool.acquire()
            assert {first.number, second.number} == {0, 1}
            waiting = [asyncio.ensure_future(pool.acquire()) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[1].cancel()
            await asyncio.wait({waiting[1]})
            pool.release(second)
            assert await waiting[0] is second
            assert not waiting[2].done()
            pool.discard(first)
            third = await waiting[2]
            assert (third.number, third is first) == (first.number, False)
        assert pool.producers == 2
        for producer in (second, third):
            pool.release(producer)


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_a_pool_that_stops_while_a_producer_is_closed_leaves_none_open(bootstrap: str, turns: int) -> None:
    async with asyncio.TaskGroup() as group:
        pool = TransactionalProducerPool(
            KafkaConfig(bootstrap_servers=bootstrap), name=uuid.uuid4().hex[:12], limit=1, timeout_s=60,
            used_ids_file=None, spawn=group.create_task, clock=asyncio.get_running_loop().time,
        )  # fmt: skip
        producer = await pool.acquire()
        connections = list(producer._producer.client._conns.values())
        pool.discard(producer)
        for _ in range(turns):
            await asyncio.sleep(0)
        await pool.stop()
    assert connections
    assert not any(connection.connected() for connection in connections)


async def test_ids_in_use_are_ended_at_the_start(kit: Any, bootstrap: str, new_topic: Any, tmp_path: Path) -> None:
    topic = await new_topic(partitions=1)
    name, marks = uuid.uuid4().hex[:12], tmp_path / "transactions"
    async with opened(kit, bootstrap, name=name, used_ids_file=marks) as transactions:
        await run(transactions, topic, [b"one"])
        assert int(marks.read_text()) >= 1
    assert not marks.exists()  # stopped in order: no transaction was left open
    crashed = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"trivium-{name}-1")
    async with crashed:
        await crashed.begin_transaction()
        await crashed.send_and_wait(topic, b"open")
        marks.write_text("2")
        async with opened(kit, bootstrap, name=name, used_ids_file=marks) as transactions:
            await run(transactions, topic, [b"two"])
            assert [record.value for record in await visible(bootstrap, topic, 2)] == [b"one", b"two"]


@pytest.mark.parametrize("content", [None, "many"])
def test_a_file_of_used_ids_that_cannot_be_read_or_written(tmp_path: Path, content: str | None) -> None:
    marks = tmp_path / "transactions"
    if content is None:
        marks.mkdir()
    else:
        marks.write_text(content)
    producer_pool = TransactionalProducerPool(
        KafkaConfig(),
        name="n",
        limit=2,
        timeout_s=1,
        used_ids_file=marks,
        spawn=None,
        clock=time.monotonic,  # type: ignore[arg-type]
    )
    producer_pool.start()
    assert producer_pool.producers == 0


async def test_a_commit_that_kafka_does_not_answer(
    kit: Any, stoppable: Any, own_topic: Callable[..., Any], frozen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is unknown and reported so, and the next transaction gets a producer again."""
    bootstrap = stoppable.bootstrap_servers
    topic = await own_topic(1)
    async with opened(kit, bootstrap, limit=1) as transactions:
        await run(transactions, topic, [b"before"])
        fates = Fates()
        transaction = transactions.begin(fates.settle)
        transaction.submit(Record(topic, None, b"maybe"), 0, SENDER)
        await transaction.stored()
        with monkeypatch.context() as patch:
            patch.setattr(module, "END_S", 0.5)
            with frozen():
                with pytest.raises(TransactionFailed, match="not known"):
                    await transaction.commit(())
                await transaction.abort(BUSY)
        assert (await run(transactions, topic, [b"after"])).outcomes() == {Outcome.STORED}
        values = [record.value for record in await visible(bootstrap, topic, 2)]
    assert values[0] == b"before"
    assert values[1] in {b"maybe", b"after"}


async def test_an_abort_while_kafka_is_away(
    kit: Any, stoppable: Any, own_topic: Callable[..., Any], frozen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap = stoppable.bootstrap_servers
    topic = await own_topic(1)
    async with opened(kit, bootstrap, limit=1) as transactions:
        await run(transactions, topic, [b"before"])
        fates = Fates()
        transaction = transactions.begin(fates.settle)
        with monkeypatch.context() as patch:
            patch.setattr(module, "END_S", 0.5)
            with frozen():
                transaction.submit(Record(topic, None, b"never"), 0, SENDER)
                await asyncio.sleep(0)
                await transaction.abort(BUSY)
                assert fates.of == {0: BUSY}
        assert (await run(transactions, topic, [b"after"])).outcomes() == {Outcome.STORED}
        assert [record.value for record in await visible(bootstrap, topic, 2)] == [b"before", b"after"]


async def test_a_producer_given_back_while_a_waiting_call_is_cancelled_is_kept(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group:
        pool = TransactionalProducerPool(
            KafkaConfig(), name="n", limit=0, timeout_s=1, used_ids_file=None, spawn=group.create_task,
            clock=time.monotonic,
        )  # fmt: skip
        calls = [group.create_task(pool.acquire()) for _ in range(2)]
        await asyncio.sleep(0)
        producer: Any = object()
        calls[0].cancel()
        pool.release(producer)  # in the turn of the event loop in which the first call is cancelled
        assert await calls[1] is producer
        assert (await asyncio.gather(calls[0], return_exceptions=True))[0].__class__ is asyncio.CancelledError


async def test_ids_whose_transactions_were_not_ended_are_left_to_the_next_process(tmp_path: Path) -> None:
    """As when Kafka is unreachable from the start to the stop."""
    marks = tmp_path / "transactions"
    marks.write_text("3")
    async with asyncio.TaskGroup() as group:
        pool = TransactionalProducerPool(
            KafkaConfig(bootstrap_servers="127.0.0.1:1"), name="n", limit=4, timeout_s=1, used_ids_file=marks,
            spawn=group.create_task, clock=time.monotonic,
        )  # fmt: skip
        pool.start()
        await asyncio.sleep(0)
        await pool.stop()
    assert marks.read_text() == "3"


async def test_an_abort_before_the_first_step_leaves_nothing_to_wait_for() -> None:
    class Uncounted:
        def reserve(self, size: int) -> None: ...
        def free(self, size: int, records: int) -> None: ...

    fates = Fates()
    transaction = Transactions(None, Uncounted(), spawn=asyncio.create_task).begin(fates.settle)  # type: ignore[arg-type]
    transaction.submit(Record("t", b"k", b"v"), "token", SENDER)
    await transaction.abort(BUSY)
    async with asyncio.timeout(10):
        await transaction.stored()
    assert fates.outcomes() == {Outcome.BUSY}
