"""Dynamic nodes: temporary queues and topics, mostly for replies (part 3.5.3, "dynamic").

A node's address is `<amqp.reply_topic>/<unguessable name>`: one key of an ordinary Kafka topic. Every client with the
right to publish there can reply, over every protocol and at every gateway; to MQTT clients it is a topic name.
The gateway that created the node reads the end of the topic and offers each record to the node of its key. Records are
not buffered for a receiver without credit: the log is the queue, as for every subscriber of the live reader.

A node belongs to the connection that created it, and is deleted with the link that created it. The receivers of a queue
take turns, and returned records are offered again; each receiver of a topic gets every record while it is attached.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from aiokafka import TopicPartition

from gateway.amqp.sources import LinkSource
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.contracts import Fanout, Subscriber
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.lingering import LingeringWatch
from gateway.kafka.read.live_reader import LiveReader
from mapping.amqp.addresses import path_of
from mapping.record import Received
from protocols.amqp.links import Link

TEMPORARY_QUEUE: Final = "temporary-queue"
TEMPORARY_TOPIC: Final = "temporary-topic"
RETURN_S: Final = 0.1
"""Delay before a record that has failed, or was released more than `AT_ONCE` times, is offered again."""
AT_ONCE: Final = 10
LINGER_S: Final = 30.0  # reading the reply topic continues this long after its last node: the next request creates one


class NodeReceiver(Subscriber, Protocol):
    """A link that receives from a node; a protocol, because the links import this module."""

    link: Link

    def wants(self, record: Received) -> bool:
        """Whether the link's filters select the record."""


class Tried(NamedTuple):
    """A record with how often it was returned as failed, and how often it was returned."""

    record: Received
    attempts: int = 0
    returns: int = 0
    declined: frozenset[NodeConsumer] = frozenset()  # receivers that must not get it again


def _offset(returned: Tried) -> int:
    return returned.record.offset  # all records of a node are in one partition


class Node(Subscriber):
    """One temporary queue or topic. A queue itself subscribes to the live reader; for a topic its receivers do."""

    def __init__(self, nodes: Nodes, owner: object, name: str, *, queue: bool) -> None:
        self.address = f"{nodes.address}/{name}"  # without a tenant's prefix
        self.key = name.encode()  # of its records
        self.owner = owner  # the connection that created it
        self.live_reader = nodes.live_reader  # of the reply topic
        self._nodes = nodes
        self._queue = queue
        self._consumers: dict[NodeConsumer, None] = {}  # of a queue: the next one first
        self._returned: list[Tried] = []  # in the order of the log
        self._timer: asyncio.Handle | None = None

    @property
    def candidates(self) -> Collection[tuple[Subscriber, None]]:
        """The subscribers to which the live reader offers the node's records."""
        return ((self, None),) if self._queue else tuple(self._consumers.items())

    @property
    def demand(self) -> int:
        """The demand of all receivers of a queue."""
        return sum(consumer.demand for consumer in self._consumers)

    def source(self, wanted: Collection[str]) -> LinkSource:
        """Return the source of a link that receives from this node."""
        kind = TEMPORARY_QUEUE if self._queue else TEMPORARY_TOPIC
        return LinkSource(self._nodes.topic, capabilities=(kind,) if kind in wanted else ())

    def join(self, link: NodeReceiver) -> NodeConsumer:
        """Add a receiving link."""
        consumer = NodeConsumer(self, link)
        self._consumers[consumer] = None
        return consumer

    @property
    def links(self) -> list[NodeReceiver]:
        """The receiving links."""
        return [consumer.link for consumer in self._consumers]

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Offer a record to the queue's next receiver with capacity; see `Subscriber`."""
        if record.key != self.key:
            return True
        self._hand_over_returned()
        return self._hand_over(Tried(record))

    def wake(self, consumer: NodeConsumer) -> None:
        """Resume reading for a receiver that has capacity again."""
        if not self._queue:
            self.live_reader.resume(consumer)
            return
        if self._returned and self._timer is None:  # later: nothing is sent while a peer's events are handled
            self._timer = asyncio.get_running_loop().call_soon(self._return)
        self.live_reader.resume(self)

    def unread(self, consumer: NodeConsumer, ends: Mapping[TopicPartition, int]) -> int:
        """Return how many records it has not got yet, given the ends of the log."""
        return self.live_reader.unread(self if self._queue else consumer, ends) + len(self._returned)

    def give_back(self, returned: Tried, *, at_once: bool = False) -> None:
        """Return a record that a receiver has not accepted: a queue offers it again, a topic drops it."""
        if not self._queue:
            return
        bisect.insort(self._returned, returned, key=_offset)
        loop = asyncio.get_running_loop()
        if at_once and returned.returns <= AT_ONCE:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_soon(self._return)
        elif self._timer is None:
            self._timer = loop.call_later(RETURN_S, self._return)

    def leave(self, consumer: NodeConsumer) -> None:
        """Remove a receiver."""
        self._consumers.pop(consumer, None)
        if not self._queue:
            self.live_reader.forget(consumer)

    def delete(self) -> None:
        """Delete the node."""
        self._nodes.delete(self)

    def close(self) -> None:
        """Release the node's timer, records and subscribers."""
        self._queue = False  # so that records returned from now on are dropped
        if self._timer is not None:
            self._timer.cancel()
        self._returned.clear()
        subscribers: tuple[Subscriber, ...] = (self, *self._consumers)
        for subscriber in subscribers:
            self.live_reader.forget(subscriber)

    def _return(self) -> None:
        self._timer = None
        self._hand_over_returned()

    def _hand_over_returned(self) -> None:
        while self._returned:
            first = self._returned.pop(0)
            if not self._hand_over(first):
                bisect.insort(self._returned, first, key=_offset)
                break

    def _hand_over(self, tried: Tried) -> bool:
        """Hand a record to the next receiver that selects it and has capacity; drop it if no receiver selects it."""
        wanted = not self._consumers
        for consumer in self._consumers:
            if consumer in tried.declined or not consumer.link.wants(tried.record):
                continue
            wanted = True
            if consumer.take(tried):
                if consumer in self._consumers:  # taking the record may have ended the link
                    del self._consumers[consumer]
                    self._consumers[consumer] = None
                return True
        return not wanted


class NodeConsumer(Subscriber):
    """A link's membership in a node, like a group's `Membership`; for a topic it subscribes to the live reader."""

    __slots__ = ("_held", "_node", "link")

    def __init__(self, node: Node, link: NodeReceiver) -> None:
        self.link = link
        self._node = node
        self._held: dict[int, Tried] = {}

    @property
    def demand(self) -> int:
        """The link's demand."""
        return self.link.demand

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Offer a record of a temporary topic; see `Subscriber`."""
        return record.key != self._node.key or self.take(Tried(record))

    def take(self, tried: Tried) -> bool:
        """Send a record if the link has capacity; return whether it was sent."""
        record = tried.record
        self._held[id(record)] = tried  # before the offer, because the link may settle during it
        if self.link.offer_nowait(record):
            return True
        del self._held[id(record)]
        return False

    def wake(self) -> None:
        """Resume reading: the link has capacity again."""
        self._node.wake(self)

    def done(self, record: Received) -> None:
        """Forget a settled record."""
        self._held.pop(id(record), None)

    def done_all(self, records: Sequence[Received]) -> None:
        """Forget settled records."""
        for record in records:
            self._held.pop(id(record), None)

    def requeue(self, record: Received, *, failed: bool = True, at_once: bool = False) -> None:
        """Return a record to the node, which offers it again; see `Membership.requeue`."""
        delivery = self._held.pop(id(record), None)
        if delivery is not None:
            again = delivery._replace(attempts=delivery.attempts + failed, returns=delivery.returns + 1)
            self._node.give_back(again, at_once=at_once)

    def decline(self, record: Received, *, failed: bool, keep: bool) -> None:
        """Leave a record that this receiver must not have to the others; without one it is dropped."""
        delivery = self._held.pop(id(record), None)
        if delivery is not None:
            left = delivery._replace(attempts=delivery.attempts + failed, declined=delivery.declined | {self})
            self._node.give_back(left, at_once=True)

    def has_other(self, record: Received) -> bool:
        """Whether there is another receiver."""
        return len(self._node.links) > 1

    def attempts(self, record: Received) -> int:
        """Return how often the record was returned as failed."""
        delivery = self._held.get(id(record))
        return delivery.attempts if delivery is not None else 0

    def failures(self, record: Received) -> int:
        """Return 0: failures are not counted, because dynamic nodes have no dead letters."""
        return 0

    async def ends(self, topic: str) -> dict[TopicPartition, int]:
        """Return the ends of the topic's partitions; Refused if Kafka does not answer."""
        return await self._node.live_reader.ends(topic)

    def unread(self, ends: Mapping[TopicPartition, int]) -> int:
        """Count the offsets below `ends` that were not offered yet, and the returned records."""
        return self._node.unread(self, ends)

    async def leave(self, *, failed: bool = True) -> None:
        """Leave the node and return the unsettled records to it."""
        self._node.leave(self)
        held, self._held = self._held, {}
        for tried in held.values():
            self._node.give_back(tried._replace(attempts=tried.attempts + 1))


class Nodes(Fanout):
    """All dynamic nodes of the process, or of one tenant; the `Fanout` of the reply topic."""

    def __init__(
        self,
        live_reader: LiveReader,
        publisher: Publisher,
        topic: str,
        random_id: Callable[[], str],
        address: str,
    ) -> None:
        """Prepare for nodes; reading starts with the first one.

        `random_id` returns an unguessable name that is legal in an MQTT topic. `address` is the reply topic's name
        without a tenant's prefix.
        """
        self.topic = topic  # the reply topic
        self.address = address
        self.live_reader = live_reader
        self._publisher = publisher
        self._random_id = random_id
        self._nodes: dict[bytes | None, Node] = {}
        self._watch = LingeringWatch(live_reader, topic, self, lambda: self._nodes, LINGER_S)

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._nodes)

    def select(self, records: Sequence[Received], at: int) -> tuple[Collection[tuple[Subscriber, None]], int]:
        """Return the subscribers of the node that the record's key names."""
        node = self._nodes.get(records[at].key)
        return () if node is None else node.candidates, 1

    async def create(self, owner: object, capabilities: Collection[str]) -> tuple[Node, TopicInfo]:
        """Create a node; its receivers get the records that are stored for it from now on.

        Raises:
            Refused: the reply topic does not exist and may not be created, or Kafka does not answer.
        """
        info = await self._publisher.topic(self.topic)
        node = Node(self, owner, self._random_id(), queue=TEMPORARY_TOPIC not in capabilities)
        self._nodes[node.key] = node  # keeps the watch
        try:
            await self._watch.hold()
        except BaseException:
            self.delete(node)
            raise
        return node, info

    def find(self, address: str | None) -> Node | None:
        """Return the node at an address, or None."""
        topic, slash, name = path_of(address).partition("/") if address else ("", "", "")
        return self._nodes.get(name.encode()) if slash and topic == self.address else None

    def delete(self, node: Node) -> None:
        """Delete a node; the caller detaches its receiving links."""
        if self._nodes.pop(node.key, None) is None:
            return
        node.close()
        self._watch.release()

    def close(self) -> None:
        """Stop the timers."""
        self._watch.close()
