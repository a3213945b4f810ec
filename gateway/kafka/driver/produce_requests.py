"""The publisher's produce requests: aiokafka's sender without a task for each request, and with the fence before each.

aiokafka's own sender makes a task, a set of waiters and an object for each field of every request, which cost more than
the records of a small batch. This one sends from the turn of the event loop in which it takes the batches, and is
called by the connection with the answer. Its batches, sequence numbers and verdicts on errors are aiokafka's.

The fence: a process that was stopped for seconds sends nothing when it continues. So the clock is checked as late as
possible, when the request is encoded; only the write itself follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, Final

from aiokafka import AIOKafkaProducer, TopicPartition, errors
from aiokafka.client import ConnectionGroup
from aiokafka.producer.message_accumulator import MessageBatch
from aiokafka.producer.sender import Sender, SendProduceReqHandler

from gateway.failures import failures
from gateway.kafka.driver import wire
from gateway.kafka.driver.batch_builder import WrittenBatch
from gateway.kafka.driver.broker_connection import BrokerConnection

log = logging.getLogger(__name__)

NOT_STORED: Final = (errors.NotEnoughReplicasError, errors.NodeNotReadyError)
"""Errors after which a batch is in no log. After others it may be: a leader that has lost its leadership while it
waited for the replicas answers NotLeaderForPartition."""


class PublishSender(Sender):  # type: ignore[misc]  # aiokafka carries no types
    """Sends the batches of a producer without transactions; one request per broker is in flight."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        """Take the place of the producer's own sender."""
        theirs = producer._sender
        super().__init__(
            producer.client, acks=theirs._acks, txn_manager=producer._txn_manager,
            message_accumulator=producer._message_accumulator, retry_backoff_ms=1000 * theirs._retry_backoff,
            request_timeout_ms=theirs._request_timeout_ms,
        )  # fmt: skip
        self._works: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._is_over = False

    async def _sender_routine(self) -> None:
        accumulator = self._message_accumulator
        try:
            while self._failure is None:
                await self._maybe_wait_for_pid()
                by_node, lacking = accumulator.drain_by_nodes(self._in_flight, self._muted_partitions)
                for node, batches in by_node.items():
                    self._in_flight.add(node)
                    self._muted_partitions.update(batches)
                    ProduceRequest(self, node, batches).begin()
                waiter = accumulator.waiter()
                if lacking:
                    updated = self.client.force_metadata_update()
                    await asyncio.wait({waiter, updated}, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await waiter
        except asyncio.CancelledError:  # aiokafka's `close`, which awaits this end
            if self._works:
                await asyncio.wait(self._works)
        except errors.KafkaError:
            raise
        except Exception as error:
            self._failure = error
        finally:
            self._is_over = True
        if self._failure is not None:  # a bug: aiokafka fails all batches, and another producer sends them
            failures.report("producer", self._failure)
            raise errors.KafkaError(f"unexpected: {self._failure!r}") from self._failure

    def start_work(self, work: Coroutine[Any, Any, None]) -> None:
        """Start what a request waits for, unless the sender has ended: then its batches fail with all others."""
        if self._is_over:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._works.add(task)
        task.add_done_callback(self._work_ended)

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        self._works.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End because of a bug."""
        self._failure = error
        self._message_accumulator.wake()

    def ended(self, node: int, batches: Mapping[TopicPartition, MessageBatch]) -> None:
        """Note that a request has ended: its broker may be sent the next."""
        self._in_flight.discard(node)
        self._muted_partitions.difference_update(batches)
        if self._message_accumulator._batches:
            self._message_accumulator.wake()


class ProduceRequest(SendProduceReqHandler):  # type: ignore[misc]  # aiokafka carries no types
    """The batches in flight to one broker, until they are answered or back in their queues."""

    _batches: dict[TopicPartition, MessageBatch]
    _sender: PublishSender

    def __init__(self, sender: PublishSender, node: int, batches: dict[TopicPartition, MessageBatch]) -> None:
        super().__init__(sender, batches)
        self._node = node

    def begin(self) -> None:
        """Send the batches, or connect first."""
        connection = self._client._conns.get((self._node, ConnectionGroup.DEFAULT))
        if connection is not None and connection.connected():
            self._send(connection)
        else:
            self._sender.start_work(self._connect())

    async def _connect(self) -> None:
        connection = await self._client._get_conn(self._node)
        if connection is None:
            self._answered(errors.NodeNotReadyError(f"node {self._node} cannot be reached"))
        else:
            self._send(connection)

    def _send(self, connection: BrokerConnection) -> None:
        batches = [(place, batch.get_data_buffer()) for place, batch in self._batches.items()]
        request = wire.produce_request(batches, self._sender._request_timeout_ms)
        try:
            if not self._may_leave():  # for aiokafka like a missing connection: batches keep their sequence number
                raise errors.NodeNotReadyError("this process was stopped for seconds")
            connection.call(request, self._answered)
        except errors.KafkaError as error:
            self._answered(error)

    def _may_leave(self) -> bool:
        fence = self._sender._message_accumulator.fence
        if fence is None:
            return True
        fence.now()
        return all(fence.allows(place.topic) for place in self._batches)

    def _answered(self, answer: wire.Produced | errors.KafkaError) -> None:
        try:
            if isinstance(answer, errors.KafkaError):
                self._failed(answer)
            else:
                self.handle_response(answer)
        except Exception as error:  # must not reach the connection, which calls this
            self._sender.fail(error)
        if self._to_reenqueue:
            self._sender.start_work(self._requeue())
        else:
            self._sender.ended(self._node, self._batches)

    def _failed(self, error: errors.KafkaError) -> None:
        log.warning("a produce request to node %s has failed: %r", self._node, error)
        if error.invalid_metadata:
            self._client.force_metadata_update()
        for batch in self._batches.values():
            if self._can_retry(error, batch):
                self._to_reenqueue.append(batch)
            else:
                batch.failure(exception=error)

    def _can_retry(self, error: errors.KafkaError, batch: MessageBatch) -> bool:
        written = batch._builder
        if isinstance(written, WrittenBatch):
            written.attempt_failed(may_be_stored=not isinstance(error, NOT_STORED))
        return bool(super()._can_retry(error, batch))

    async def _requeue(self) -> None:
        await asyncio.sleep(self._default_backoff)
        for batch in self._to_reenqueue:
            self._sender._message_accumulator.reenqueue(batch)
        await self._client._maybe_wait_metadata()
        self._sender.ended(self._node, self._batches)
