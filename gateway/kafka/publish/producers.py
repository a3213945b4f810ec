"""The idempotent producer, replaced when it has lost its place in a sequence.

An idempotent producer numbers its batches per partition. A batch that failed for good leaves a gap, and the broker
refuses everything behind a gap. Then a new producer, with a new id and new sequences, takes over: each partition
moves to it with its next batch, since it has only one on the way; those on the way elsewhere finish where they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaProducer, errors
from aiokafka.structs import RecordMetadata

from gateway.config import KafkaConfig
from gateway.failures import failures
from gateway.fence import Fence
from gateway.kafka.driver.kafka_producer import force_close, new_producer
from gateway.kafka.driver.lifecycle import start_client, started
from gateway.kafka.publish.batch import Batch
from gateway.spawn import Spawn

log = logging.getLogger(__name__)


METADATA_POLL_S: Final = 0.1
METADATA_POLLS: Final = 10


class LeasedProducer:
    """One producer and who uses it."""

    __slots__ = ("_producer", "retired", "users")

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer
        self.users = 0  # batches in flight through it
        self.retired = False  # a newer one has taken over; closed when nobody uses it

    async def hand_over(self, batch: Batch, topic: str, partition: int) -> asyncio.Future[RecordMetadata]:
        """Give the batch to aiokafka; the future tells when every in-sync replica has it.

        At most one call per partition may be waiting here.

        Raises:
            KafkaError: the batch was not handed over.
        """
        # aiokafka asserts that the partition exists. A new one may not be in its metadata yet; and one that was there
        # is gone when its topic was made anew with fewer, which `Topics.confirm` finds out.
        if partition not in (self._producer.client.cluster.partitions_for_topic(topic) or ()):
            for _ in range(METADATA_POLLS):
                if partition in await self._producer.partitions_for(topic):
                    break
                await self._producer.client.force_metadata_update()
                await asyncio.sleep(METADATA_POLL_S)
            else:
                raise errors.UnknownTopicOrPartitionError(f"{topic}-{partition}")
        future: asyncio.Future[RecordMetadata] = await self._producer.send_batch(batch, topic, partition=partition)
        return future

    async def force_close(self, spawn: Spawn) -> None:
        """Close at once; what is on the way has an unknown fate."""
        await force_close(self._producer, spawn)


class Producers:
    """The current producer and the retired ones that still have something on the way."""

    def __init__(self, config: KafkaConfig, spawn: Spawn, looked: Callable[[Any], None], fence: Fence) -> None:
        """`looked` is told aiokafka's metadata, each time it has new ones; behind `fence` nothing is sent."""
        self._fence = fence
        self._looked = partial(failures.guard, "metadata", looked)
        self._config = config
        self._spawn = spawn
        self._current: LeasedProducer | None = None
        self._starting: asyncio.Task[None] | None = None
        self._retired: dict[LeasedProducer, asyncio.Task[None] | None] = {}
        self.started = 0

    async def acquire(self) -> LeasedProducer:
        """The current producer, after starting one where need be; pair with `release`.

        Waits for as long as Kafka does not answer: give it a time limit.
        """
        while (current := self._current) is None:
            if self._starting is None:
                self._starting = self._spawn(self._start())
            await asyncio.shield(self._starting)
        current.users += 1
        return current

    def release(self, leased: LeasedProducer) -> None:
        """The batch for which it was acquired is answered, or given up."""
        leased.users -= 1
        self._close_unused(leased)

    def retire(self, leased: LeasedProducer) -> None:
        """Its sequence has a gap: let the next `acquire` start another."""
        if leased.retired:
            return
        leased.retired = True
        self._retired[leased] = None
        if self._current is leased:
            self._current = None

    def _close_unused(self, leased: LeasedProducer) -> None:
        if leased.retired and leased.users == 0 and self._retired.get(leased, 0) is None:
            self._retired[leased] = self._spawn(self._close(leased))

    async def _close(self, leased: LeasedProducer) -> None:
        # At once: what aiokafka still has was given up. It would be stored behind what came later, in a topic that is
        # made anew.
        try:
            await leased.force_close(self._spawn)
        except Exception as error:  # nothing that anybody waits for goes through it any more
            failures.tell("producer", error, "retired")
        self._retired.pop(leased, None)

    async def _start(self) -> None:
        try:
            producer = await started(
                lambda: new_producer(self._config, "publisher", self._fence, enable_idempotence=True),
                lambda producer: start_client(producer.start, producer.stop, self._spawn),
                "producer",
            )
            producer.client.cluster.add_listener(self._looked)
            self._current = LeasedProducer(producer)
            self.started += 1
        finally:
            self._starting = None

    async def stop(self) -> None:
        """Cut off all of them; what is on the way has an unknown fate: drain first."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        closing = {task for task in self._retired.values() if task is not None}
        if closing:
            await asyncio.wait(closing)
        every = list(self._retired)
        if self._current is not None:
            every.append(self._current)
        self._current = None
        self._retired.clear()
        for leased in every:
            await leased.force_close(self._spawn)
