"""Produce requests of a turn: one for each broker, for all partitions that have records, without a task or a future.

At the end of a turn of the event loop each partition queue with records offers itself. When its leader has no request
in flight, the batches of all that wait for it are sealed, numbered and written as one request, and the connection
settles them when it has the answer. So a request costs nearly the same for one partition as for a hundred.

What is not plain (no connection, no leader, an error in the answer, a shut fence, a broker that stays silent) goes on
in the queue's own task and in aiokafka's queues, under the sequence numbers that the batches have; see
`TurnRequest.pass_on`. Sequence numbers, nodes with a request in flight and muted partitions are those of the producer's
`PublishSender`: a node never has two requests in flight, a partition never two batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from aiokafka import AIOKafkaProducer, TopicPartition, errors
from aiokafka.client import ConnectionGroup
from aiokafka.structs import RecordMetadata

from gateway.kafka.driver import wire
from gateway.kafka.driver.broker_connection import BrokerConnection
from gateway.kafka.driver.produce.batch_builder import WrittenBatch
from gateway.kafka.driver.produce.produce_requests import InFlight, PublishSender
from gateway.kafka.driver.produce.request_pace import RequestPace
from gateway.runtime.failures import failures

CHECKS: Final = 8
"""Looks for batches that wait too long, within the time that a batch may wait."""
CHECK_S: Final = 1.0
"""Longest time between two of these looks."""

Answer = asyncio.Future[RecordMetadata | None]
"""What a batch ends with: where it is stored, or a KafkaError; None if it was dropped because it is void."""


class OfferingQueue(Protocol):
    """A partition queue, as its requests see it."""

    place: TopicPartition

    def next_batch(self) -> WrittenBatch:
        """Return the batch that `take` would seal and return; it may be empty."""

    def waits_since(self) -> float:
        """Return when the first record came of those that wait or are in flight, by the loop's clock."""

    def take(self) -> WrittenBatch | None:
        """Seal and return the next batch, which is in flight from now on; None if the queue does not wait any more."""

    def stored(self, batch: WrittenBatch, offset: int) -> None:
        """Kafka has stored the batch in flight, at `offset`; the queue may offer itself again."""

    def go_alone(self, batch: WrittenBatch | None = None, answer: Answer | None = None) -> None:
        """Go on in a task; if a batch is in flight, with the answer to come for it."""


Sent = dict[TopicPartition, tuple[OfferingQueue, WrittenBatch]]


class TurnRequests:
    """The plain produce requests of one producer."""

    def __init__(
        self,
        producer: AIOKafkaProducer,  # started
        *,
        patience_s: float,  # a batch that waits longer is left to its queue's task
        longest_wait_s: float,  # for more records; see `RequestPace`
        begun: Callable[[], None],  # called for each request: the producer is in use
        ended: Callable[[], None],
    ) -> None:
        self.sender: PublishSender = producer._sender
        self.sender.on_release = self._flush_node
        self.sender.on_end = self.leave_all_alone
        self.begun, self.ended = begun, ended
        self.in_flight: set[TurnRequest] = set()
        self._client = producer.client
        self._numbers = producer._txn_manager
        self._limit = producer._max_request_size
        self._patience_s = patience_s
        self._longest_wait_s = longest_wait_s
        self._waiting: dict[int, dict[OfferingQueue, None]] = {}  # by node
        self._paces: dict[int, RequestPace] = {}  # by node
        self._check: asyncio.TimerHandle | None = None

    def offer(self, queue: OfferingQueue) -> bool:
        """Take a queue with records and nothing in flight; return whether it may wait here. Then call `flush`."""
        node = self._client.cluster.leader_for_partition(queue.place)
        if node is None or queue.place in self.sender._muted_partitions or self._connection(node) is None:
            return False
        self._waiting.setdefault(node, {})[queue] = None
        return True

    def forget(self, queue: OfferingQueue) -> None:
        """Do not wait for a queue's next batch any more."""
        for waiting in self._waiting.values():
            waiting.pop(queue, None)

    def leave_alone(self, queue: OfferingQueue) -> None:
        """Let the queue's task decide about what waits or is in flight."""
        self.forget(queue)
        for request in tuple(self.in_flight):
            if request.sent.get(queue.place, (None,))[0] is queue:
                request.pass_on()
                return
        queue.go_alone()

    def leave_all_alone(self) -> None:
        """The producer is retired, or sends nothing any more: what waits goes on with another one."""
        waiting, self._waiting = self._waiting, {}
        for queues in waiting.values():
            for queue in queues:
                queue.go_alone()

    def metadata_updated(self) -> None:
        """Let what waits for a broker that no longer leads its partition wait for the new leader."""
        leader = self._client.cluster.leader_for_partition
        for node, queues in tuple(self._waiting.items()):
            for queue in [queue for queue in queues if leader(queue.place) != node]:
                del queues[queue]
                if not self.offer(queue):
                    queue.go_alone()
        self.flush()

    def flush(self) -> None:
        """Write a request to every broker that has none in flight and something waiting."""
        for node in tuple(self._waiting):
            self._flush_node(node)

    @property
    def waits(self) -> int:
        """How often a request has waited for more records."""
        return sum(pace.waits for pace in self._paces.values())

    def _connection(self, node: int) -> BrokerConnection | None:
        """Return the connection to a node if requests may be written to it at once."""
        connection: BrokerConnection | None = self._client._conns.get((node, ConnectionGroup.DEFAULT))
        if connection is not None and connection.expiring:
            connection.renew()  # a connection that always has a request in flight would never find the time
        usable = connection is not None and connection.connected() and not self.sender.is_over
        return connection if usable and self._numbers.has_pid() else None

    def pace(self, node: int) -> RequestPace:
        """Return the pace of a node's requests."""
        pace = self._paces.get(node)
        if pace is None:
            loop = asyncio.get_running_loop()
            pace = self._paces[node] = RequestPace(loop, self._longest_wait_s, lambda: self._flush_node(node))
        return pace

    def _flush_node(self, node: int) -> None:
        try:
            self._write_to(node)
        except Exception as error:  # must reach neither other nodes nor an answer that is being settled
            self.sender.end_with(error)

    def _write_to(self, node: int) -> None:
        waiting = self._waiting.get(node)
        if not waiting:
            return
        if self._check is None:
            self._watch()
        if node in self.sender._in_flight or node in self.sender.yielded or self.pace(node).holds():
            return
        connection = self._connection(node)
        del self._waiting[node]
        if connection is None:
            for queue in waiting:
                queue.go_alone()
            return
        try:
            sent = self._take(node, waiting)
        except Exception:
            self._waiting.pop(node, None)
            for queue in waiting:
                queue.go_alone()
            raise
        if sent:
            TurnRequest(self, node, sent).write(connection)
            self.pace(node).written(lambda: {sender for _, batch in sent.values() for sender in batch.senders()})

    def _take(self, node: int, waiting: Iterable[OfferingQueue]) -> Sent:
        """Take the batches of a request. Queues for which it has no room wait for the next one, in order."""
        sent: Sent = {}
        size, numbers = 0, self._numbers
        for queue in waiting:
            size += queue.next_batch().size()
            if sent and size > self._limit:
                self._waiting.setdefault(node, {})[queue] = None
                continue
            batch = queue.take()
            if batch is not None:
                place = queue.place
                batch._set_producer_state(numbers.producer_id, numbers.producer_epoch, numbers.sequence_number(place))
                numbers.increment_sequence_number(place, batch.record_count())
                sent[place] = queue, batch
        return sent

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._check = loop.call_later(min(CHECK_S, self._patience_s / CHECKS), self._leave_late_alone)

    def _leave_late_alone(self) -> None:
        """Leave what waits for too long to its queue's task, which knows what then."""
        self._check = None
        late = asyncio.get_running_loop().time() - self._patience_s
        for request in tuple(self.in_flight):
            if any(queue.waits_since() <= late for queue, _ in request.sent.values()):
                request.pass_on()
        for queues in self._waiting.values():
            for queue in [queue for queue in queues if queue.waits_since() <= late]:
                del queues[queue]
                queue.go_alone()
        if self.in_flight or any(self._waiting.values()):
            self._watch()


class TurnRequest:
    """One produce request in flight.

    Attributes:
        sent: by partition, the queue and its batch.
    """

    __slots__ = ("_node", "_passed_on", "_requests", "sent")

    def __init__(self, requests: TurnRequests, node: int, sent: Sent) -> None:
        self.sent = sent
        self._requests = requests
        self._node = node
        self._passed_on: InFlight | None = None

    def write(self, connection: BrokerConnection) -> None:
        """Write it; later its answer settles the batches."""
        requests, sent = self._requests, self.sent
        sender = requests.sender
        sender._in_flight.add(self._node)
        sender._muted_partitions.update(sent)
        requests.in_flight.add(self)
        requests.begun()
        try:
            batches = [(place, batch._build()) for place, (_, batch) in sent.items()]
            body = wire.produce_body(batches, sender._request_timeout_ms)
            connection.call(wire.PRODUCE, body, self._end, lambda: sender.check_fence(sent))
        except errors.KafkaError as error:
            self._end(error)
        except Exception as error:
            self._end_with(error)

    def pass_on(self) -> None:
        """Let the queues' tasks wait for the answer, and aiokafka repeat the batches if they must be repeated."""
        if self._passed_on is not None:
            return
        requests = self._requests
        batches = {place: requests.sender.adopt(place, batch) for place, (_, batch) in self.sent.items()}
        self._passed_on = InFlight(requests.sender, self._node, batches)
        for place, (queue, batch) in self.sent.items():
            queue.go_alone(batch, batches[place].future)
        requests.ended()

    def _end(self, answer: wire.Produced | errors.KafkaError) -> None:
        try:
            self._requests.in_flight.discard(self)
            if self._passed_on is None and self._is_plain(answer):
                self._settle(answer)
            else:
                self.pass_on()
                assert self._passed_on is not None
                self._passed_on.end(answer)
        except Exception as error:  # must not reach the connection, which calls this
            self._end_with(error)

    def _is_plain(self, answer: wire.Produced | errors.KafkaError) -> bool:
        """Whether the answer says that each batch of the request, and no other, is stored, and no fence is shut."""
        if isinstance(answer, errors.KafkaError) or not self._requests.sender.is_fence_open:
            return False
        rows = [(topic, row[0]) for topic, rows in answer.topics for row in rows if not row[1]]
        return len(rows) == len(self.sent) and self.sent.keys() == set(rows)

    def _settle(self, answer: wire.Produced) -> None:
        requests, sent = self._requests, self.sent
        requests.sender.unmute(sent)  # the queues may offer their next batches
        records = 0
        for topic, rows in answer.topics:
            for number, _, offset, *_ in rows:
                queue, batch = sent[topic, number]
                records += batch.count
                failures.guard("partition", queue.stored, batch, offset)
        requests.pace(self._node).answered(records)
        requests.ended()
        requests.sender.release(self._node)

    def _end_with(self, bug: Exception) -> None:
        """End the producer because of an unexpected exception; what is not settled is sent by another one."""
        requests = self._requests
        requests.in_flight.discard(self)
        requests.sender.end_with(bug)
        self.pass_on()
