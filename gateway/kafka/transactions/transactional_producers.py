"""Kafka's transactional producers: a bounded pool, each with a transactional id that outlives the process.

The ids are `trivium-<gateway>-<number>`. Starting a producer ends the transaction that an earlier one with the same id
has left open. So a restarted gateway ends its predecessor's transactions (`TransactionalProducerPool.start`), which
would otherwise hold back every reader of the partitions that they have written to.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import structlog
from aiokafka import AIOKafkaProducer, TopicPartition, errors
from aiokafka.structs import OffsetAndMetadata

from gateway.kafka.driver.lifecycle import start_client, started
from gateway.kafka.driver.produce.kafka_producer import forget_group, has_failed, new_producer
from gateway.kafka.publish.producers import LeasedProducer
from gateway.runtime.failures import failures
from gateway.runtime.spawn import Spawn, Tasks
from gateway.settings.config import KafkaConfig

log = structlog.get_logger(__name__)

MARGIN_S: Final = 15.0
"""How much longer Kafka's own transaction time-out is than ours: ours must end the transaction first."""

REST_S: Final = 0.02
"""How long a producer rests after a transaction, while others are available: Kafka writes the end markers after its
answer, and refuses the next transaction until then (aiokafka asks again 20 ms later)."""

RESTART_MOST_S: Final = 10.0
"""The longest pause between attempts to start a producer that Kafka refuses."""

IDLE_S: Final = 300.0
"""A producer is closed after this time without a transaction."""


REFRESH_S: Final = 2.0
"""After this time without answers the metadata is refreshed, to see whether the partitions still exist: aiokafka would
retry to add a missing one forever, and refreshes only when its metadata has become old."""


class TransactionalProducer(LeasedProducer):
    """One transactional producer, with at most one transaction at a time."""

    __slots__ = ("_group", "_in_flight", "_patience", "number")

    def __init__(self, producer: AIOKafkaProducer, number: int) -> None:
        super().__init__(producer)
        self.number = number  # of its transactional id
        self._group: str | None = None
        self._in_flight: Collection[tuple[str, int]] = ()
        self._patience: asyncio.Timeout | None = None
        producer.client.cluster.add_listener(self._check_partitions)

    async def stored(self, answers: Collection[asyncio.Future[Any]], partitions: Collection[tuple[str, int]]) -> None:
        """Wait for the answers for batches that were handed over to these topics and partitions.

        Raises:
            UnknownTopicOrPartitionError: one of them no longer exists; aiokafka would retry forever.
        """
        self._in_flight = partitions
        try:
            async with asyncio.timeout(None) as self._patience:
                while (await asyncio.wait(answers, timeout=REFRESH_S))[1]:
                    self._producer.client.force_metadata_update()
        except TimeoutError:
            raise errors.UnknownTopicOrPartitionError("a partition is gone") from None
        finally:
            self._in_flight, self._patience = (), None

    def _check_partitions(self, cluster: Any) -> None:
        """Stop waiting if new metadata lacks a partition that an answer is awaited for."""
        if self._patience is not None and any(
            number not in (cluster.partitions_for_topic(topic) or ()) for topic, number in self._in_flight
        ):
            self._patience.reschedule(asyncio.get_running_loop().time())

    async def begin(self) -> None:
        """Start a transaction; Kafka knows of it from the first record or offset. Raises KafkaError."""
        self._check()
        await self._producer.begin_transaction()

    def new_batch(self) -> Any:
        """Return an empty `aiokafka` batch for `hand_over`."""
        return self._producer.create_batch()

    async def add_offsets(self, group: str, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Make consumed offsets part of the transaction. Raises KafkaError."""
        self._check()
        producer = self._producer
        if group != self._group:
            forget_group(producer)
            self._group = group
        await producer.send_offsets_to_transaction(dict(offsets), group)

    async def commit(self) -> None:
        """Make everything visible. Raises KafkaError: then the result is unknown."""
        self._check()
        await self._producer.commit_transaction()

    async def abort(self) -> None:
        """Make sure that nothing becomes visible. Raises KafkaError."""
        self._check()
        await self._producer.abort_transaction()

    def _check(self) -> None:
        """Raise ProducerFenced if the background task has failed, which aiokafka only asserts."""
        if has_failed(self._producer):
            raise errors.ProducerFenced("the transactional producer has failed")


class TransactionalProducerPool:
    """All transactional producers of the process; each is started when it is first needed."""

    def __init__(
        self,
        config: KafkaConfig,
        *,
        name: str,
        limit: int,
        timeout_s: float,
        used_ids_file: Path | None,
        spawn: Spawn,
        clock: Callable[[], float],
    ) -> None:
        """Manage at most `limit` producers, for transactions of at most `timeout_s`.

        `name` is this gateway's, the same after a restart. `used_ids_file` keeps the number of ids in use for the next
        process. None means that the next process has another name: Kafka's time-out ends the transactions that this one
        leaves open. `clock` returns monotonic seconds.
        """
        self._config = config
        self._name = name
        self._timeout_ms = round((timeout_s + MARGIN_S) * 1000)
        self._used_ids_file = used_ids_file
        self._spawn = spawn
        self._clock = clock
        self._free = list(range(limit))  # unused numbers, a heap
        self._idle: deque[tuple[float, TransactionalProducer]] = deque()  # the one idle for longest is first
        self._busy: set[TransactionalProducer] = set()
        self._closing: set[TransactionalProducer] = set()
        self._waiting: deque[asyncio.Future[TransactionalProducer]] = deque()
        self._tasks = Tasks(lambda _: None)  # starts and closes producers
        self._reaper: asyncio.TimerHandle | None = None
        self._saved_ids = 0
        self._starting = 0
        self._stopped = False
        self.started = 0  # producers started so far

    def start(self) -> None:
        """End, in the background, the transactions that an earlier process of this gateway has left open."""
        used = self._read_used_ids()
        self._saved_ids = used
        for number in range(min(used, len(self._free))):
            self._free.remove(number)
            self._tasks.spawn(self._start(number))

    async def acquire(self) -> TransactionalProducer:
        """Return a producer for one transaction; `release` or `discard` it afterwards.

        Waits while all are in use, first come first served, and while Kafka does not answer: set a time limit.
        """
        producer = self._find()
        if producer is None:
            future: asyncio.Future[TransactionalProducer] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                producer = await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._put(future.result())
                elif future in self._waiting:  # else `_put` has passed over it since
                    self._waiting.remove(future)
                raise
        self._busy.add(producer)
        return producer

    def release(self, producer: TransactionalProducer) -> None:
        """Return a producer whose transaction has ended to the pool."""
        self._busy.discard(producer)
        self._put(producer)

    def discard(self, producer: TransactionalProducer) -> None:
        """Replace a failed producer: its successor, with the same id, ends the transaction it may have left open."""
        self._busy.discard(producer)
        self._closing.add(producer)
        self._tasks.spawn(self._close(producer) if self._stopped else self._renew(producer))

    @property
    def producers(self) -> int:
        """How many producers there are now."""
        return len(self._idle) + len(self._busy)

    async def stop(self) -> None:
        """Close all producers; their transactions must have ended."""
        self._stopped = True
        if self._reaper is not None:
            self._reaper.cancel()
        for future in self._waiting:
            future.cancel()
        unfinished = len(self._tasks)  # among them starts that would end transactions
        await self._tasks.close()
        if self._used_ids_file is not None and not self._busy and not unfinished:
            self._used_ids_file.unlink(missing_ok=True)  # no transaction was left open
        every = {*self._busy, *self._closing, *(producer for _, producer in self._idle)}
        self._idle.clear()
        self._busy.clear()
        await asyncio.gather(*(producer.force_close(self._spawn) for producer in every))

    def _find(self) -> TransactionalProducer | None:
        """Return the longest idle producer, if any; start another one unless that has rested."""
        rested = self._idle and self._clock() - self._idle[0][0] >= REST_S
        if not rested and self._free and self._starting <= len(self._waiting) and not self._stopped:
            self._tasks.spawn(self._start(heapq.heappop(self._free)))
        return self._idle.popleft()[1] if self._idle else None  # `_put` serves waiting calls first

    def _put(self, producer: TransactionalProducer) -> None:
        """Give a producer to the first waiting call, or append it to the idle ones."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(producer)
                return
        self._idle.append((self._clock(), producer))
        if self._reaper is None and not self._stopped:
            self._reaper = asyncio.get_running_loop().call_later(IDLE_S / 4, self._reap)

    def _reap(self) -> None:
        """Close producers that were idle for long."""
        self._reaper = None
        while self._idle and self._clock() - self._idle[0][0] >= IDLE_S:
            _, producer = self._idle.popleft()
            self._closing.add(producer)
            self._tasks.spawn(self._retire(producer))
        if self._idle:
            self._reaper = asyncio.get_running_loop().call_later(IDLE_S / 4, self._reap)

    async def _retire(self, producer: TransactionalProducer) -> None:
        await self._close(producer)
        heapq.heappush(self._free, producer.number)

    async def _renew(self, producer: TransactionalProducer) -> None:
        await self._close(producer)
        await self._start(producer.number)

    async def _close(self, producer: TransactionalProducer) -> None:
        """Close a producer that is in `_closing`; `stop` closes it again if this is cancelled."""
        try:
            await producer.force_close(self._spawn)
        except Exception as error:  # its successor fences it
            failures.report("transaction", error)
        self._closing.discard(producer)

    async def _start(self, number: int) -> None:
        """Start a producer, retrying until it succeeds; Kafka ends the transaction left open under its id."""
        self._save_used_ids(number + 1)
        self._starting += 1
        try:
            producer = await self._open(number)
        finally:
            self._starting -= 1
        self.started += 1
        self._put(producer)

    async def _open(self, number: int) -> TransactionalProducer:
        producer = await started(
            lambda: new_producer(
                self._config,
                f"transactions-{number}",
                transactional_id=f"trivium-{self._name}-{number}",
                transaction_timeout_ms=self._timeout_ms,
            ),
            lambda producer: start_client(producer.start, producer.stop, self._spawn),
            "transaction",
            longest_pause_s=RESTART_MOST_S,
        )
        return TransactionalProducer(producer, number)

    def _read_used_ids(self) -> int:
        try:
            return int(self._used_ids_file.read_text()) if self._used_ids_file is not None else 0
        except (OSError, ValueError):
            return 0

    def _save_used_ids(self, used: int) -> None:
        """Save how many ids have been in use, for the next process."""
        if self._used_ids_file is None or used <= self._saved_ids:
            return
        self._saved_ids = used
        try:
            self._used_ids_file.write_text(str(used))
        except OSError as error:
            log.warning("a file cannot be written", file=str(self._used_ids_file), error=str(error))
