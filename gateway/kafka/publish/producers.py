"""The idempotent producer, replaced when its sequence has a gap.

An idempotent producer numbers its batches per partition. A batch that fails for good leaves a gap, and the broker
refuses everything after a gap. Then a new producer, with a new id and new sequences, takes over. A partition has only
one batch in flight, so each moves to the new producer with its next batch; batches in flight finish where they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaProducer, TopicPartition, errors
from aiokafka.structs import RecordMetadata

from gateway.kafka.driver.lifecycle import start_client, started
from gateway.kafka.driver.produce.kafka_producer import force_close, new_producer, queue_batch
from gateway.kafka.driver.produce.request_pace import ADAPTIVE_S
from gateway.kafka.driver.produce.turn_requests import TurnRequests
from gateway.kafka.publish.batch import Batch
from gateway.runtime.failures import failures
from gateway.runtime.fence import Fence
from gateway.runtime.spawn import Spawn
from gateway.settings.config import KafkaConfig

METADATA_POLL_S: Final = 0.1
METADATA_POLLS: Final = 10


class LeasedProducer:
    """A producer with the number of its users."""

    __slots__ = ("_producer", "users")

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer
        self.users = 0  # its requests in flight, and batches that a task waits for

    def use(self) -> None:
        """Note one more user; each must be released."""
        self.users += 1

    async def hand_over(self, batch: Batch, topic: str, partition: int) -> asyncio.Future[RecordMetadata]:
        """Hand the batch to aiokafka; the returned future is done when every in-sync replica has it.

        At most one call per partition may be waiting here.

        Raises:
            KafkaError: the batch was not handed over.
        """
        # A new partition may not be in the producer's metadata yet, and a re-created topic may have fewer partitions,
        # which `Topics.confirm` finds out. One without a leader now (-1) is known.
        place = TopicPartition(topic, partition)
        if self._producer.client.cluster.leader_for_partition(place) is None:
            for _ in range(METADATA_POLLS):
                if partition in await self._producer.partitions_for(topic):
                    break
                await self._producer.client.force_metadata_update()
                await asyncio.sleep(METADATA_POLL_S)
            else:
                raise errors.UnknownTopicOrPartitionError(f"{topic}-{partition}")
        return await queue_batch(self._producer, batch, place)

    async def force_close(self, spawn: Spawn) -> None:
        """Close without waiting for batches; whether those in flight are stored stays unknown."""
        await force_close(self._producer, spawn)


class PublishingProducer(LeasedProducer):
    """The idempotent producer, with the requests of a turn."""

    __slots__ = ("requests",)

    def __init__(
        self, producer: AIOKafkaProducer, config: KafkaConfig, release: Callable[[PublishingProducer], None]
    ) -> None:
        """`release` is called for each request that has ended."""
        super().__init__(producer)
        longest_wait_s = ADAPTIVE_S if config.linger_ms is None else config.linger_ms / 1000
        self.requests = TurnRequests(
            producer, patience_s=config.delivery_timeout_s, longest_wait_s=longest_wait_s, begun=self.use,
            ended=partial(release, self),
        )  # fmt: skip


class Producers(msgspec.Struct, eq=False):
    """The current producer, and retired ones that still have batches in flight."""

    _config: KafkaConfig
    _spawn: Spawn
    _on_metadata: Callable[[Any], None]  # called with aiokafka's metadata after each update
    _fence: Fence  # while it is shut nothing is sent
    started: int = 0
    current: PublishingProducer | None = None
    _starting: asyncio.Task[None] | None = None
    _former_waits: int = 0  # of retired producers' requests
    _retired: dict[PublishingProducer, asyncio.Task[None] | None] = {}  # with the task that closes it, if any

    async def acquire(self) -> PublishingProducer:
        """Return the current producer, starting one if needed. Pair with `release`.

        Waits as long as Kafka does not answer, so call it with a timeout.
        """
        while (current := self.current) is None:
            if self._starting is None:
                self._starting = self._spawn(self._start())
            await asyncio.shield(self._starting)
        current.use()
        return current

    @property
    def waits(self) -> int:
        """How often a request has waited for more records."""
        return self._former_waits + (0 if self.current is None else self.current.requests.waits)

    def flush(self) -> None:
        """Send what the partition queues have offered in this turn."""
        if self.current is not None:
            failures.guard("producer", self.current.requests.flush)

    def release(self, leased: PublishingProducer) -> None:
        """Release a producer whose batch is answered or given up."""
        leased.users -= 1
        if leased.users == 0 and self._retired.get(leased, 0) is None:  # retired, and not being closed
            self._retired[leased] = self._spawn(self._close(leased))

    def retire(self, leased: PublishingProducer) -> None:
        """Retire a producer whose sequence has a gap, unless it is; the next `acquire` starts another."""
        if self.current is leased:
            self.current = None
            self._retired[leased] = None
            self._former_waits += leased.requests.waits
            leased.requests.leave_all_alone()
            if leased.users == 0:
                self._retired[leased] = self._spawn(self._close(leased))

    async def _close(self, leased: PublishingProducer) -> None:
        # By force: batches that aiokafka still has were given up, and could be stored after later ones in a re-created
        # topic.
        try:
            await leased.force_close(self._spawn)
        except Exception as error:  # no batch in use is affected
            failures.report("producer", error, "retired")
        self._retired.pop(leased, None)

    async def _start(self) -> None:
        try:
            producer = await started(
                lambda: new_producer(self._config, "publisher", self._fence, enable_idempotence=True),
                lambda producer: start_client(producer.start, producer.stop, self._spawn),
                "producer",
            )
            self.current = leased = PublishingProducer(producer, self._config, self.release)
            for listener in (self._on_metadata, lambda _: leased.requests.metadata_updated()):
                producer.client.cluster.add_listener(partial(failures.guard, "metadata", listener))
            self.started += 1
        finally:
            self._starting = None

    async def stop(self) -> None:
        """Close all producers by force. Drain first: whether batches in flight are stored stays unknown."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        closing = {task for task in self._retired.values() if task is not None}
        if closing:
            await asyncio.wait(closing)
        every = list(self._retired)
        if self.current is not None:
            every.append(self.current)
        self.current = None
        self._retired.clear()
        for leased in every:
            await leased.force_close(self._spawn)
