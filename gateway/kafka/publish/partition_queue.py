"""One partition's batches, from the open one to Kafka's answer; one batch is in flight.

A partition queue keeps an open batch, full batches that wait, and one in flight. The open batch fills while its
predecessor is in flight, so batches grow with the load. A single batch in flight keeps the order without further means,
and no batch waits for another one in aiokafka while its own timeout runs.

Batches usually leave in the requests of a turn (`turn_requests`), together with those of other partitions. Whatever is
unusual (no producer or connection, an error, a deleted topic, a freeze, a timeout) is the queue's task's to solve; then
the queue goes back to the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final
from weakref import ref

import msgspec
import structlog
from aiokafka import TopicPartition, errors

from flowcontrol.budget import Budget
from gateway.kafka.cluster.error_verdicts import Remedy, Verdict, name_of, verdict
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Result
from gateway.kafka.driver.produce.batch_builder import WrittenBatch
from gateway.kafka.driver.produce.turn_requests import Answer
from gateway.kafka.publish.batch import HEADER_BYTES, WITHDRAWN, Batch
from gateway.kafka.publish.batch_format import CODECS
from gateway.kafka.publish.producers import Producers, PublishingProducer
from gateway.kafka.publish.sending_states import TABLE, Act, Sending, Step
from gateway.runtime.failures import failures
from gateway.runtime.fence import Fence
from gateway.runtime.spawn import Spawn
from gateway.settings.config import KafkaConfig
from mapping.outcomes import Outcome

log = structlog.get_logger(__name__)

RESEND_S: Final = 0.1
"""Pause before a batch is sent through another producer; doubles up to `RESEND_MOST_S`."""
RESEND_MOST_S: Final = 2.0

CROWD: Final = 2
"""Waiting full batches, at an answer, from which on a partition is crowded. With one, the next batch is sent
immediately and has full size; a second only makes up for late senders."""

SPLIT_FAILURES_MOST: Final = 24
"""How many parts of a split batch may fail in a row with errors that need not be caused by a single record, before the
rest is given up: twice as many as it takes to find one record among thousands. Each failure costs a new producer."""

_NOT_THE_PRODUCER: Final = (
    errors.UnknownTopicOrPartitionError,
    errors.TopicAuthorizationFailedError,
    errors.KafkaTimeoutError,
)
"""Errors before the hand-over of a batch after which the producer is still usable; after all others it is not."""

Settle = Callable[[Batch, str, Result, int], None]
"""Called once for each batch: the batch, its topic, the result, and the first record's offset if stored (-1 when Kafka
returned none)."""
Replace = Callable[[str, int, Sequence[Batch]], None]
"""Called to place batches of a partition that no longer exists: topic, partition number, and its waiting batches."""


class WriterContext(msgspec.Struct, eq=False):
    """What the queues of all topics share."""

    config: KafkaConfig
    producers: Producers
    topics: Topics
    spawn: Spawn
    clock: Callable[[], float]
    rng: random.Random
    settle: Settle
    replace: Replace
    fence: Fence


class QueuedTopic:
    """What the queues of one topic share."""

    def __init__(self, info: TopicInfo, context: WriterContext, budget: Budget) -> None:
        self.name = info.name
        self.info = info
        self.context = context
        self.gone: Outcome | None = None  # outcome of all records once the topic was deleted or is forbidden
        self._budget = budget

    @property
    def largest(self) -> int:
        """The record bytes that the broker accepts in one batch."""
        return min(self.info.max_message_bytes, self.context.config.max_request_bytes) - HEADER_BYTES

    def new_batch(self) -> Batch:
        """Create an empty batch whose size limit the broker accepts."""
        limit = min(self.context.config.batch_bytes, self.largest + HEADER_BYTES)
        return Batch(limit, self._budget, CODECS[self.context.config.compression])


@dataclass(slots=True, eq=False)
class PartitionQueue:
    """The batches of one partition."""

    topic: QueuedTopic
    number: int
    context: WriterContext = field(init=False)
    open: Batch = field(init=False)  # being filled; may be empty
    full: deque[Batch] = field(default_factory=deque)  # sealed batches that wait, in order
    # the batch in flight, or the parts of one that was split
    in_flight: deque[Batch] = field(default_factory=deque)
    touched: bool = False  # is in the publisher's list for the end of this event-loop turn
    senders: int = 0  # number of lasting senders placed here
    led: bool = True  # the partition has a leader, by the last metadata
    # accepts no records without a key: the partition has no leader and no batches here, or no longer exists
    shut: bool = False
    dissolved: bool = False  # the partition no longer exists
    _split_failures: int = 0
    place: TopicPartition = field(init=False)  # the partition, as aiokafka names it
    sending: Sending = Sending.IDLE
    _leased: PublishingProducer | None = None  # by whose requests the next batch is sent, while OFFERED or SENT
    _handed: tuple[PublishingProducer, Answer] | None = None  # of a batch that was left to the task in flight
    _task: asyncio.Task[None] | None = None  # while ALONE
    _timeout: asyncio.Timeout | None = None
    # timed out here, but aiokafka still retries them, ahead of later ones
    _given_up: list[ref[Batch]] = field(default_factory=list)
    _tried_by: PublishingProducer | None = None  # the producer of `_given_up`

    def __post_init__(self) -> None:
        self.context = self.topic.context
        self.place = TopicPartition(self.topic.name, self.number)
        self.open = self.topic.new_batch()

    def _step(self, step: Step) -> Act:
        act, self.sending = TABLE[self.sending][step]
        if self.sending is Sending.IDLE:
            self._leased = None
        return act

    def seal_open(self) -> Batch:
        """Queue the open batch, unless it is empty, and open another."""
        batch, self.open = self.open, self.topic.new_batch()
        if batch.count:
            self.full.append(batch)
            batch.seal()
        return self.open

    def start(self) -> None:
        """Update the budgets, and begin to send unless something is in flight."""
        self.touched = False
        self.open.account()
        if self.sending is Sending.IDLE:
            self._go_on()

    def _go_on(self) -> None:
        """Send what waits: in the requests of the turn, or in a task if something is unusual."""
        if not self.full and not self.open.count:
            self.shut = self.shut or not self.led
            return
        leased = self.context.producers.current
        usual = self.topic.gone is None and self.context.fence.is_open and not self._has_given_up()
        try:
            offered = leased is not None and usual and leased.requests.offer(self)
        except Exception as error:  # a bug must neither stop the partition nor those that are answered with it
            failures.report("partition", error, f"{self.topic.name}-{self.number}")
            offered = False
        if offered:
            self._step(Step.OFFER)
            self._leased = leased
        else:
            self._leave()

    def _leave(self) -> None:
        if self._step(Step.LEAVE) is Act.START:
            self._leased = None
            self._task = self.context.spawn(self._run())

    # In the requests of the turn: `OfferingQueue`

    def next_batch(self) -> Batch:
        """Return the batch that `take` would return; it may be empty."""
        return self.full[0] if self.full else self.open

    def waits_since(self) -> float:
        """Return when the first record came of those that wait or are in flight."""
        return (self.in_flight[0] if self.in_flight else self.next_batch()).born

    def take(self) -> Batch | None:
        """Seal and return the next batch, which is in flight from now on; None if the queue does not wait any more."""
        if self.topic.gone is not None or not self.context.fence.allows(self.topic.name):
            self.go_alone()
            return None
        try:
            batch = self._take_next()
        except Exception as error:  # a bug: the batches of other partitions are in the same request
            failures.report("partition", error, f"{self.topic.name}-{self.number}")
            self.go_alone()
            return None
        self._step(Step.EMPTY if batch is None else Step.TAKE)
        return batch

    def _take_next(self) -> Batch | None:
        if not self.full:
            self.seal_open()
        if not self.full:  # what waited was withdrawn
            return None
        self.in_flight.append(self.full.popleft())
        return self.in_flight[0]

    def stored(self, batch: WrittenBatch, offset: int) -> None:
        """Settle the batch in flight, and go on."""
        if self._step(Step.STORE) is not Act.SETTLE:
            return
        try:
            self._settle(self.in_flight[0], Outcome.STORED, offset, "")
        except Exception as error:
            failures.report("partition", error, f"{self.topic.name}-{self.number}")
        self._go_on()

    def go_alone(self, batch: WrittenBatch | None = None, answer: Answer | None = None) -> None:
        """Go on in a task; if a batch is in flight, with the answer to come for it."""
        if batch is not None and not self._is_in_flight(batch):
            return  # settled already, or taken out
        if answer is not None:
            assert self._leased is not None
            self._leased.use()
            self._handed = self._leased, answer
        self._leave()

    # In a task

    async def _run(self) -> None:
        try:
            if not self.in_flight:
                self._take_next()
            await self._deliver()
            while self._is_late() and self._take_next() is not None:
                await self._deliver()
        except Exception as error:  # a bug: the batches in flight still get a definite outcome
            failures.report("partition", error, f"{self.topic.name}-{self.number}")
            while self.in_flight:
                self._settle(self.in_flight[0], Outcome.BROKEN, -1, "internal error")
            await asyncio.sleep(RESEND_S)
        finally:
            self._task = None
        self._step(Step.FINISH)
        self._go_on()
        self.context.producers.flush()

    def set_led(self, led: bool) -> None:
        """Note whether the partition has a leader. Without one, senders leave it once none of its batches is left."""
        self.led = led
        self.shut = not led and self.sending is Sending.IDLE and not self.open.count

    async def _deliver(self) -> None:
        """Send what is in flight, in order, until all of it is settled."""
        pause = RESEND_S
        self._split_failures = 0
        fence = self.context.fence
        while self.in_flight:
            batch = self.in_flight[0]
            deadline = batch.born + self.context.config.delivery_timeout_s
            if self._handed is not None:  # nothing may be done about the batch before its answer, or the timeout
                deadline = deadline if self.topic.gone is None else 0.0
            elif not fence.allows(self.topic.name):
                await fence.wait_open()
                continue
            elif batch.withdrawn:
                self.in_flight.popleft()
                self.in_flight.extendleft(self._take_out(batch, batch.withdrawn))
                continue
            elif self.topic.gone is not None:
                self._settle(batch, self.topic.gone, -1, f"topic {self.topic.name} is gone or forbidden")
                continue
            elif deadline <= self.context.clock():  # handed over now, it would be stored although this was told
                self._settle(batch, Outcome.BUSY, -1, "Kafka did not answer in time")
                continue
            try:
                async with asyncio.timeout_at(deadline) as self._timeout:
                    failed = await self._attempt(batch)
                    if failed is None:
                        pause = RESEND_S
                        continue
                    if failed.remedy is Remedy.RESEND:
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, RESEND_MOST_S)
                        await self.context.topics.confirm(self.topic.name)
            except TimeoutError:
                if not fence.allows(self.topic.name):
                    await fence.wait_open()
                if self.topic.gone is not None:
                    continue
                if not self._is_in_flight(batch):
                    continue
                # If aiokafka has the batch, it retries it still, and keeps later batches behind it.
                self._settle(batch, Outcome.BUSY, -1, "Kafka did not answer in time")
            except Exception as error:  # unexpected: resend through another producer until the timeout
                failures.report("partition", error, f"{self.topic.name}-{self.number}")
                if self._is_in_flight(batch):
                    self.in_flight[0] = batch.rebuild()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, RESEND_MOST_S)

    async def _attempt(self, batch: Batch) -> Verdict | None:
        """Hand `batch` to a producer and await the answer. Returns None when it is settled, split or rebuilt."""
        producers = self.context.producers
        if self._handed is None:
            leased, answer = await producers.acquire(), None
            if self._given_up and leased is not self._tried_by:
                self._void_given_up()
        else:
            (leased, adopted), self._handed = self._handed, None
            answer = asyncio.shield(adopted)  # as aiokafka does with what `hand_over` returns: the batch outlives us
        handed_over = answer is not None
        try:
            if answer is None:
                if not self.context.fence.allows(self.topic.name):
                    return None
                answer = await leased.hand_over(batch, self.topic.name, self.number)
                handed_over = True
            stored = await answer
            if not self.context.fence.allows(self.topic.name) and stored is not None:
                self._move_timeout(None)  # Kafka has answered, and only the fence delays the result
                await self.context.fence.wait_open()
        except errors.KafkaError as error:
            if not self._is_in_flight(batch):
                return None
            if handed_over or not isinstance(error, _NOT_THE_PRODUCER):
                producers.retire(leased)
            return self._failed(batch, handed_over, error)
        except asyncio.CancelledError:
            if handed_over:
                self._given_up.append(ref(batch))  # `_has_given_up` drops those that are answered
                self._tried_by = leased
                if self.dissolved or self.topic.gone is not None:
                    self._void_given_up()
                    producers.retire(leased)  # it would retry the batch for ever
            raise
        except Exception:
            producers.retire(leased)  # its sequence may have a gap
            raise
        finally:
            producers.release(leased)
        self._split_failures = 0
        if stored is not None:
            self._settle(batch, Outcome.STORED, stored.offset, "")
        elif self._is_in_flight(batch):  # voided after it got a sequence number: the sequence has a gap
            producers.retire(leased)
            self.in_flight[0] = batch.rebuild()
        return None

    def _is_in_flight(self, batch: WrittenBatch) -> bool:
        """Whether the batch is still the one in flight, and not withdrawn."""
        return bool(self.in_flight) and self.in_flight[0] is batch

    def _is_late(self) -> bool:
        """Whether the next batch has waited for as long as it may."""
        batch = self.next_batch()
        return batch.count > 0 and batch.born + self.context.config.delivery_timeout_s <= self.context.clock()

    def _move_timeout(self, at: float | None) -> None:
        """Move the timeout of the batch in flight, unless it is over already; None suspends it."""
        if self._timeout is not None:
            with contextlib.suppress(RuntimeError):
                self._timeout.reschedule(at)

    def withdraw(self, owners: Set[int]) -> None:
        """Settle these owners' (by id) unsent records as BUSY, and do not resend those that were sent."""
        if self.open.has_records_of(owners):
            self.seal_open()
        self.in_flight = self._without(self.in_flight, owners)
        self.full = self._without(self.full, owners)

    def _without(self, batches: Iterable[Batch], owners: Set[int]) -> deque[Batch]:
        left: deque[Batch] = deque()
        for batch in batches:
            if not batch.has_records_of(owners):
                left.append(batch)
            elif batch.numbered:
                batch.do_not_resend(owners)
                left.append(batch)
            else:
                left.extend(self._take_out(batch, owners))
        return left

    def _take_out(self, batch: Batch, owners: Set[int]) -> Sequence[Batch]:
        """Settle these owners' records as BUSY; return the others in a new batch, if there are any."""
        rest = batch.without(owners)
        self.context.settle(batch, self.topic.name, Result(Outcome.BUSY, reason=WITHDRAWN), -1)
        return () if rest is None else (rest,)

    def _void_given_up(self) -> None:
        """Void given-up batches that a former producer holds, so that it cannot store them after later ones."""
        for given_up in self._given_up:
            batch = given_up()
            if batch is not None:
                batch.void()
        self._given_up, self._tried_by = [], None

    def _failed(self, batch: Batch, handed_over: bool, error: errors.KafkaError) -> Verdict | None:
        """Apply the remedy as far as possible without waiting. Returns the verdict when the batch must be resent."""
        judged = verdict(error)
        log.warning(
            "a batch was not stored",
            topic=self.topic.name,
            partition=self.number,
            records=batch.count,
            error=name_of(error),
            remedy=judged.remedy.value,
        )
        if judged.remedy is Remedy.GIVE_UP:
            self.context.topics.refuse(self.topic.name, judged.outcome, name_of(error))
        if judged.remedy is Remedy.SPLIT and judged.outcome is Outcome.BROKEN:
            self._split_failures += 1
            if self._split_failures > SPLIT_FAILURES_MOST:
                while self.in_flight:
                    self._settle(self.in_flight[0], judged.outcome, -1, name_of(error))
                return None
        if judged.remedy is Remedy.GIVE_UP or (judged.remedy is Remedy.SPLIT and batch.count == 1):
            self._settle(batch, judged.outcome, -1, name_of(error))
            return None
        if judged.remedy is Remedy.SPLIT:
            self.in_flight.popleft()
            self.in_flight.extendleft(reversed(batch.halves()))
            return None
        if handed_over:
            self.in_flight[0] = batch.rebuild()
        return judged

    def _settle(self, batch: Batch, outcome: Outcome, base: int, reason: str) -> None:
        self.in_flight.popleft()
        partition = self.number if outcome is Outcome.STORED else -1
        result = Result(outcome=outcome, partition=partition, reason=reason, crowded=len(self.full) >= CROWD)
        self.context.settle(batch, self.topic.name, result, base)

    def expire_in_flight(self) -> None:
        """End the wait for the batch in flight: the topic is gone, and aiokafka would retry for ever."""
        if self._leased is not None:
            self._leased.requests.leave_alone(self)
        elif self.in_flight:
            self._move_timeout(self.context.clock())

    def dissolve(self) -> list[Batch]:
        """Remove and return all batches, in order: the partition no longer exists."""
        self.shut = self.dissolved = True
        leased = self._end()
        if leased is not None and self.in_flight:
            self.in_flight[0].void()
            self.context.producers.retire(leased)  # it would retry the batch for ever
        self.seal_open()
        waiting = [*self.in_flight, *self.full]
        self.in_flight.clear()
        self.full.clear()
        return waiting

    async def abandon(self) -> None:
        """Settle all batches as BUSY now, at shutdown."""
        task = self._task
        self._end()
        if task is not None:
            await asyncio.wait({task})
        self.seal_open()
        self.in_flight.extend(self.full)
        self.full.clear()
        while self.in_flight:
            self._settle(self.in_flight[0], Outcome.BUSY, -1, "shutting down")

    def _end(self) -> PublishingProducer | None:
        """Expect no answer any more. Return the producer that has the batch in flight, unless the task knows it."""
        leased, self._leased = self._leased, None
        act = self._step(Step.END)
        if act is Act.FORGET and leased is not None:
            leased.requests.forget(self)
            return leased
        if act is Act.CANCEL and self._task is not None:
            self._task.cancel()
            if self._handed is not None:  # before the task's first step
                (leased, _), self._handed = self._handed, None
                self.context.producers.release(leased)
                return leased
        return None

    def _has_given_up(self) -> bool:
        """Whether aiokafka still retries a batch that was given up here; later ones must not overtake it."""
        if self._given_up:
            self._given_up = [batch for batch in self._given_up if batch() is not None]
        return bool(self._given_up)
