"""The catch-up reader: reads the log from a given offset at the pace of one subscriber.

A subscriber that had no capacity at the end of the log, or a session that was offline, is behind. The log is its queue,
which costs one offset per partition. A bounded pool of consumers serves the subscribers in turn, so a thousand
subscribers that are behind cost a thousand offsets and a handful of consumers.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final

import msgspec
import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused, Subscriber
from gateway.kafka.driver.kafka_consumer import ConsumerOptions, is_broken, log_consumer, poll
from gateway.kafka.driver.lifecycle import keep_consumer
from gateway.runtime.failures import failures
from gateway.runtime.spawn import Spawn, keep_running
from gateway.views.pauses import NO_CAPACITY, pauses
from mapping.record import Received
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)


PART: Final = "catch-up reader"  # its name in the log

FETCH_BYTES: Final = 65536
"""Per partition and fetch: subscribers take turns, and unused records of one are discarded at the next turn."""

IDLE_S: Final = 10.0  # a consumer without work is closed after this time
TURN_RECORDS: Final = 2000  # the most records read for one subscriber in a turn


Goal = Callable[[], int]
"""Returns the offset where a reading ends, which may move on: usually the live reader's position in the partition."""


@dataclass(slots=True, eq=False)
class Reading:
    """The catch-up of one subscriber in one partition."""

    subscriber: Subscriber
    partition: TopicPartition
    position: int  # the offset of the next record to offer; safe to store
    goal: Goal  # the reading ends at `goal()`, before the record there is offered
    finished: Callable[[Reading], None]  # called once, when the goal is reached; not when the reading is cancelled
    # receives the number of records that retention had deleted before they could be offered
    gap: Callable[[int], None] | None = None


class CatchUpStatistics(msgspec.Struct, frozen=True):
    """A snapshot of the catch-up reader's counters."""

    subscribers: Annotated[int, gauge("subscribers that are behind")]
    readings: Annotated[int, gauge("partitions they are behind on, in sum")]
    consumers: Annotated[int, gauge("open consumers")]
    offered: Annotated[int, counter("records that subscribers took from the catch-up reader")]
    gaps: Annotated[int, counter("records that retention had deleted before they were read")]


class _State(enum.Enum):
    PARKED = 1  # waits for `resume`
    READY = 2  # waits for a worker
    SERVED = 3  # a worker serves it


class _Queue(msgspec.Struct, eq=False):
    """The readings of one subscriber."""

    subscriber: Subscriber
    readings: dict[TopicPartition, Reading] = {}
    state: _State = _State.PARKED
    version: int = 0  # counts changes that need a new assignment, also to another worker
    woken: bool = False  # `resume` was called during its turn


@dataclass(slots=True, eq=False)
class CatchUpReader:
    """Serves all subscribers that are behind, from a bounded pool of consumers."""

    kafka: ConsumerOptions
    spawn: Spawn
    lookup: Lookup
    consumers: int = 16  # the most that are open; none before a subscriber is behind
    idle_s: float = IDLE_S
    offered: int = 0
    gaps: int = 0
    _queues: dict[Subscriber, _Queue] = field(default_factory=dict)
    _ready: deque[_Queue] = field(default_factory=deque)
    _workers: set[_CatchUpWorker] = field(default_factory=set)
    _stopped: bool = False

    def start(self, reading: Reading) -> None:
        """Start to serve a reading, in turn with all others; a subscriber may have one per partition."""
        queue = self._queues.get(reading.subscriber)
        if queue is None:
            queue = self._queues[reading.subscriber] = _Queue(reading.subscriber)
        assert reading.partition not in queue.readings, "one reading per subscriber and partition"
        queue.readings[reading.partition] = reading
        queue.version += 1
        if queue.state is _State.PARKED:
            if reading.subscriber.demand > 0:
                self._make_ready(queue)
            else:
                self._park(queue)

    def resume(self, subscriber: Subscriber) -> None:
        """Continue for a subscriber that has capacity again."""
        queue = self._queues.get(subscriber)
        if queue is None:
            return
        queue.woken = True
        if queue.state is _State.PARKED:
            self._make_ready(queue)

    def cancel(self, reading: Reading) -> None:
        """Stop a reading; its `position` is kept and `finished` is not called."""
        queue = self._queues.get(reading.subscriber)
        if queue is not None and queue.readings.get(reading.partition) is reading:
            self._drop(queue, reading)

    def forget(self, subscriber: Subscriber) -> list[Reading]:
        """Stop all readings of a subscriber and return them, with their positions."""
        queue = self._queues.pop(subscriber, None)
        if queue is None:
            return []
        pauses.end_all(subscriber, *NO_CAPACITY)
        readings = list(queue.readings.values())
        queue.readings.clear()
        return readings

    async def stop(self) -> None:
        """Close all consumers."""
        self._stopped = True
        workers = list(self._workers)
        for worker in workers:
            worker.task.cancel()
        await asyncio.gather(*(worker.task for worker in workers), return_exceptions=True)

    def statistics(self) -> CatchUpStatistics:
        """Return the counts so far."""
        return CatchUpStatistics(
            subscribers=len(self._queues),
            readings=sum(len(queue.readings) for queue in self._queues.values()),
            consumers=len(self._workers),
            offered=self.offered,
            gaps=self.gaps,
        )

    # For the workers.

    def finish(self, queue: _Queue, reading: Reading) -> None:
        """End a reading whose goal is reached."""
        self._drop(queue, reading)
        reading.finished(reading)

    def take_turn(self) -> _Queue | None:
        """Return the next subscriber that waits for a worker."""
        while self._ready:
            queue = self._ready.popleft()
            if queue.readings and queue.state is _State.READY:
                queue.state = _State.SERVED
                return queue
        return None

    @property
    def has_ready(self) -> bool:
        """Whether a subscriber waits for a worker."""
        return bool(self._ready)

    def end_turn(self, queue: _Queue, *, waits: bool) -> None:
        """End a subscriber's turn; it waits for capacity (`waits`) or for its next turn."""
        if not queue.readings:
            return
        if waits and not queue.woken:
            self._park(queue)
        else:
            queue.state = _State.READY
            self._ready.append(queue)

    def closed(self, worker: _CatchUpWorker) -> None:
        """Remove a worker; hire another for subscribers that became ready while it was closing its consumer."""
        self._workers.discard(worker)
        if self._ready and not self._stopped:
            self._hire()

    def _drop(self, queue: _Queue, reading: Reading) -> None:
        del queue.readings[reading.partition]
        if not queue.readings and self._queues.get(queue.subscriber) is queue:
            del self._queues[queue.subscriber]
            pauses.end_all(queue.subscriber, *NO_CAPACITY)

    def _park(self, queue: _Queue) -> None:
        """Park a subscriber without capacity."""
        queue.state = _State.PARKED
        reason = queue.subscriber.pause_reason()
        if reason is not None:
            pauses.begin(reason[0], queue.subscriber, reason[1])

    def _make_ready(self, queue: _Queue) -> None:
        queue.state = _State.READY
        pauses.end_all(queue.subscriber, *NO_CAPACITY)
        idle = [worker for worker in self._workers if not worker.busy.is_set()]
        holder = next((worker for worker in idle if worker.holds(queue)), None)
        if holder is not None:
            self._ready.appendleft(queue)  # that worker has its records already: no new fetch
            holder.busy.set()
            return
        self._ready.append(queue)
        spare = next((worker for worker in idle if worker.serves is None or not worker.serves.readings), None)
        if spare is None and len(self._workers) < self.consumers:
            self._hire()
        elif spare is not None or idle:
            (spare or idle[0]).busy.set()

    def _hire(self) -> None:
        worker = _CatchUpWorker(self)
        self._workers.add(worker)
        worker.task = self.spawn(worker.serve())


class _CatchUpWorker:
    """One consumer of the pool, with the fetched records of one subscriber."""

    task: asyncio.Task[None]

    def __init__(self, pool: CatchUpReader) -> None:
        self.busy = asyncio.Event()  # cleared while it waits for a turn
        self.busy.set()
        self.serves: _Queue | None = None
        self._version = -1
        self._pool = pool
        self._chunk: deque[tuple[Reading, list[Received]]] = deque()

    def holds(self, queue: _Queue) -> bool:
        """Whether the consumer's assignment and the fetched records are those of a subscriber's readings."""
        return self.serves is queue and self._version == queue.version

    async def serve(self) -> None:
        """Serve turns until there were none for a while."""
        try:
            keep = partial(keep_consumer, self._consumer, self._serve_all, PART, self._pool.spawn)
            await keep_running(keep, PART)
        finally:
            self._release()
            self._pool.closed(self)

    def _consumer(self) -> AIOKafkaConsumer:
        return log_consumer(
            self._pool.kafka,
            wait_ms=10,  # records are there already
            partition_bytes=FETCH_BYTES,
            fetch_bytes=16 * FETCH_BYTES,
        )

    async def _serve_all(self, consumer: AIOKafkaConsumer) -> None:
        pool = self._pool
        self._release()  # the last consumer's records were lost with it
        while True:
            queue = pool.take_turn()
            if queue is None:
                if not await self._wait():
                    return
                continue
            waits = False
            try:
                waits = await self._serve(consumer, queue)
            finally:
                pool.end_turn(queue, waits=waits)

    async def _wait(self) -> bool:
        self.busy.clear()
        try:
            async with asyncio.timeout(self._pool.idle_s):
                await self.busy.wait()
        except TimeoutError:
            return self._pool.has_ready
        finally:
            self.busy.set()
        return True

    def _release(self) -> None:
        """Drop the fetched records and their subscriber, which would otherwise be kept alive, perhaps in a cycle."""
        self.serves = None
        self._chunk.clear()

    def _attach(self, consumer: AIOKafkaConsumer, queue: _Queue) -> None:
        self._release()
        self.serves = queue
        queue.version += 1
        self._version = queue.version
        for reading in list(queue.readings.values()):
            if reading.position >= reading.goal():
                self._pool.finish(queue, reading)
        consumer.assign(list(queue.readings))
        for partition, reading in queue.readings.items():
            consumer.seek(partition, reading.position)

    async def _serve(self, consumer: AIOKafkaConsumer, queue: _Queue) -> bool:
        """Serve one turn of a subscriber; True when it has no capacity."""
        records = 0
        while queue.readings and records < TURN_RECORDS:
            if not self.holds(queue):
                self._attach(consumer, queue)
                continue
            if not self._chunk:
                queue.woken = False
                if queue.subscriber.demand <= 0:
                    return True
                count = await self._fetch(consumer, queue)
                records += count or TURN_RECORDS  # nothing came: end the turn
                continue  # anything may have changed during the fetch
            queue.woken = False
            if not self._offer(consumer, queue):
                return True
            await asyncio.sleep(0)
        if not queue.readings and self.serves is queue:
            self._release()
        return False

    async def _fetch(self, consumer: AIOKafkaConsumer, queue: _Queue) -> int:
        try:
            batches = await poll(consumer, wait_ms=100)
        except OffsetOutOfRangeError as error:
            await self._skip_gap(consumer, queue, error.args[0])
            return 1
        except KafkaError as error:
            if is_broken(consumer):
                raise
            log.warning("catch-up reader: a fetch has failed", error=repr(error))
            await asyncio.sleep(0.1)
            return 0
        if not self.holds(queue):
            self._version = -1  # these records belong to a former assignment
            return 1
        count = 0
        for partition, records in batches.items():
            reading = queue.readings.get(partition)
            if reading is not None:
                self._chunk.append((reading, records))
                count += len(records)
        if not batches:
            # Only transaction markers or compacted records may lie between us and the goal.
            for reading in list(queue.readings.values()):
                if await consumer.position(reading.partition) >= reading.goal():
                    self._pool.finish(queue, reading)
        return count

    def _offer(self, consumer: AIOKafkaConsumer, queue: _Queue) -> bool:
        """Offer the fetched records; False when the subscriber has no capacity."""
        subscriber = queue.subscriber
        chunk = self._chunk
        while chunk:
            reading, records = chunk[0]
            if queue.readings.get(reading.partition) is not reading:
                chunk.popleft()  # cancelled
                continue
            goal = reading.goal()
            for taken, record in enumerate(records):
                if record.offset >= goal:
                    break
                try:
                    accepted = subscriber.offer_nowait(record)
                except Exception as error:  # our bug, in one delivery: skip it, deliver the others
                    failures.report("delivery", error, f"{reading.partition} offset {record.offset}")
                    accepted = True
                if not accepted:
                    del records[:taken]
                    return False
                self._pool.offered += 1
                reading.position = record.offset + 1
                if queue.readings.get(reading.partition) is not reading:
                    break  # cancelled during the offer
            chunk.popleft()
            if queue.readings.get(reading.partition) is reading and reading.position >= reading.goal():
                if reading.partition in consumer.assignment():
                    consumer.pause(reading.partition)
                self._pool.finish(queue, reading)
        return True

    async def _skip_gap(self, consumer: AIOKafkaConsumer, queue: _Queue, positions: dict[TopicPartition, int]) -> None:
        try:
            firsts = await self._pool.lookup.beginnings(positions, led=True)
        except Refused:
            await asyncio.sleep(0.1)
            return
        for partition, first in firsts.items():
            reading = queue.readings.get(partition)
            if reading is None:
                continue
            # Below the first record: retention was faster. Above the last: the topic was recreated.
            lost = max(0, min(first, reading.goal()) - reading.position)
            self._pool.gaps += lost
            if lost and reading.gap is not None:
                reading.gap(lost)
            log.warning(
                "catch-up reader: an offset is gone",
                topic=partition.topic,
                partition=partition.partition,
                offset=reading.position,
                lost=lost,
                continues_at=first,
            )
            reading.position = first
            if first >= reading.goal():
                self._pool.finish(queue, reading)
        self._version = -1
