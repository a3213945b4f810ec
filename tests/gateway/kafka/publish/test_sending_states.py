"""A partition queue goes through every cell of its table, never leaves it, and settles each record once.

Kafka's part is played here: which answers come, and when. `test_publisher_faults.py` has the same with real brokers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from aiokafka import errors
from aiokafka.structs import RecordMetadata
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowcontrol.budget import Budget
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish import partition_queue
from gateway.kafka.publish.batch import Batch
from gateway.kafka.publish.partition_queue import PartitionQueue, QueuedTopic, WriterContext
from gateway.kafka.publish.sending_states import TABLE, Act, Sending, Step
from gateway.runtime.fence import Fence
from gateway.settings.config import KafkaConfig
from mapping.outcomes import Outcome

Answer = asyncio.Future[RecordMetadata | None]
FAILURES = (errors.NotLeaderForPartitionError, errors.ProducerClosed, errors.MessageSizeTooLargeError)


class Requests:
    """The requests of a turn, and aiokafka's queues: what the queue has given to them, and who waits for an answer."""

    def __init__(self) -> None:
        self.takes = True  # whether queues may wait here
        self.waiting: list[PartitionQueue] = []
        self.sent: list[tuple[PartitionQueue, Batch]] = []
        self.answers: list[tuple[Batch, Answer]] = []  # awaited by a task

    def offer(self, queue: PartitionQueue) -> bool:
        if self.takes:
            self.waiting.append(queue)
        return self.takes

    def forget(self, queue: PartitionQueue) -> None:
        self.waiting = [other for other in self.waiting if other is not queue]

    def leave_alone(self, queue: PartitionQueue) -> None:
        if self.waiting:
            self.forget(queue)
            queue.go_alone()
        else:
            self.pass_on()

    def pass_on(self) -> None:
        sent, self.sent = self.sent, []
        for queue, batch in sent:
            answer: Answer = asyncio.get_running_loop().create_future()
            answer.add_done_callback(lambda done: done.exception())
            self.answers.append((batch, answer))
            queue.go_alone(batch, answer)

    def flush(self) -> None: ...


class Producers:
    """The producers: one at a time, and how many use it."""

    def __init__(self) -> None:
        self.requests = Requests()
        self.users = 0
        self.retired = 0
        self.current: Producers | None = self

    def use(self) -> None:
        self.users += 1

    async def acquire(self) -> Producers:
        self.use()
        return self

    def release(self, _leased: Producers) -> None:
        self.users -= 1

    def retire(self, _leased: Producers) -> None:
        self.retired += 1

    def flush(self) -> None: ...

    async def hand_over(self, batch: Batch, _topic: str, _partition: int) -> Answer:
        batch._set_producer_state(1, 0, 0)
        answer: Answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.exception())
        self.requests.answers.append((batch, answer))
        return answer


class Topics:
    def refuse(self, *_facts: Any) -> None: ...

    async def confirm(self, _name: str) -> None: ...


class Fates(Owner):
    """What became of each token."""

    def __init__(self) -> None:
        self.fates: dict[int, Outcome] = {}
        self.doubled: list[int] = []
        self.stored: list[int] = []  # in the order of the results

    def settle(self, tokens: Sequence[int], _offsets: Sequence[int], result: Result) -> None:
        for token in tokens:
            if token in self.fates:
                self.doubled.append(token)
            self.fates[token] = result.outcome
        if result.outcome is Outcome.STORED:
            self.stored += tokens


class Walk(RuleBasedStateMachine):
    """Everything that can happen to a partition queue, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(partition_queue, "RESEND_S", 0.0)
        self.patch.setattr(partition_queue, "RESEND_MOST_S", 0.0)
        self.producers = Producers()
        self.requests = self.producers.requests
        self.fence = Fence(self.loop.time)
        self.owner = Fates()
        self.count = 0
        self.offset = 0
        context = WriterContext(
            KafkaConfig(bootstrap_servers="localhost:1", batch_bytes=1024), self.producers, Topics(),  # type: ignore[arg-type]
            spawn=self.loop.create_task, clock=self.loop.time, rng=random.Random(1), settle=self._settle,
            replace=lambda *_: None, fence=self.fence,
        )  # fmt: skip
        self.topic = QueuedTopic(TopicInfo("t", 1), context, Budget(1 << 30, 1 << 30))
        self.queue = PartitionQueue(self.topic, 0)

    def _settle(self, batch: Batch, _topic: str, result: Result, base: int) -> None:
        for share in batch.shares.values():
            offsets = share.offsets(base) if result.outcome is Outcome.STORED else ()
            assert share.owner is not None
            share.owner.settle(share.tokens, offsets, result)
        batch.release()

    def _turn(self, act: Any, *arguments: Any) -> Any:
        """Call `act` in the loop, and run what it has scheduled."""

        async def run() -> Any:
            found = act(*arguments)
            for _ in range(12):
                await asyncio.sleep(0)
            return found

        return self.loop.run_until_complete(run())

    def _may_act(self) -> bool:
        return self.queue.sending is not Sending.OVER

    @precondition(_may_act)
    @rule(records=st.integers(1, 25))
    def submit(self, records: int) -> None:
        def submit() -> None:
            queue = self.queue
            for _ in range(records):
                size = queue.open.write(1, b"k", b"v" * 40, ())
                if not size:
                    queue.seal_open()
                    size = queue.open.write(1, b"k", b"v" * 40, ())
                batch = queue.open
                if batch.owner is not self.owner:
                    batch.switch_owner(self.owner)
                if not batch.count:
                    batch.born = self.loop.time()
                batch.add_token(self.count)
                batch.count += 1
                batch.bytes += size
                self.count += 1
            queue.start()

        self._turn(submit)

    @rule(takes=st.booleans())
    def connect(self, takes: bool) -> None:
        self.requests.takes = takes

    @rule(current=st.booleans())
    def replace_producer(self, current: bool) -> None:
        self.producers.current = self.producers if current else None

    @rule()
    def write(self) -> None:
        def write() -> None:
            waiting, self.requests.waiting = self.requests.waiting, []
            for queue in waiting:
                batch = queue.take()
                if batch is not None:
                    batch._set_producer_state(1, 0, 0)
                    self.requests.sent.append((queue, batch))

        self._turn(write)

    @rule()
    def answer(self) -> None:
        def answer() -> None:
            sent, self.requests.sent = self.requests.sent, []
            for queue, batch in sent:
                self.offset += batch.count
                queue.stored(batch, self.offset)

        if self.fence.is_open:
            self._turn(answer)
        else:
            self._turn(self.requests.pass_on)

    @rule()
    def pass_on(self) -> None:
        self._turn(self.requests.pass_on)

    @rule(failure=st.sampled_from([None, *FAILURES]))
    def answer_the_task(self, failure: type[errors.KafkaError] | None) -> None:
        def answer() -> None:
            answers, self.requests.answers = self.requests.answers, []
            for batch, future in answers:
                if future.done():
                    continue
                if failure is not None:
                    future.set_exception(failure())
                elif batch.record_count():
                    future.set_result(RecordMetadata("t", 0, None, self.offset, 0, 0, 0))
                    self.offset += batch.count
                else:
                    future.set_result(None)  # void

        self._turn(answer)

    @rule()
    def freeze(self) -> None:
        if self.fence.is_open:
            self.fence._shut()

    @rule()
    def thaw(self) -> None:
        self._turn(self.fence.open)

    @precondition(_may_act)
    @rule()
    def withdraw(self) -> None:
        if not self.fence.is_open:
            self._turn(self.queue.withdraw, {id(self.owner)})

    @precondition(lambda self: self._may_act() and self.count > 120)
    @rule()
    def lose_the_topic(self) -> None:
        def lose() -> None:
            self.topic.gone = Outcome.UNKNOWN_TOPIC
            self.queue.expire_in_flight()

        self._turn(lose)

    @precondition(lambda self: self._may_act() and self.count > 200)
    @rule()
    def dissolve(self) -> None:
        def dissolve() -> None:
            for batch in self.queue.dissolve():
                self._settle(batch, "t", Result(Outcome.BUSY, reason="replaced"), -1)

        self._turn(dissolve)

    @invariant()
    def it_is_where_its_state_says(self) -> None:
        queue, sending = self.queue, self.queue.sending
        assert (queue in self.requests.waiting) == (sending is Sending.OFFERED)
        assert sending is not Sending.SENT or self.requests.sent
        assert (queue._task is not None and not queue._task.done()) == (sending is Sending.ALONE)
        assert sending is not Sending.IDLE or not (queue.full or queue.in_flight or queue.open.count)
        assert not self.owner.doubled
        assert self.owner.stored == sorted(self.owner.stored)

    def teardown(self) -> None:
        self.fence.open()
        self.requests.takes, self.producers.current = True, self.producers
        for _ in range(2 * self.count + 20):
            if len(self.owner.fates) == self.count:
                break
            self.write()
            self.answer()
            self.answer_the_task(None)
        assert len(self.owner.fates) == self.count
        assert self.producers.users == 0
        self.loop.run_until_complete(self.queue.abandon())
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()
        self.patch.undo()


Walk.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestWalk = Walk.TestCase

STEPS: dict[Sending, tuple[str, ...]] = {
    Sending.IDLE: (),
    Sending.OFFERED: ("submit",),
    Sending.SENT: ("submit", "write"),
    Sending.ALONE: ("refuse", "submit"),
    Sending.OVER: ("submit", "end"),
}
"""How a queue comes into a state."""


@pytest.mark.parametrize(("state", "step"), [(state, step) for state, row in TABLE.items() for step in row])
def test_each_cell(state: Sending, step: Step) -> None:
    walk = Walk()
    acts = {
        "submit": lambda: walk.submit(3), "write": walk.write, "refuse": lambda: walk.connect(False),
        "end": walk.dissolve,
        "offer": lambda: walk.submit(1), "store": walk.answer, "leave": walk.pass_on,
        "finish": lambda: walk.answer_the_task(None), "take": walk.write,
    }  # fmt: skip
    for each in STEPS[state]:
        acts[each]()
    assert walk.queue.sending is state
    if step is Step.LEAVE and state is Sending.IDLE:
        walk.connect(False)
        walk.submit(1)
    elif step is Step.LEAVE and state is Sending.OFFERED:
        walk._turn(walk.requests.leave_alone, walk.queue)
    elif step is Step.EMPTY:
        walk.freeze()
        walk._turn(walk.queue.withdraw, {id(walk.owner)})
        walk.fence.open()
        walk.write()
    elif state is Sending.OVER:
        walk.queue._step(step)
    else:
        acts[step.name.lower()]()
    assert walk.queue.sending is TABLE[state][step][1]
    walk.teardown()


def test_a_step_that_a_state_lacks_is_a_bug() -> None:
    walk = Walk()
    with pytest.raises(KeyError):
        walk.queue._step(Step.TAKE)
    walk.teardown()


def test_what_is_done_is_in_the_table() -> None:
    assert {act for row in TABLE.values() for act, _ in row.values()} == set(Act)
