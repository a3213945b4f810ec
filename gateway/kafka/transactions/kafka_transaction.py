"""Kafka transactions: records and consumed offsets that become visible together, or not at all.

transaction = transactions.begin(settle)
transaction.submit(record, token, sender)  # stored immediately, but not visible; `settle` receives its result
await transaction.commit(retired)          # or abort()

A transaction acquires a producer from the pool (`producer_pool`) for its first record, or in `commit` when it settles
records of several groups. Records that come while others are in flight form the next batch, and partitions are chosen,
both as in the publisher.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import msgspec
import structlog
from aiokafka import TopicPartition, errors
from aiokafka.structs import OffsetAndMetadata

from gateway.kafka.cluster.error_verdicts import name_of, verdict
from gateway.kafka.contracts import Refused, Result
from gateway.kafka.groups.delivery.assignment import AssignedPartition
from gateway.kafka.groups.reader import GroupReader
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import RememberedSender
from gateway.kafka.transactions.transactional_producers import TransactionalProducer, TransactionalProducerPool
from gateway.runtime.failures import failures
from gateway.runtime.spawn import Spawn
from mapping.outcomes import Outcome
from mapping.record import Record

log = structlog.get_logger(__name__)

END_S: Final = 30.0
"""How long a commit or abort may take: a broker may restart meanwhile. After that the producer is discarded, and its
successor makes Kafka end the transaction."""

Settle = Callable[[Sequence[Any], Result], None]
"""Called with the result of tokens, each once, in order for each partition; never from inside `submit`."""

Retired = Iterable[tuple[GroupReader, AssignedPartition, int]]
"""Records of groups that a transaction settles: reader, partition and offset."""


class TransactionFailed(Exception):  # noqa: N818 - an answer, not an error
    """A commit has failed, or its result is unknown."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason  # a line for the client


class _Post(msgspec.Struct, eq=False):
    """A record with its token and sender."""

    record: Record
    token: Any
    sender: RememberedSender
    size: int  # of key and value


_Batches = list[tuple[Any, list[_Post]]]
"""The batches for one partition, in order: aiokafka's batches with the posts in each."""


class Transactions(msgspec.Struct, frozen=True):
    """What all transactions of the process share."""

    producer_pool: TransactionalProducerPool
    publisher: Publisher
    spawn: Spawn

    def begin(self, settle: Settle) -> KafkaTransaction:
        """Return a new transaction; Kafka knows of it from its first record or offset."""
        return KafkaTransaction(self, settle)


def _append(batches: _Batches, post: _Post, timestamp: int, largest: int, new_batch: Callable[[], Any]) -> None:
    """Add a post to the last batch or a new one. Raises Refused when no record can hold it."""
    record = post.record
    for fresh in (not batches, True):
        if fresh:
            batches.append((new_batch(), []))
        builder, posts = batches[-1]
        try:
            written = builder.append(
                timestamp=timestamp, key=record.key, value=record.value, headers=list(record.headers)
            )
        except (UnicodeEncodeError, OverflowError) as error:
            raise Refused(Outcome.UNFIT, f"no Kafka record can hold it: {error}") from None
        if written is not None:
            posts.append(post)
            if written.size <= largest:
                return
            break
    raise Refused(Outcome.TOO_LARGE, f"topic {record.topic} accepts at most {largest} bytes")


class KafkaTransaction:
    """One transaction. After one of its records has failed it can only be aborted."""

    __slots__ = (
        "_must_discard", "_producer", "_publisher", "_queue", "_settle", "_shared", "_task", "_unsettled", "failure",
    )  # fmt: skip

    def __init__(self, shared: Transactions, settle: Settle) -> None:
        self.failure: Result | None = None  # why it can only be aborted; None while it can be committed
        self._shared = shared
        self._publisher = shared.publisher
        self._settle = settle
        self._queue: list[_Post] = []
        self._unsettled: dict[_Post, None] = {}
        self._producer: TransactionalProducer | None = None
        self._must_discard = False  # the producer: its sequence may have a gap, or a result is unknown
        self._task: asyncio.Task[None] | None = None

    def submit(self, record: Record, token: Any, sender: RememberedSender) -> None:
        """Accept a record of `sender`; `settle` receives its result later."""
        post = _Post(record, token, sender, len(record.key or b"") + len(record.value or b""))
        self._publisher.reserve(post.size)
        self._unsettled[post] = None
        self._queue.append(post)
        if self._task is None:
            self._task = self._shared.spawn(self._run())

    async def stored(self) -> None:
        """Wait until the results of all submitted records are known."""
        while self._task is not None:
            await asyncio.wait({self._task})

    async def commit(self, retired: Retired) -> None:
        """Make the records and the groups' offsets visible together; wait for `stored` first.

        Raises:
            TransactionFailed: the transaction was aborted, or will be; call `abort` anyway.
        """
        if self.failure is not None:
            raise TransactionFailed(self.failure.reason)
        settled: dict[GroupReader, dict[AssignedPartition, set[int]]] = {}
        for reader, part, offset in retired:
            settled.setdefault(reader, {}).setdefault(part, set()).add(offset)
        try:
            if len(settled) > 1:  # before the groups' locks, which other transactions with producers may hold
                async with asyncio.timeout(END_S):
                    await self._begin()
        except TimeoutError:
            raise TransactionFailed("no producer was free in time") from None
        except errors.KafkaError as error:
            raise TransactionFailed(name_of(error)) from error
        try:
            async with asyncio.timeout(END_S), contextlib.AsyncExitStack() as stack:
                offsets: list[tuple[GroupReader, dict[TopicPartition, OffsetAndMetadata]]] = []
                for reader in sorted(settled, key=lambda reader: reader.group):  # one order for all: no deadlock
                    growing = await stack.enter_async_context(reader.commits.committing(settled[reader]))
                    if growing:
                        offsets.append((reader, growing))
                producer = self._producer
                for reader, growing in offsets:
                    if producer is None:  # only one group: its own commit is atomic too
                        await reader.commits.commit_for(growing)
                    else:
                        await producer.add_offsets(reader.group, growing)
                if producer is None:
                    return
                self._must_discard = True  # until Kafka has answered
                await producer.commit()
                self._must_discard = False
        except TimeoutError:
            self._must_discard = True
            raise TransactionFailed("Kafka did not answer in time: the result of the commit is not known") from None
        except errors.KafkaError as error:
            self._must_discard = True
            raise TransactionFailed(name_of(error)) from error
        self._producer = None
        self._shared.producer_pool.release(producer)

    async def abort(self, rest: Result) -> None:
        """Make sure that nothing becomes visible; records without a result get `rest`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None  # a task that is cancelled before its first step does not do that itself
        self._settle_posts(list(self._unsettled), rest)
        self._queue.clear()
        producer, self._producer = self._producer, None
        if producer is None:
            return
        if not self._must_discard:
            try:
                async with asyncio.timeout(END_S):
                    await producer.abort()
            except (errors.KafkaError, TimeoutError) as error:
                log.info("a transaction is left to the next producer to abort", error=repr(error))
                self._must_discard = True
        if self._must_discard:
            self._shared.producer_pool.discard(producer)
        else:
            self._shared.producer_pool.release(producer)

    async def _begin(self) -> TransactionalProducer:
        producer = self._producer
        if producer is None:
            producer_pool = self._shared.producer_pool
            producer = await producer_pool.acquire()
            try:
                await producer.begin()
            except BaseException:
                producer_pool.discard(producer)
                raise
            self._producer = producer
        return producer

    async def _run(self) -> None:
        """Store the queued records, one batch after the other."""
        try:
            producer = await self._begin()
            while self._queue and self.failure is None:
                queue, self._queue = self._queue, []
                await self._store(producer, queue)
        except errors.KafkaError as error:
            self._must_discard = True
            self._fail(Result(outcome=verdict(error).outcome, reason=name_of(error)))
        except Exception as error:  # our bug: only this transaction fails
            failures.report("transaction", error)
            self._must_discard = True
            self._fail(Result(outcome=Outcome.BROKEN, reason="internal error"))
        finally:
            self._task = None
            if self.failure is not None:
                self._queue.clear()
                self._settle_posts(list(self._unsettled), self.failure)

    async def _store(self, producer: TransactionalProducer, posts: Sequence[_Post]) -> None:
        partitions: dict[tuple[str, int], _Batches] = {}
        for post in posts:
            record = post.record
            try:
                info = self._publisher.known_topic(record.topic)
                if info is None or (record.partition or 0) >= info.partitions:
                    info = await self._publisher.topic(record.topic, partition=record.partition)
                number, timestamp, largest = self._publisher.place(info, record, post.sender)
                batches = partitions.get((record.topic, number))
                if batches is None:
                    if (unsafe := self._publisher.unsafe(info)) is not None:
                        raise unsafe.bare()
                    batches = partitions[record.topic, number] = []
                _append(batches, post, timestamp, largest, producer.new_batch)
            except Refused as refused:
                self._fail(Result(outcome=refused.outcome, reason=refused.reason))
                return
        in_flight: list[tuple[asyncio.Future[Any], int, list[_Post]]] = []
        try:
            for (topic, number), batches in partitions.items():
                for builder, together in batches:
                    in_flight.append((await producer.hand_over(builder, topic, number), number, together))
            await producer.stored([future for future, _, _ in in_flight], partitions.keys())
        except BaseException as failed:
            if isinstance(failed, errors.UnknownTopicOrPartitionError):
                for topic, _ in partitions:
                    self._publisher.recheck(topic)
            for future, _, _ in in_flight:
                future.cancel()  # aiokafka's own future goes on, without a listener
            raise
        for future, number, together in in_flight:
            error = future.exception()
            if error is None:
                self._settle_posts(together, Result(outcome=Outcome.STORED, partition=number))
            elif isinstance(error, errors.KafkaError):
                self._must_discard = True
                self._fail(Result(outcome=verdict(error).outcome, reason=name_of(error)))
            else:
                raise RuntimeError(f"a post ended with {error!r}") from error

    def _fail(self, result: Result) -> None:
        if self.failure is None:
            self.failure = result

    def _settle_posts(self, posts: Collection[_Post], result: Result) -> None:
        """Settle posts with a result."""
        if not posts:
            return
        for post in posts:
            del self._unsettled[post]
        self._publisher.free(sum(post.size for post in posts), len(posts))
        self._settle([post.token for post in posts], result)
