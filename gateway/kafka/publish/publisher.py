"""Publish records to Kafka: submitted without waiting, settled in batches, acknowledged only when stored.

`submit` appends to the open batch of the record's partition and returns. At the end of the event-loop turn the
partition queues start sending. When Kafka has answered, `Owner.settle` is called once per owner and batch. There is no
future, task or log line per record.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from flowcontrol.gate import Gate
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.cluster.topics import REACHABLE_S, Topics
from gateway.kafka.contracts import Owner, Refused, Result
from gateway.kafka.publish.batch import Batch
from gateway.kafka.publish.budgets import Budgets
from gateway.kafka.publish.held_records import HeldRecords
from gateway.kafka.publish.partition_queue import PartitionQueue, WriterContext
from gateway.kafka.publish.partitioner import Accepted, by_partition, partition_of
from gateway.kafka.publish.producers import Producers
from gateway.kafka.publish.sender_partitions import RememberedSender
from gateway.kafka.publish.settlement import Settlement, SettlementStatistics
from gateway.kafka.publish.topic_writer import TopicWriter
from gateway.runtime.failures import failures
from gateway.runtime.fence import Fence
from gateway.runtime.spawn import Spawn
from gateway.settings.config import BudgetConfig, KafkaConfig
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX, LARGEST_TIMESTAMP, OWN_HEADERS, Record
from mapping.tenants import NO_TENANTS, Tenancy


class Publisher:
    """Publishes records to Kafka."""

    def __init__(
        self,
        config: KafkaConfig,  # with `bootstrap_servers` set
        limits: BudgetConfig,
        topics: Topics,  # started and stopped by the caller
        *,
        spawn: Spawn,  # starts background tasks in the app's task group
        clock: Callable[[], float],  # monotonic seconds; the loop's
        wall_clock: Callable[[], int],  # milliseconds since the epoch
        rng: random.Random,  # breaks ties between partitions
        max_headers: int = 1000,  # of a client's record
        tenancy: Tenancy = NO_TENANTS,  # finds a topic's tenant
    ) -> None:
        # submitted and unsettled bytes and records, of the process, of topics and of connections
        self.budgets = Budgets(limits, tenancy)
        self.budget = self.budgets.process
        # when it shuts, stop reading from clients and granting credit
        self.gate: Gate = self.budget.gate
        self._topics = topics
        self._spawn = spawn
        self._clock = clock
        self._wall_clock = wall_clock
        self.most_headers = max_headers + OWN_HEADERS  # of any record
        self._many_headers = f"more than {max_headers} headers"
        # called for each stored batch with its topic, partition and the offset after its last record
        self.stored: Callable[[str, int, int], None] = _ignore_stored
        self.fence = Fence(clock)
        self._withdrawn: list[Owner] = []
        self._producers = Producers(config, spawn, self._check_partitions, self.fence)
        self._context = WriterContext(
            config, self._producers, topics, spawn=spawn, clock=clock, rng=rng, settle=self._settle,
            replace=self._replace, fence=self.fence,
        )  # fmt: skip
        self._writers: dict[str, TopicWriter] = {}
        self._internal: dict[str, TopicWriter] = {}  # of the gateway's own topics, unreachable for clients' records
        self._held = HeldRecords(
            self.budgets, submit=self._submit_again, refuse=self._refuse, look_up=self._look_up, spawn=spawn,
            timeout_s=config.delivery_timeout_s,
        )  # fmt: skip
        self._confirming: set[str] = set()
        self._stamp = 0  # wall clock at this turn's first submit; 0 before it
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
        sender: RememberedSender | None = None,
        *,
        internal: bool = False,
    ) -> None:
        """Submit `record`; its outcome is passed to `owner.settle` later, never from inside this call.

        Never waits, and never raises because of the record. `owner` None means that no caller needs the outcome. An
        owner may have an attribute `budget`, a `flowcontrol.budget.ConnectionBudget` that counts its records in flight
        (see `Budgets.connection`), and an attribute `principal`, for whom topics created for its records are counted.

        A `sender`'s records without a key keep their order; None means that their order does not matter.

        `internal` is for the gateway's own records in its own topics; without it such a topic is DENIED.
        """
        writer = self._writers.get(record.topic)
        if writer is None and internal:
            writer = self._internal.get(record.topic)
        if writer is None:
            self._hold(record, owner, token, sender, internal=internal)
            return
        stamp = self._stamp or self._begin_turn()
        pinned = record.partition
        if (
            pinned is not None
            and pinned >= len(writer.queues)
            and (self._held.waits_for(record.topic) or self._topics.may_have_grown(record.topic))
        ):
            self._held.hold(record, owner, token, sender)
            return
        try:
            queue, timestamp = self._choose(writer, record, sender, stamp)
        except Refused as refused:
            self._refuse(owner, token, refused.outcome, refused.reason)
            return
        key = record.key
        batch = queue.open
        try:
            size = batch.write(timestamp, key, record.value, record.headers)
            if not size:
                batch = queue.seal_open()
                size = batch.write(timestamp, key, record.value, record.headers)
        except (UnicodeEncodeError, OverflowError) as error:
            self._refuse(owner, token, Outcome.UNFIT, f"it does not fit into a Kafka record: {error}")
            return
        if batch.count == 0:
            if size > writer.largest:
                queue.seal_open()  # drops the batch with the record, which is too large for any batch
                self._refuse(
                    owner, token, Outcome.TOO_LARGE, f"topic {writer.name} accepts at most {writer.largest} bytes"
                )
                return
            batch.born = self._now
        if owner is not batch.owner:
            batch.switch_owner(owner)
        batch.add_token(token)
        if pinned is not None:
            batch.pinned.append(batch.count)
        batch.count += 1
        batch.bytes = size = batch.bytes + size
        if size >= batch.account_at:
            batch.account()
        if not queue.touched:
            queue.touched = True
            self._touched.append(queue)

    def submit_run(
        self,
        records: list[Record],
        owner: Owner | None,  # of all records
        tokens: list[Any],  # parallel to `records`
        sender: RememberedSender | None = None,  # of all records
    ) -> None:
        """Submit several records; those of one partition keep their order."""
        position, count = 0, len(records)
        if count == 1:  # a quiet client's: sorting one record by partitions would cost as much as submitting it
            self.submit(records[0], owner, tokens[0], sender)
            return
        stamp = self._stamp or self._begin_turn()
        while position < count:
            topic = records[position].topic
            writer = self._writers.get(topic)
            if writer is not None:
                info = writer.info
                remembered = None if sender is None or info.needs_key else sender.queues.get(topic)
                keyless = -1 if remembered is None or remembered.shut else remembered.number
                oldest, latest = info.timestamps(stamp)
                accepted = Accepted(
                    len(writer.queues), keyless, oldest, min(latest, LARGEST_TIMESTAMP), self.most_headers
                )
                position, parts = by_partition(records, tokens, position, accepted)
                for number, (part, part_tokens) in parts.items():
                    self._submit_part(writer.queues[number], part, owner, part_tokens, sender)
            if position < count and (writer is None or records[position].topic == topic):
                self.submit(records[position], owner, tokens[position], sender)
                position += 1

    def _submit_part(
        self,
        queue: PartitionQueue,
        records: list[Record],
        owner: Owner | None,
        tokens: list[Any],
        sender: RememberedSender | None,
    ) -> None:
        """Submit records of one partition: in runs to its open batch, by `submit` those that are no simple case."""
        position, count = 0, len(records)
        while position < count:
            batch = queue.open
            if batch.count:
                if owner is not batch.owner:
                    batch.switch_owner(owner)
                taken = batch.add_records(self._stamp, records, tokens, position)
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
        """Start the queues that got records in this turn, and settle refused records."""
        self._stamp = 0
        touched, self._touched = self._touched, []
        for queue in touched:
            try:
                queue.start()
            except Exception as error:  # a bug in one partition must not stop the others
                failures.report("partition", error, f"{queue.topic.name}-{queue.number}")
        self._producers.flush()
        refusals, self._refusals = self._refusals, {}
        for (_, outcome, reason), (owner, tokens) in refusals.items():
            self._settlement.refuse(owner, tokens, Result(outcome=outcome, reason=reason))
        self._check_drained()

    def _refuse(self, owner: Owner | None, token: Any, outcome: Outcome, reason: str) -> None:
        """Settle a record without Kafka, at the end of the turn."""
        if not self._stamp:
            self._begin_turn()
        key = (id(owner), outcome, reason)
        refusal = self._refusals.get(key)
        if refusal is None:
            self._refusals[key] = (owner, [token])
        else:
            refusal[1].append(token)

    def withdraw(self, owner: Owner) -> None:
        """Withdraw an owner's records while the fence is shut: when it opens, those not sent to Kafka are BUSY.

        Includes records of owners whose attribute `owner` is this one.
        """
        if not self.fence.is_open:
            self._withdrawn.append(owner)
            self.fence.call_when_open(self._withdraw)

    def _withdraw(self) -> None:
        withdrawn, self._withdrawn = {id(owner) for owner in self._withdrawn}, []
        self._held.withdraw(withdrawn)
        for writer in self._writers.values():
            for queue in writer.queues:
                queue.withdraw(withdrawn)

    # Unknown topics

    def place(self, info: TopicInfo, record: Record, sender: RememberedSender) -> tuple[int, int, int]:
        """Return what `submit` would choose for a record of a known topic: its partition and its timestamp.

        The third number is the largest size of a record there, in bytes.

        Raises:
            Refused: UNKNOWN_TOPIC when the record names a partition that does not exist; DENIED when clients must not
                write the topic; UNFIT when the topic does not accept the record; MANY_HEADERS.
        """
        if self._topics.is_own(info.name):
            raise Refused(Outcome.DENIED, _not_for_clients(info.name))
        writer = self._writers.get(info.name)
        if writer is None:
            self._open(info)
            writer = self._writers[info.name]
        queue, timestamp = self._choose(writer, record, sender, self._wall_clock())
        return queue.number, timestamp, writer.largest

    def _choose(
        self, writer: TopicWriter, record: Record, sender: RememberedSender | None, now_ms: int
    ) -> tuple[PartitionQueue, int]:
        """Return a record's partition and timestamp. `Accepted` tells the same for runs to `by_partition`.

        Raises:
            Refused: UNKNOWN_TOPIC when it names a partition that does not exist; UNFIT when the topic does not accept
                it; MANY_HEADERS.
        """
        key, pinned = record.key, record.partition
        if pinned is not None:
            if not 0 <= pinned < len(writer.queues):
                raise Refused(Outcome.UNKNOWN_TOPIC, f"topic {writer.name} has no partition {pinned}")
            queue = writer.queues[pinned]
        elif key is not None:
            queue = writer.queues[partition_of(key, len(writer.queues))]
        else:
            remembered = None if sender is None else sender.queues.get(record.topic)
            queue = writer.place(sender) if remembered is None or remembered.shut else remembered
        if key is None and writer.info.needs_key:
            raise Refused(Outcome.UNFIT, f"topic {writer.name} is compacted: a key is needed")
        if len(record.headers) > self.most_headers:
            raise Refused(Outcome.MANY_HEADERS, self._many_headers)
        timestamp = record.timestamp
        if timestamp is None:
            return queue, now_ms
        oldest, latest = writer.info.timestamps(now_ms)
        if not oldest <= timestamp <= latest:
            raise Refused(Outcome.UNFIT, f"topic {writer.name} refuses the timestamp {timestamp}")
        return queue, timestamp

    def _hold(
        self, record: Record, owner: Owner | None, token: Any, sender: RememberedSender | None, *, internal: bool
    ) -> None:
        """Submit `record` once its topic is known."""
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

    def _submit_again(self, record: Record, owner: Owner | None, token: Any, sender: RememberedSender | None) -> None:
        """Submit a record that `submit` has accepted before, so it may be `internal`."""
        self.submit(record, owner, token, sender, internal=self._topics.is_own(record.topic))

    async def _look_up(self, name: str, principal: str | None) -> TopicInfo:
        """Look up a topic for held records. Not bounded: they wait for a silent Kafka like any submitted record.

        If it is known, they name partitions that it lacks.
        """
        writer = self._writers_like(name).get(name)
        if writer is not None:
            info = await self._topics.with_partition(writer.info, writer.info.partitions)
            self._held.release(name)
            return info
        info = await self.topic(name, internal=self._topics.is_own(name), principal=principal, bounded=False)
        if (refused := self.unsafe(info)) is not None:
            raise refused.bare()
        return info

    async def topic(
        self,
        name: str,
        *,
        internal: bool = False,
        principal: str | None = None,
        bounded: bool = True,
        partition: int | None = None,
    ) -> TopicInfo:
        """Return the topic's `TopicInfo` like `Topics.get`, and open its writer if it may be written to.

        `partition`: one that a client names; see `Topics.with_partition`.

        Raises:
            Refused: UNKNOWN_TOPIC, DENIED, FULL or BUSY as `Topics.get`; UNSAFE for one of the gateway's own topics.
                An unsafe topic of clients can still be read, so only records for it are refused.
        """
        info = await self._topics.get(name, internal=internal, principal=principal, bounded=bounded)
        if name not in self._writers_like(name):
            refused = self.unsafe(info)
            if refused is None:
                self._open(info)
            elif internal:
                raise refused.bare()
        return info if partition is None else await self._topics.with_partition(info, partition)

    def unsafe(self, info: TopicInfo) -> Refused | None:
        """Return why a topic must not be written to, or None: too few brokers would have an acknowledged record."""
        return self._topics.safety.check(info)

    def is_open(self, name: str) -> bool:
        """Whether records for a topic of clients go to its partitions at once."""
        return name in self._writers

    def known_topic(self, name: str) -> TopicInfo | None:
        """Return the cached `TopicInfo` of a topic that clients may write, or None."""
        return None if self._topics.is_own(name) else self._topics.known(name)

    def _open(self, info: TopicInfo) -> None:
        """Create the topic's writer and submit the held records, before any later record can overtake them."""
        name = info.name
        self._writers_like(name)[name] = TopicWriter(info, self._context, self.budgets.keep(name))
        self._held.release(name)

    def _writers_like(self, name: str) -> dict[str, TopicWriter]:
        """Return the dictionary that holds the writer of `name`."""
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
        """Recheck topics of which new producer metadata lack a partition with batches in flight.

        The producer would retry those batches for ever.
        """
        for name, writer in (*self._writers.items(), *self._internal.items()):
            there = len(cluster.partitions_for_topic(name) or ())
            if any(queue.in_flight for queue in writer.queues[there:]):
                self.recheck(name)

    def recheck(self, name: str) -> None:
        """Ask Kafka in the background whether a topic has changed."""
        if name not in self._confirming:
            self._confirming.add(name)
            self._spawn(self._confirm(name))

    async def _confirm(self, name: str) -> None:
        try:
            await self._topics.confirm(name)
        finally:
            self._confirming.remove(name)

    def _replace(self, topic: str, number: int, batches: Sequence[Batch]) -> None:
        """Submit the batches of a partition that no longer exists again, in order and ahead of later records.

        Records with a key go by their key, those without stay together in the partition that their senders move to,
        and those that named the partition are refused.
        """
        sender = RememberedSender()
        sender.assign(topic, self._writers_like(topic)[topic].successor(number))
        for batch in batches:
            for record, owner, token in batch.unpack(topic, number):
                self._submit_again(record, owner, token, sender)
            batch.release()  # after submitting again, so that the gate does not flap

    def _topic_gone(self, name: str, outcome: Outcome) -> None:
        """Fail all records in the topic's queues. The next record looks the topic up again."""
        writer = self._writers_like(name).pop(name, None)
        if writer is not None:
            # The gateway's own topics are re-created immediately, so their records may be sent again.
            writer.fail(Outcome.BUSY if self._topics.is_own(name) else outcome)
            self.budgets.drop(name)
        self._settlement.forget(name)

    # Transactions

    def reserve(self, size: int) -> None:
        """Count a record that goes to Kafka in a transaction, not through this publisher."""
        self.budget.take(size)

    def free(self, size: int, records: int) -> None:
        """Count records of transactions as settled."""
        self.budget.give(size, records)
        self._check_drained()

    # Settling

    def _settle(self, batch: Batch, topic: str, result: Result, base: int) -> None:
        """Settle a batch: call its owners, count it, release its budgets."""
        if result.outcome is Outcome.STORED and base >= 0:
            failures.guard("live reader", self.stored, topic, result.partition, base + batch.count)
        self._settlement.settle(batch, topic, result, base, self._clock())
        self.budgets.forget(topic)
        self._check_drained()

    # Lifecycle

    async def start(self) -> bool:
        """Connect. False (logged) when Kafka does not answer yet; retries go on in the background."""
        return await self._topics.start()

    def _outstanding(self) -> int:
        return self.budget.records + len(self._refusals)

    def _check_drained(self) -> None:
        if self._drained is not None and not self._outstanding():
            self._drained.set()

    async def drain(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until all records are settled; settle the rest as BUSY.

        No more records may be submitted. Returns whether all were settled in time.
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
        """Close the producers. Call `drain` first."""
        await self._producers.stop()

    @property
    def reachable(self) -> bool:
        """Whether Kafka has answered anything recently."""
        return self._topics.reachable or self._clock() - self._settlement.answered < REACHABLE_S

    @property
    def answered(self) -> float:
        """When Kafka stored the last batch (monotonic seconds)."""
        return self._settlement.answered

    def statistics(self) -> SettlementStatistics:
        """Return the current statistics."""
        in_flight = (self.budget.records, self.budget.bytes)
        return self._settlement.statistics(in_flight, self._producers.started, self._producers.waits)


def _ignore_stored(_topic: str, _partition: int, _end: int) -> None:
    """The default of `Publisher.stored`: do nothing."""


def _not_for_clients(name: str) -> str:
    if name.startswith(INTERNAL_TOPIC_PREFIX):
        return "topics that begin with __ are internal"
    return f"only the gateway writes to {name}"
