"""Records into Kafka: submitted without waiting, settled in batches, acknowledged only when stored.

`submit` appends to the open batch of the record's partition and returns. At the end of the loop turn the queues
(`writer`) hand over what was submitted in it. When Kafka has answered, the owners learn the fate of their tokens,
once per owner and batch. No future, no task, no log line exists per record.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from flowcontrol.gate import Gate
from gateway.config import BudgetConfig, KafkaConfig
from gateway.failures import failures
from gateway.fence import Fence
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.cluster.topics import REACHABLE_S, Topics
from gateway.kafka.contracts import Owner, Refused, Result
from gateway.kafka.publish.batch import Batch
from gateway.kafka.publish.budgets import Budgets
from gateway.kafka.publish.held_records import HeldRecords
from gateway.kafka.publish.partition_queue import PartitionQueue, WriterContext
from gateway.kafka.publish.partitioner import by_partition, partition_of
from gateway.kafka.publish.producers import Producers
from gateway.kafka.publish.sender_partitions import Sender
from gateway.kafka.publish.settlement import Settlement, Statistics
from gateway.kafka.publish.topic_writer import TopicWriter
from gateway.spawn import Spawn
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX, Record
from mapping.tenants import NO_TENANTS, Tenancy

log = logging.getLogger(__name__)


class Publisher:
    """The way into Kafka."""

    def __init__(
        self,
        config: KafkaConfig,  # with `bootstrap_servers` set
        limits: BudgetConfig,  # the budgets' limits
        topics: Topics,  # started and stopped by the caller
        *,
        spawn: Spawn,  # starts background work in the app's task group
        clock: Callable[[], float],  # monotonic seconds; the loop's
        wall_clock: Callable[[], int],  # milliseconds since the epoch
        rng: random.Random,  # breaks ties where a sender without a name is placed
        tenancy: Tenancy = NO_TENANTS,  # whose the topics are
    ) -> None:
        # bytes and records submitted and not settled, of the process, of topics and of connections
        self.budgets = Budgets(limits, tenancy)
        self.budget = self.budgets.process  # that of the whole process
        # its gate: when it shuts, stop reading from clients and stop granting credit
        self.gate: Gate = self.budget.gate
        self._topics = topics
        self._spawn = spawn
        self._clock = clock
        self._wall_clock = wall_clock
        # told a topic, a partition and the offset after the last record of each batch that was stored
        self.stored: Callable[[str, int, int], None] = _nobody
        self.fence = Fence(clock)
        self._withdrawn: list[Owner] = []
        self._producers = Producers(config, spawn, self._check_partitions, self.fence)
        self._context = WriterContext(
            config, self._producers, topics, spawn=spawn, clock=clock, rng=rng, settle=self._settle,
            replace=self._replace, fence=self.fence,
        )  # fmt: skip
        self._writers: dict[str, TopicWriter] = {}
        self._internal: dict[str, TopicWriter] = {}  # of our own topics: a client's record never finds them
        self._held = HeldRecords(
            self.budgets, submit=self._submit_again, refuse=self._refuse, look_up=self._look_up, spawn=spawn,
            timeout_s=config.delivery_timeout_s,
        )  # fmt: skip
        self._confirming: set[str] = set()
        self._stamp = 0  # wall clock of this loop turn; 0: no turn has begun
        self._now = 0.0
        self._touched: list[PartitionQueue] = []
        self._refusals: dict[tuple[int, Outcome, str], tuple[Owner | None, list[Any]]] = {}
        self._drained: asyncio.Event | None = None
        self._settlement = Settlement()
        topics.updated.append(self._topic_updated)
        topics.gone.append(self._topic_gone)

    # Submitting

    def submit(
        self,
        record: Record,
        owner: Owner | None,
        token: Any = None,
        sender: Sender | None = None,
        *,
        internal: bool = False,
    ) -> None:
        """Take `record`; its fate is told to `owner.settle` later, never from inside this call.

        Never waits and never raises for the record's sake. `owner` None: nobody wants to know. An owner may have
        an attribute `budget`, a `flowcontrol.budget.ConnectionBudget`, which counts what the owner has in flight (see
        `Budgets.connection`); and an attribute `principal`, the name for which topics are counted that are made for
        its records.

        `sender`: records of one without a key keep their order; None for one that is in no order with others.

        `internal`: the record is our own, for one of our own topics. Without this word such a topic is DENIED.
        """
        writer = self._writers.get(record.topic)
        if writer is None and internal:
            writer = self._internal.get(record.topic)
        if writer is None:
            self._hold(record, owner, token, sender, internal=internal)
            return
        stamp = self._stamp or self._begin_turn()
        key = record.key
        pinned = record.partition
        if pinned is not None:
            if not 0 <= pinned < len(writer.queues):
                reason = f"topic {writer.name} has no partition {pinned}"
                self._refuse(owner, token, Outcome.UNKNOWN_TOPIC, reason)
                return
            queue = writer.queues[pinned]
        elif key is not None:
            queue = writer.queues[partition_of(key, len(writer.queues))]
        else:
            place = None if sender is None else sender.queues.get(record.topic)
            queue = writer.place(sender) if place is None or place.shut else place
        if key is None and writer.info.needs_key:
            self._refuse(owner, token, Outcome.UNFIT, f"topic {writer.name} is compacted: a key is needed")
            return
        timestamp = record.timestamp
        if timestamp is None:
            timestamp = stamp
        elif not (timestamp >= 0 and stamp - writer.info.before_ms <= timestamp <= stamp + writer.info.after_ms):
            self._refuse(owner, token, Outcome.UNFIT, f"topic {writer.name} refuses the timestamp {timestamp}")
            return

        batch = queue.open
        try:
            size = batch.write(timestamp, key, record.value, record.headers)
            if not size:
                batch = queue.seal_open()
                size = batch.write(timestamp, key, record.value, record.headers)
        except (UnicodeEncodeError, OverflowError) as error:
            self._refuse(owner, token, Outcome.UNFIT, f"no Kafka record can hold it: {error}")
            return
        if batch.count == 0:
            if size > writer.topic.largest:
                queue.seal_open()  # the batch holds the record, which is too large for any batch
                self._refuse(owner, token, Outcome.TOO_LARGE, f"topic {writer.name} takes {writer.topic.largest} bytes")
                return
            batch.born = self._now
        if owner is not batch.owner:
            batch.switch_owner(owner)
        batch.add_token(token)
        if pinned is not None:
            batch.pinned.append(batch.count)
        batch.count += 1
        batch.bytes = size = batch.bytes + size
        if size >= batch.mark:
            batch.account()
        if not queue.touched:
            queue.touched = True
            self._touched.append(queue)

    def submit_run(
        self,
        records: list[Record],
        owner: Owner | None,  # of all of them
        tokens: list[Any],  # beside `records`
        sender: Sender | None = None,  # of all of them
    ) -> None:
        """Take records as `submit` does each; those of a partition keep their order."""
        position, count = 0, len(records)
        while position < count:
            topic = records[position].topic
            writer = self._writers.get(topic)
            if writer is not None:
                place = None if sender is None or writer.info.needs_key else sender.queues.get(topic)
                keyless = -1 if place is None or place.shut else place.number
                position, parts = by_partition(records, tokens, position, len(writer.queues), keyless)
                for number, (theirs, beside) in parts.items():
                    self._submit_part(writer.queues[number], theirs, owner, beside, sender)
            if position < count and (writer is None or records[position].topic == topic):
                self.submit(records[position], owner, tokens[position], sender)
                position += 1

    def _submit_part(
        self,
        queue: PartitionQueue,
        records: list[Record],
        owner: Owner | None,
        tokens: list[Any],
        sender: Sender | None,
    ) -> None:
        """Take records of one partition: its open batch as many as it can, `submit` those that need a closer look."""
        position, count = 0, len(records)
        while position < count:
            batch = queue.open
            if batch.count:
                if owner is not batch.owner:
                    batch.switch_owner(owner)
                taken = batch.add_records(self._stamp or self._begin_turn(), records, tokens, position)
                if taken and not queue.touched:
                    queue.touched = True
                    self._touched.append(queue)
                position += taken
            if position < count:
                self.submit(records[position], owner, tokens[position], sender)
                position += 1

    def _begin_turn(self) -> int:
        asyncio.get_running_loop().call_soon(self._end_turn)
        self._stamp = self._wall_clock()
        self._now = self._clock()
        return self._stamp

    def _end_turn(self) -> None:
        """Once per loop turn in which something was submitted: hand over, and tell the refused."""
        self._stamp = 0
        touched, self._touched = self._touched, []
        for queue in touched:
            try:
                queue.start()
            except Exception as error:  # our bug, in one partition; the others must be handed over
                failures.tell("partition", error, f"{queue.topic.name}-{queue.number}")
        refusals, self._refusals = self._refusals, {}
        for (_, outcome, reason), (owner, tokens) in refusals.items():
            self._settlement.refuse(owner, tokens, Result(outcome=outcome, reason=reason))
        self._check_drained()

    def _refuse(self, owner: Owner | None, token: Any, outcome: Outcome, reason: str) -> None:
        """Settle without Kafka, at the end of the turn."""
        if not self._stamp:
            self._begin_turn()
        key = (id(owner), outcome, reason)
        refusal = self._refusals.get(key)
        if refusal is None:
            self._refusals[key] = (owner, [token])
        else:
            refusal[1].append(token)

    def withdraw(self, owner: Owner) -> None:
        """While the fence is shut: when it opens, what Kafka was not given of an owner's records is BUSY.

        An owner that stands for another has it as its attribute `owner`.
        """
        if not self.fence.is_open:
            self._withdrawn.append(owner)
            self.fence.then(self._withdraw)

    def _withdraw(self) -> None:
        withdrawn, self._withdrawn = {id(owner) for owner in self._withdrawn}, []
        self._held.withdraw(withdrawn)
        for writer in self._writers.values():
            for queue in writer.queues:
                queue.withdraw(withdrawn)

    # Unknown topics

    def place(self, info: TopicInfo, record: Record, sender: Sender) -> int:
        """The partition into which `submit` would put a record of a known topic.

        Raises:
            Refused: UNKNOWN_TOPIC when it names one that there is not; DENIED when no client may write the topic.
        """
        if self._topics.is_own(info.name):
            raise Refused(Outcome.DENIED, _not_for_clients(info.name))
        writer = self._writers.get(info.name)
        if writer is None:
            self._open(info)
            writer = self._writers[info.name]
        if record.partition is not None:
            if not 0 <= record.partition < len(writer.queues):
                raise Refused(Outcome.UNKNOWN_TOPIC, f"topic {info.name} has no partition {record.partition}")
            return record.partition
        if record.key is not None:
            return partition_of(record.key, len(writer.queues))
        queue = sender.queues.get(info.name)
        return (writer.place(sender) if queue is None or queue.shut else queue).number

    def _hold(self, record: Record, owner: Owner | None, token: Any, sender: Sender | None, *, internal: bool) -> None:
        """Submit `record` when its topic is known."""
        name = record.topic
        if not internal and self._topics.is_own(name):
            self._refuse(owner, token, Outcome.DENIED, _not_for_clients(name))
            return
        info = self._topics.known(name, internal=internal)
        if info is not None:
            if (refused := self.unsafe(info)) is not None:
                self._refuse(owner, token, refused.outcome, refused.reason)
                return
            self._open(info)
            self.submit(record, owner, token, sender, internal=internal)
            return
        self._held.hold(record, owner, token, sender)

    def _submit_again(self, record: Record, owner: Owner | None, token: Any, sender: Sender | None) -> None:
        """As `submit`, for what it has taken before: only our own records are of an internal topic."""
        self.submit(record, owner, token, sender, internal=self._topics.is_own(record.topic))

    async def _look_up(self, name: str, principal: str | None) -> TopicInfo:
        """Unbounded: what waits for the topic is kept for its senders, as what waits for a known one is."""
        info = await self.topic(name, internal=self._topics.is_own(name), principal=principal, bounded=False)
        if (refused := self.unsafe(info)) is not None:
            raise refused
        return info

    async def topic(
        self, name: str, *, internal: bool = False, principal: str | None = None, bounded: bool = True
    ) -> TopicInfo:
        """What is known of `name`, after asking, and creating the topic, where need be.

        Raises:
            Refused: UNKNOWN_TOPIC, DENIED, FULL or BUSY; see `Topics.get`, also for the arguments. UNSAFE: it is one of
                our own, and not safe enough; of a client's topic the record is refused, since it may only be read.
        """
        info = await self._topics.get(name, internal=internal, principal=principal, bounded=bounded)
        if name not in self._writers_like(name):
            refused = self.unsafe(info)
            if refused is None:
                self._open(info)
            elif internal:
                raise refused
        return info

    def unsafe(self, info: TopicInfo) -> Refused | None:
        """Why a topic may not be written to, if so: too few brokers would have what is acknowledged."""
        return self._topics.safety.judge(info)

    def known_topic(self, name: str) -> TopicInfo | None:
        """What is known of a topic that clients may write, without asking."""
        return None if self._topics.is_own(name) else self._topics.known(name)

    def _open(self, info: TopicInfo) -> None:
        """Make the topic's writer, and hand it what was held, before any later record can overtake."""
        name = info.name
        self._writers_like(name)[name] = TopicWriter(info, self._context, self.budgets.keep(name))
        self._held.release(name)

    def _writers_like(self, name: str) -> dict[str, TopicWriter]:
        """Where the writer of `name` is kept."""
        return self._internal if self._topics.is_own(name) else self._writers

    def _topic_updated(self, info: TopicInfo) -> None:
        writer = self._writers_like(info.name).get(info.name)
        if writer is None:
            return
        if (refused := self.unsafe(info)) is None:
            writer.update(info)
        else:
            self._topic_gone(info.name, refused.outcome)

    def _check_partitions(self, cluster: Any) -> None:
        """A producer has new metadata: for a partition that they lack it would try for ever, so ask about its topic."""
        for name, writer in (*self._writers.items(), *self._internal.items()):
            there = len(cluster.partitions_for_topic(name) or ())
            if any(queue.in_flight for queue in writer.queues[there:]):
                self.recheck(name)

    def recheck(self, name: str) -> None:
        """A topic may not be as it was: ask Kafka."""
        if name not in self._confirming:
            self._confirming.add(name)
            self._spawn(self._confirm(name))

    async def _confirm(self, name: str) -> None:
        try:
            await self._topics.confirm(name)
        finally:
            self._confirming.remove(name)

    def _replace(self, topic: str, number: int, batches: Sequence[Batch]) -> None:
        """Place anew what waits for a partition that is no more: in their order, ahead of what comes later.

        Those with a key by their key; those without go on together, where their senders do; who named the partition is
        told that there is none.
        """
        sender = Sender()
        sender.settle_in(topic, self._writers_like(topic)[topic].successor(number))
        for batch in batches:
            for record, owner, token in batch.apart(topic, number):
                self._submit_again(record, owner, token, sender)
            batch.release()  # after taking again, so that the gate does not flap

    def _topic_gone(self, name: str, outcome: Outcome) -> None:
        """Its queues give up what they hold; the next record asks again."""
        writer = self._writers_like(name).pop(name, None)
        if writer is not None:
            # Ours are made again at once, which is no fault of whoever's record has to wait for it.
            writer.vanish(Outcome.BUSY if self._topics.is_own(name) else outcome)
            self.budgets.drop(name)
        self._settlement.forget(name)

    # Transactions

    def reserve(self, size: int) -> None:
        """Count a record that is on its way to Kafka through a transaction and not through here."""
        self.budget.take(size)

    def free(self, size: int, records: int) -> None:
        """Count such records as answered."""
        self.budget.give(size, records)
        self._check_drained()

    # Settling

    def _settle(self, batch: Batch, topic: str, result: Result, base: int) -> None:
        """The end of a batch: tell its owners, give back to the budgets."""
        if result.outcome is Outcome.STORED:
            self._settlement.stored(batch, self._clock())
            if base >= 0:
                self._settlement.placed(topic, result.partition, base, base + batch.count)
                self.stored(topic, result.partition, base + batch.count)
        self._settlement.settle(batch, topic, result, base)
        self.budgets.forget(topic)
        self._check_drained()

    # Life

    async def start(self) -> bool:
        """Connect; False (logged) when Kafka does not answer yet: it is tried on in the background."""
        return await self._topics.start()

    def _outstanding(self) -> int:
        return self.budget.records + len(self._refusals)

    def _check_drained(self) -> None:
        if self._drained is not None and not self._outstanding():
            self._drained.set()

    async def drain(self, timeout: float) -> bool:
        """Wait until nothing is outstanding, at most `timeout` seconds; settle what remains BUSY.

        Submitting must have stopped. True when everything was answered.
        """
        self._drained = asyncio.Event()
        complete = True
        try:
            if self._stamp:
                self._end_turn()
            if self._outstanding():
                async with asyncio.timeout(timeout):
                    await self._drained.wait()
        except TimeoutError:
            complete = False
            self._held.refuse_all(Refused(Outcome.BUSY, "shutting down"))
            for writer in (*self._writers.values(), *self._internal.values()):
                await writer.abandon()
            self._end_turn()
        finally:
            self._drained = None
        return complete

    async def stop(self) -> None:
        """Close the producers; `drain` first."""
        await self._producers.stop()

    @property
    def reachable(self) -> bool:
        """Whether Kafka has answered anything recently."""
        return self._topics.reachable or self._clock() - self._settlement.answered < REACHABLE_S

    @property
    def answered(self) -> float:
        """When Kafka stored the last batch, by the clock."""
        return self._settlement.answered

    def statistics(self) -> Statistics:
        """Counts so far."""
        in_flight = (self.budget.records, self.budget.bytes)
        return self._settlement.statistics(in_flight, self._producers.started)


def _nobody(_topic: str, _partition: int, _end: int) -> None:
    """Nobody is told how far a log reaches."""


def _not_for_clients(name: str) -> str:
    if name.startswith(INTERNAL_TOPIC_PREFIX):
        return "topics that begin with __ are internal"
    return f"only the gateway writes to {name}"
