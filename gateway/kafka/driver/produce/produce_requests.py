"""The publisher's produce requests: aiokafka's sender without a task for each request, and with the fence before each.

aiokafka's own sender makes a task, a set of waiters and an object for each field of every request, which cost more than
the records of a small batch (ADR 0087). This one writes a request in the turn of the event loop in which it takes the
batches, and the connection calls it with the answer. Batches, their queues and sequence numbers, and what is done about
an error code stay aiokafka's.

The fence: a process that was stopped for seconds sends nothing when it continues. So the clock is checked as late as
possible, when the request is encoded; only the write itself follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

import structlog
from aiokafka import AIOKafkaProducer, TopicPartition, errors
from aiokafka.client import ConnectionGroup
from aiokafka.producer.message_accumulator import MessageBatch
from aiokafka.producer.sender import Sender, SendProduceReqHandler

from gateway.kafka.driver import wire
from gateway.kafka.driver.broker_connection import BrokerConnection
from gateway.kafka.driver.produce.batch_builder import WrittenBatch
from gateway.runtime.failures import failures
from gateway.runtime.spawn import start_contained

log = structlog.get_logger(__name__)

NOT_STORED: Final = (errors.NotEnoughReplicasError, errors.NodeNotReadyError)
"""Errors after which a batch is in no log. After others it may be: a leader that has lost its leadership while it
waited for the replicas answers NotLeaderForPartition."""


class PublishSender(Sender):  # type: ignore[misc]  # aiokafka carries no types
    """Sends the batches of a producer without transactions; one request per broker is in flight."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        """Take the place of the producer's own sender."""
        replaced = producer._sender
        super().__init__(
            producer.client, acks=replaced._acks, txn_manager=producer._txn_manager,
            message_accumulator=producer._message_accumulator, retry_backoff_ms=1000 * replaced._retry_backoff,
            request_timeout_ms=replaced._request_timeout_ms,
        )  # fmt: skip
        self.is_over = False
        self.on_release: Callable[[int], None] = lambda _node: None  # a node has nothing in flight any more
        self.on_end: Callable[[], None] = lambda: None  # it sends nothing any more
        self.yielded: set[int] = set()  # nodes whose next request is that of aiokafka's queues, if they have one
        self._limit = producer._max_request_size
        self._tasks: set[asyncio.Task[None]] = set()  # requests that connect or wait to be repeated
        self._bug = ""  # the unexpected exception that ended it

    async def _sender_routine(self) -> None:
        accumulator = self._message_accumulator
        try:
            while not self._bug:
                await self._maybe_wait_for_pid()
                by_node, leaderless = accumulator.drain_by_nodes(self._in_flight, self._muted_partitions)
                for node, batches in by_node.items():
                    self._put_back(batches)
                    self._in_flight.add(node)
                    self._muted_partitions.update(batches)
                    InFlight(self, node, batches).begin()
                yielded, self.yielded = self.yielded, set()
                for node in yielded - self._in_flight:
                    self.on_release(node)
                waiter = accumulator.waiter()
                if leaderless:
                    updated = self.client.force_metadata_update()
                    await asyncio.wait({waiter, updated}, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await waiter
                # In the next turn the partitions of the last answer have queued their next batches, which belong into
                # one request: without this turn, requests had half the partitions each, and twice the latency.
                await asyncio.sleep(0)
        except asyncio.CancelledError:  # by aiokafka, which awaits this end
            self.is_over = True
            while self._tasks:
                await asyncio.wait(self._tasks)
            return
        except errors.KafkaError:
            raise
        except Exception as error:
            self.end_with(error)
        finally:
            self.is_over = True
            failures.guard("producer", self.on_end)
        if self._bug:  # aiokafka fails all batches, and another producer sends them
            raise errors.KafkaError(f"unexpected: {self._bug}")

    def _put_back(self, batches: dict[TopicPartition, MessageBatch]) -> None:
        """Put the batches that one request has no room for back into their queues, for the next one.

        A broker closes the connection of a request above its `socket.request.max.bytes`.
        """
        size = 0
        for place, batch in tuple(batches.items()):
            more = len(batch.get_data_buffer())
            if size and size + more > self._limit:
                del batches[place]
                self._message_accumulator.reenqueue(batch)
            else:
                size += more

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task for a request, unless the sender has ended: then its batches fail with all others."""
        if self.is_over:
            work.close()
            return
        task = start_contained(self._guarded(work), "producer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.end_with(error)

    def end_with(self, bug: Exception) -> None:
        """End because of an unexpected exception."""
        failures.report("producer", bug)
        self._bug = repr(bug)
        self._message_accumulator.wake()

    def unmute(self, places: Iterable[TopicPartition]) -> None:
        """These partitions have nothing in flight any more."""
        self._muted_partitions.difference_update(places)

    def release(self, node: int) -> None:
        """The node has nothing in flight any more. If aiokafka's queues have batches, the next request is theirs."""
        self._in_flight.discard(node)
        if self._message_accumulator._batches and not self.is_over:
            self.yielded.add(node)
            self._message_accumulator.wake()
        else:
            self.on_release(node)

    def adopt(self, place: TopicPartition, batch: WrittenBatch) -> MessageBatch:
        """Make a numbered batch in flight aiokafka's, which repeats it if it must be repeated."""
        accumulator = self._message_accumulator
        adopted = MessageBatch(place, batch, accumulator._batch_ttl, 0)
        adopted.drain_ready()
        if self.is_over or self._bug:
            adopted.failure(errors.ProducerClosed())
        else:
            accumulator._pending_batches.add(adopted)
            adopted.future.add_done_callback(lambda _: accumulator._pending_batches.discard(adopted))
        adopted.future.add_done_callback(retrieve_exception)  # its queue may not want it any more
        return adopted

    @property
    def is_fence_open(self) -> bool:
        """Whether answers may be told, and batches sent."""
        fence = self._message_accumulator.fence
        return fence is None or fence.is_open

    def check_fence(self, places: Iterable[TopicPartition]) -> None:
        """Raise NodeNotReadyError, which is retried and in `NOT_STORED`, if a request must not leave."""
        fence = self._message_accumulator.fence
        if fence is not None:
            fence.now()
            if not all(fence.allows(place.topic) for place in places):
                raise errors.NodeNotReadyError("this process was stopped for seconds")


class InFlight(SendProduceReqHandler):  # type: ignore[misc]  # aiokafka carries no types
    """The batches in flight to one broker, until they are answered or back in their queues."""

    _batches: dict[TopicPartition, MessageBatch]
    _sender: PublishSender

    def __init__(self, sender: PublishSender, node: int, batches: dict[TopicPartition, MessageBatch]) -> None:
        super().__init__(sender, batches)
        self._node = node
        self._holds_node = True  # until the broker has answered: one that cannot be reached is not tried at once again

    def begin(self) -> None:
        """Send the batches, or connect first."""
        connection = self._client._conns.get((self._node, ConnectionGroup.DEFAULT))
        if connection is not None and connection.connected():
            self._send(connection)
        else:
            self._sender.spawn(self._connect())

    async def _connect(self) -> None:
        connection = await self._client._get_conn(self._node)
        if self._sender.is_over:
            return
        self._drop_voided()
        if not self._batches:
            self._sender.release(self._node)
        elif connection is None:
            self.end(errors.NodeNotReadyError(f"node {self._node} cannot be reached"))
        else:
            self._send(connection)

    def _drop_voided(self) -> None:
        """Drop batches that were made void while there was no connection, as aiokafka does with those in a queue."""
        for place, batch in tuple(self._batches.items()):
            if batch.is_empty():
                del self._batches[place]
                batch.done_noack()
                self._sender.unmute((place,))

    def _send(self, connection: BrokerConnection) -> None:
        batches = [(place, batch.get_data_buffer()) for place, batch in self._batches.items()]
        body = wire.produce_body(batches, self._sender._request_timeout_ms)
        try:
            connection.call(wire.PRODUCE, body, self.end, lambda: self._sender.check_fence(self._batches))
        except errors.KafkaError as error:
            self.end(error)

    def end(self, answer: wire.Produced | errors.KafkaError) -> None:
        """Settle the batches by the answer, or by the error instead of one; or queue them again after a pause."""
        try:
            if isinstance(answer, errors.KafkaError):
                self._fail(answer)
            elif self._is_for_us(answer):
                self._holds_node = False
                self.handle_response(answer)
            else:  # what was stored is not known: the same sequence numbers are sent again
                self._fail(errors.KafkaConnectionError("the answer names other partitions than the request"))
        except Exception as error:  # must not reach the connection, which calls this
            self._sender.end_with(error)
        if not self._to_reenqueue:
            self._release()
            return
        if not self._holds_node:  # only these partitions have failed, and wait before they are sent again
            repeated = {batch.tp: batch for batch in self._to_reenqueue}
            self._sender.unmute(self._batches.keys() - repeated.keys())
            self._batches = repeated
            self._sender.release(self._node)
        self._sender.spawn(self._requeue())

    def _is_for_us(self, answer: wire.Produced) -> bool:
        """Whether the answer names each partition of the request, and no other."""
        batches = self._batches
        named = [(topic, row[0]) for topic, rows in answer.topics for row in rows]
        return len(named) == len(batches) and batches.keys() == set(named)

    def _fail(self, error: errors.KafkaError) -> None:
        log.warning("a produce request has failed", node=self._node, error=repr(error))
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
        if self._sender.is_over:
            return
        for batch in self._to_reenqueue:
            self._sender._message_accumulator.reenqueue(batch)
        await self._client._maybe_wait_metadata()
        if self._holds_node:
            self._release()
        else:
            self._sender.unmute(self._batches)
            self._sender._message_accumulator.wake()

    def _release(self) -> None:
        self._sender.unmute(self._batches)
        self._sender.release(self._node)


def retrieve_exception(waiter: asyncio.Future[Any] | None) -> None:
    """Retrieve a future's exception, or asyncio would log that it was never retrieved."""
    if waiter is not None and waiter.done() and not waiter.cancelled():
        waiter.exception()
