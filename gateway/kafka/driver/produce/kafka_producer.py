"""Create and close aiokafka producers, and do what the library has no public method for."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Any, Final

import aiokafka.producer.producer
from aiokafka import AIOKafkaProducer, TopicPartition, errors
from aiokafka.client import CoordinationType
from aiokafka.producer.message_accumulator import BatchBuilder, MessageAccumulator
from aiokafka.producer.transaction_manager import TransactionManager
from aiokafka.structs import RecordMetadata

from gateway.kafka.driver.brokers import end_update
from gateway.kafka.driver.client_settings import client_settings
from gateway.kafka.driver.produce.produce_requests import PublishSender, retrieve_exception
from gateway.runtime.fence import Fence
from gateway.runtime.spawn import Spawn
from gateway.settings.config import KafkaConfig

SENDER_S: Final = 0.2
"""How long a producer's sender may take to notice that it was cancelled, or that its sockets are closed."""
FORCE_CLOSE_S: Final = 1.0
"""How long a producer's `stop` may take once everything it waits for has ended."""


FIRST_PAUSE_S: Final = 0.02
LEADERS_RETRY_S: Final = 1.0
"""First and longest pause between metadata requests while a partition has no leader; the pause doubles."""


class PacedAccumulator(MessageAccumulator):  # type: ignore[misc]  # aiokafka carries no types
    """A producer's batch queues. aiokafka's own would request metadata without a pause while a leader is missing."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._pause = FIRST_PAUSE_S
        self._ask_at = float("-inf")
        self.fence: Fence | None = None

    def drain_by_nodes(
        self, ignore_nodes: Set[int], muted_partitions: Set[TopicPartition] = frozenset()
    ) -> tuple[Any, bool]:
        """Return the batches to send, by node, and whether to request metadata for partitions without a leader."""
        fence = self.fence
        if fence is not None and not fence.is_open:
            muted_partitions = muted_partitions | {place for place in self._batches if place.topic != fence.exempt}
            fence.call_when_open(self.wake)
        batches, lacking = super().drain_by_nodes(ignore_nodes, muted_partitions)
        if not lacking:
            self._pause = FIRST_PAUSE_S
            return batches, False
        loop = asyncio.get_running_loop()
        left = self._ask_at - loop.time()
        if left > 0:
            self._wakeup_handle = loop.call_later(left, self._wakeup, self._waiter_future)
            return batches, False
        self._ask_at = loop.time() + self._pause
        self._pause = min(2 * self._pause, LEADERS_RETRY_S)
        return batches, True

    def wake(self) -> None:
        """Let the sender look for batches."""
        if not self._waiter_future.done():
            self._waiter_future.set_result(None)


class WrappingNumbers(TransactionManager):  # type: ignore[misc]  # aiokafka carries no types
    """A producer's sequence numbers. After 2**31 - 1 comes 0; aiokafka's own become negative, which brokers refuse."""

    def increment_sequence_number(self, tp: TopicPartition, increment: int) -> None:
        """Count the records of a batch."""
        self._sequence_numbers[tp] = (self._sequence_numbers[tp] + increment) % 2**31


aiokafka.producer.producer.TransactionManager = WrappingNumbers
aiokafka.producer.producer.MessageAccumulator = PacedAccumulator  # aiokafka has no parameter for it


def new_producer(config: KafkaConfig, role: str, fence: Fence | None = None, **options: Any) -> AIOKafkaProducer:
    """Create a producer with `acks=all`, not started. `options` set idempotence or a transactional id.

    It sends nothing while `fence` is shut.
    """
    producer = AIOKafkaProducer(
        **client_settings(config, role),
        **options,
        acks="all",
        # For batches that aiokafka builds itself: those of transactions.
        compression_type=None if config.compression == "none" else config.compression,
        max_batch_size=config.batch_bytes,
        max_request_size=config.max_request_bytes,
        linger_ms=0,  # batches fill in the partition queues, while their predecessors are in flight
    )
    producer._message_accumulator.fence = fence
    if "transactional_id" not in options:
        producer._sender = PublishSender(producer)
    return producer


async def queue_batch(
    producer: AIOKafkaProducer, batch: BatchBuilder, place: TopicPartition
) -> asyncio.Future[RecordMetadata]:
    """Queue a batch for a partition in the producer's metadata; the future is done when Kafka has stored it.

    `send_batch` without its checks, which copy the topic's set of partitions four times.

    Raises:
        KafkaError: the batch was not queued.
    """
    future: asyncio.Future[RecordMetadata] = await producer._message_accumulator.add_batch(
        batch, place, producer._request_timeout_ms / 1000
    )
    return future


async def force_close(producer: AIOKafkaProducer, spawn: Spawn) -> None:
    """Close without waiting for batches; whether those in flight are stored stays unknown.

    aiokafka's `stop` waits for every batch, and a batch of an idempotent producer may wait for ever. So this cancels
    the sender, closes the sockets and fails the remaining batches, which lets `stop` return.
    """
    stopping = spawn(producer.stop())
    sender = producer._sender.sender_task
    if sender is not None:
        sender.cancel()
        await producer.client.close()
        await asyncio.wait({sender}, timeout=SENDER_S)
        end_update(producer.client)  # failed requests wait for it
        await asyncio.wait({sender}, timeout=SENDER_S)
        accumulator = producer._message_accumulator
        for queued in accumulator._batches.values():
            accumulator._pending_batches.update(queued)
        accumulator.fail_all(errors.ProducerClosed())
        for failed in accumulator._pending_batches:
            retrieve_exception(failed._drain_waiter)
            retrieve_exception(failed.future)
    _, unfinished = await asyncio.wait({stopping}, timeout=FORCE_CLOSE_S)
    for task in unfinished:
        task.cancel()
    manager = producer._txn_manager
    if manager is not None:
        retrieve_exception(manager._transaction_waiter)
        retrieve_exception(manager._pid_waiter)
        for *_, waiter in manager._pending_txn_offsets:
            retrieve_exception(waiter)


def forget_group(producer: AIOKafkaProducer) -> None:
    """Let the transaction commit another group's offsets: aiokafka caches one group and one group coordinator."""
    producer._txn_manager._txn_consumer_group = None
    producer._sender._coordinator_dead(CoordinationType.GROUP)


def has_failed(producer: AIOKafkaProducer) -> bool:
    """Whether a transactional producer has failed fatally; aiokafka itself only asserts that it has not."""
    return bool(producer._txn_manager.is_fatal_error())
