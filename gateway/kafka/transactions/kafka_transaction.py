"""Records and consumed offsets that become visible in Kafka together, or not at all.

transaction = transactions.begin(settle)
transaction.submit(record, token, sender)  # stored at once, seen by nobody; its fate goes to `settle`
await transaction.commit(retired)        # or abort()

The first record takes a producer from the pool (`producer_pool`), a second group at the latest in `commit`. What comes
while records are on their way is the next batch, as in the publisher, and records find the same partitions as there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from aiokafka import TopicPartition, errors
from aiokafka.structs import OffsetAndMetadata

from gateway.config import KafkaConfig
from gateway.failures import failures
from gateway.kafka.cluster.error_verdicts import name_of, verdict
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.contracts import Refused, Result
from gateway.kafka.groups.assignment import AssignedPartition
from gateway.kafka.groups.reader import GroupReader
from gateway.kafka.publish.batch import HEADER_BYTES
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import Sender
from gateway.kafka.transactions.transactional_producers import TransactionalProducer, TransactionalProducerPool
from gateway.spawn import Spawn
from mapping.outcomes import Outcome
from mapping.record import Record

log = logging.getLogger(__name__)

END_S: Final = 30.0
"""How long an end may take: a broker may restart in it. Then the producer is cut off, and its successor makes Kafka
end the transaction."""

Settle = Callable[[Sequence[Any], Result], None]
"""Told the fate of tokens, each once, in order for each partition; never from inside `submit`."""

Places = Iterable[tuple[GroupReader, AssignedPartition, int]]
"""Records of groups that a transaction settles: the reader, the partition, the offset."""


class TransactionFailed(Exception):  # noqa: N818 - an answer, not an error of anybody
    """A commit did not take place, or nobody can tell."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason  # a line for the client


class _Post:
    """A record, its token, and who sends it."""

    __slots__ = ("record", "sender", "size", "token")

    def __init__(self, record: Record, token: Any, sender: Sender) -> None:
        self.record = record
        self.token = token
        self.sender = sender
        self.size = len(record.key or b"") + len(record.value or b"")


class Transactions:
    """What all transactions of the process share."""

    def __init__(
        self,
        config: KafkaConfig,
        producer_pool: TransactionalProducerPool,
        publisher: Publisher,
        *,
        spawn: Spawn,
        wall_clock: Callable[[], int],
    ) -> None:
        self.producer_pool = producer_pool
        self.publisher = publisher
        self.spawn = spawn
        self._wall_clock = wall_clock
        self._max_request_bytes = config.max_request_bytes

    def begin(self, settle: Settle) -> KafkaTransaction:
        """A transaction; Kafka hears of it when there is something in it."""
        return KafkaTransaction(self, settle)

    def place(self, record: Record, info: TopicInfo, sender: Sender) -> tuple[int, int]:
        """The partition and the timestamp of a record, as the publisher chooses them.

        Raises:
            Refused: no such partition, or the topic does not take it.
        """
        number = self.publisher.place(info, record, sender)
        if record.key is None and info.needs_key:
            raise Refused(Outcome.UNFIT, f"topic {info.name} is compacted: a key is needed")
        now, timestamp = self._wall_clock(), record.timestamp
        if timestamp is None:
            timestamp = now
        elif not (timestamp >= 0 and now - info.before_ms <= timestamp <= now + info.after_ms):
            raise Refused(Outcome.UNFIT, f"topic {info.name} refuses the timestamp {timestamp}")
        return number, timestamp

    def largest(self, info: TopicInfo) -> int:
        """Bytes that a record may have."""
        return min(info.max_message_bytes, self._max_request_bytes) - HEADER_BYTES


class _Batches:
    """What is to be stored of one partition: aiokafka's batches in order, with the posts in each."""

    __slots__ = ("batches",)

    def __init__(self) -> None:
        self.batches: list[tuple[Any, list[_Post]]] = []

    def append(self, post: _Post, timestamp: int, largest: int, new_batch: Callable[[], Any]) -> None:
        """Raises Refused when no record can hold it."""
        record = post.record
        for fresh in (not self.batches, True):
            if fresh:
                self.batches.append((new_batch(), []))
            builder, posts = self.batches[-1]
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
        raise Refused(Outcome.TOO_LARGE, f"topic {record.topic} takes {largest} bytes")


class KafkaTransaction:
    """One transaction. Once a record of it has failed it can only be aborted."""

    __slots__ = (
        "_producer", "_publisher", "_queue", "_settle", "_shared", "_spoiled", "_task", "_unsettled", "failure",
    )  # fmt: skip

    def __init__(self, shared: Transactions, settle: Settle) -> None:
        self.failure: Result | None = None  # why it can only be aborted; None while it can be committed
        self._shared = shared
        self._publisher = shared.publisher
        self._settle = settle
        self._queue: list[_Post] = []
        self._unsettled: dict[_Post, None] = {}
        self._producer: TransactionalProducer | None = None
        self._spoiled = False  # its sequences may have a gap
        self._task: asyncio.Task[None] | None = None

    def submit(self, record: Record, token: Any, sender: Sender) -> None:
        """Take a record of `sender`; its fate goes to `settle` later."""
        post = _Post(record, token, sender)
        self._publisher.reserve(post.size)
        self._unsettled[post] = None
        self._queue.append(post)
        if self._task is None:
            self._task = self._shared.spawn(self._run())

    async def stored(self) -> None:
        """Wait until the fate of everything submitted is known."""
        while self._task is not None:
            await asyncio.wait({self._task})

    async def commit(self, places: Places) -> None:
        """Make the records visible and the groups' offsets theirs, all together; `stored` first.

        Raises:
            TransactionFailed: it was aborted, or will be; call `abort` all the same.
        """
        if self.failure is not None:
            raise TransactionFailed(self.failure.reason)
        settled: dict[GroupReader, dict[AssignedPartition, set[int]]] = {}
        for reader, part, offset in places:
            settled.setdefault(reader, {}).setdefault(part, set()).add(offset)
        try:
            if len(settled) > 1:  # ahead of the locks, which others may hold who have a producer
                async with asyncio.timeout(END_S):
                    await self._begin()
        except TimeoutError:
            raise TransactionFailed("no producer was free in time") from None
        except errors.KafkaError as error:
            raise TransactionFailed(name_of(error)) from error
        try:
            async with asyncio.timeout(END_S), contextlib.AsyncExitStack() as stack:
                offsets: list[tuple[GroupReader, dict[TopicPartition, OffsetAndMetadata]]] = []
                for reader in sorted(settled, key=lambda reader: reader.group):  # all in one order: no deadlock
                    growing = await stack.enter_async_context(reader.commits.committing(settled[reader]))
                    if growing:
                        offsets.append((reader, growing))
                producer = self._producer
                for reader, growing in offsets:
                    if producer is None:  # nothing but one group: its own commit is all or nothing too
                        await reader.commits.commit_for(growing)
                    else:
                        await producer.add_offsets(reader.group, growing)
                if producer is None:
                    return
                self._spoiled = True  # until it has answered
                await producer.commit()
                self._spoiled = False
        except TimeoutError:
            self._spoiled = True
            raise TransactionFailed("Kafka did not answer in time: whether it is committed is not known") from None
        except errors.KafkaError as error:
            self._spoiled = True
            raise TransactionFailed(name_of(error)) from error
        self._producer = None
        self._shared.producer_pool.release(producer)

    async def abort(self, rest: Result) -> None:
        """Make sure that nothing of it becomes visible; what has no fate yet gets `rest`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._end(list(self._unsettled), rest)
        self._queue.clear()
        producer, self._producer = self._producer, None
        if producer is None:
            return
        if not self._spoiled:
            try:
                async with asyncio.timeout(END_S):
                    await producer.abort()
            except (errors.KafkaError, TimeoutError) as error:
                log.info("a transaction is left to the next producer to abort: %r", error)
                self._spoiled = True
        if self._spoiled:
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
        """Store what is queued, generation by generation."""
        try:
            producer = await self._begin()
            while self._queue and self.failure is None:
                queue, self._queue = self._queue, []
                await self._store(producer, queue)
        except errors.KafkaError as error:
            self._spoiled = True
            self._fail(Result(outcome=verdict(error).outcome, reason=name_of(error)))
        except Exception as error:  # our bug, in one transaction: it fails, and the gateway lives on
            failures.tell("transaction", error)
            self._spoiled = True
            self._fail(Result(outcome=Outcome.BROKEN, reason="internal error"))
        finally:
            self._task = None
            if self.failure is not None:
                self._queue.clear()
                self._end(list(self._unsettled), self.failure)

    async def _store(self, producer: TransactionalProducer, posts: Sequence[_Post]) -> None:
        partitions: dict[tuple[str, int], _Batches] = {}
        for post in posts:
            record = post.record
            try:
                info = self._publisher.known_topic(record.topic) or await self._publisher.topic(record.topic)
                number, timestamp = self._shared.place(record, info, post.sender)
                batches = partitions.get((record.topic, number))
                if batches is None:
                    if (unsafe := self._publisher.unsafe(info)) is not None:
                        raise unsafe
                    batches = partitions[record.topic, number] = _Batches()
                batches.append(post, timestamp, self._shared.largest(info), producer.new_batch)
            except Refused as refused:
                self._fail(Result(outcome=refused.outcome, reason=refused.reason))
                return
        in_flight: list[tuple[asyncio.Future[Any], int, list[_Post]]] = []
        try:
            for (topic, number), batches in partitions.items():
                for builder, together in batches.batches:
                    in_flight.append((await producer.hand_over(builder, topic, number), number, together))
            await producer.stored([future for future, _, _ in in_flight], partitions.keys())
        except BaseException as failed:
            if isinstance(failed, errors.UnknownTopicOrPartitionError):
                for topic, _ in partitions:
                    self._publisher.recheck(topic)
            for future, _, _ in in_flight:
                future.cancel()  # aiokafka's own goes on; nobody listens
            raise
        for future, number, together in in_flight:
            error = future.exception()
            if error is None:
                self._end(together, Result(outcome=Outcome.STORED, partition=number))
            elif isinstance(error, errors.KafkaError):
                self._spoiled = True
                self._fail(Result(outcome=verdict(error).outcome, reason=name_of(error)))
            else:
                raise error

    def _fail(self, result: Result) -> None:
        if self.failure is None:
            self.failure = result

    def _end(self, posts: Collection[_Post], result: Result) -> None:
        """Tell the fate of posts."""
        if not posts:
            return
        for post in posts:
            del self._unsettled[post]
        self._publisher.free(sum(post.size for post in posts), len(posts))
        self._settle([post.token for post in posts], result)
