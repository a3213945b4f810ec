"""Dynamic nodes: temporary queues and topics, mostly for replies (part 3.5.3, "dynamic").

A node's address is `<amqp.reply_topic>/<a name that nobody can guess>`: one key of an ordinary Kafka topic. So whoever
may publish there can answer, over every protocol and at every gateway; an MQTT client sends to that very topic name.
The gateway at which the node was made reads the end of the topic and gives each record to the node of its key. Nothing
is kept in memory for a receiver without credit: the log is the queue, as for every subscriber of the live reader.

A node belongs to the connection that made it, and goes with the link that made it. A queue's receivers take turns, and
what they give back is offered again; each receiver of a topic gets everything that comes while it is there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

from aiokafka import TopicPartition

from gateway.amqp.sources import Source
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.contracts import Subscriber
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.lingering import LingeringWatch
from gateway.kafka.read.live_reader import LiveReader
from mapping.amqp.addresses import path_of
from mapping.record import Received
from protocols.amqp.links import Link

TEMPORARY_QUEUE: Final = "temporary-queue"
TEMPORARY_TOPIC: Final = "temporary-topic"
RETURN_S: Final = 0.1  # until a record that was given back to a temporary queue is offered again
LINGER_S: Final = 30.0  # how long the reply topic is read on after its last node: the next request makes a new one


class NodeReceiver(Subscriber, Protocol):
    """A link that receives from a node; the links know the nodes, not the other way round."""

    link: Link

    def wants(self, record: Received) -> bool:
        """Whether the link's filters select the record."""


class Node:
    """One temporary queue or topic; a queue is itself the subscriber of the live reader."""

    def __init__(self, nodes: Nodes, owner: object, name: str, *, queue: bool) -> None:
        self.address = f"{nodes.address}/{name}"  # of the node, as its owner says it
        self.key = name.encode()  # of its records
        self.owner = owner  # the connection that made it
        self.lossy = False
        self._nodes = nodes
        self._queue = queue
        self._consumers: dict[NodeConsumer, None] = {}  # of a queue: in the order of their turns
        self._returned: deque[tuple[Received, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def candidates(self) -> Collection[tuple[Subscriber, None]]:
        """Who is offered the node's records at the end of the log."""
        return ((self, None),) if self._queue else tuple(self._consumers.items())

    @property
    def demand(self) -> int:
        """What the receivers of a queue take now."""
        return sum(consumer.demand for consumer in self._consumers)

    def source(self, wanted: Collection[str]) -> Source:
        """What a link that receives from it asks for."""
        kind = TEMPORARY_QUEUE if self._queue else TEMPORARY_TOPIC
        return Source(self._nodes.topic, capabilities=(kind,) if kind in wanted else ())

    def join(self, link: NodeReceiver) -> NodeConsumer:
        """A link receives from it."""
        consumer = NodeConsumer(self, link)
        self._consumers[consumer] = None
        return consumer

    @property
    def links(self) -> list[NodeReceiver]:
        """The links that receive from it."""
        return [consumer.link for consumer in self._consumers]

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Give a record to the queue's next receiver with capacity; see `Subscriber`."""
        return record.key != self.key or self._hand(record, 0)

    def wake(self, consumer: NodeConsumer) -> None:
        """A receiver has capacity."""
        if not self._queue:
            self._nodes.live_reader.resume(consumer)
            return
        if self._timer is None:
            self._hand_returned()
        self._nodes.live_reader.resume(self)

    @property
    def live_reader(self) -> LiveReader:
        """Who reads the log."""
        return self._nodes.live_reader

    def unread(self, consumer: NodeConsumer, ends: Mapping[TopicPartition, int]) -> int:
        """See `NodeConsumer.unread`."""
        return self.live_reader.unread(self if self._queue else consumer, ends) + len(self._returned)

    def give_back(self, record: Received, attempts: int) -> None:
        """A receiver has not settled a record; that is the end of it, unless it is a queue's."""
        if self._queue:
            self._returned.append((record, attempts))
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(RETURN_S, self._return)

    def leave(self, consumer: NodeConsumer) -> None:
        """A receiver is gone."""
        self._consumers.pop(consumer, None)
        if not self._queue:
            self._nodes.live_reader.forget(consumer)

    def delete(self) -> None:
        """See `Nodes.delete`."""
        self._nodes.delete(self)

    def close(self) -> None:
        """Forget everything."""
        self._queue = False  # what is given back now is not kept
        if self._timer is not None:
            self._timer.cancel()
        self._returned.clear()
        subscribers: tuple[Subscriber, ...] = (self, *self._consumers)
        for subscriber in subscribers:
            self._nodes.live_reader.forget(subscriber)

    def _return(self) -> None:
        self._timer = None
        self._hand_returned()

    def _hand_returned(self) -> None:
        while self._returned and self._hand(*self._returned[0]):
            self._returned.popleft()

    def _hand(self, record: Received, attempts: int) -> bool:
        """To the next receiver that wants it and has capacity; what no receiver wants is done with."""
        wanted = not self._consumers
        for consumer in self._consumers:
            if not consumer.link.wants(record):
                continue
            wanted = True
            if consumer.take(record, attempts):
                if consumer in self._consumers:  # it may have left by what it was given
                    del self._consumers[consumer]
                    self._consumers[consumer] = None
                return True
        return not wanted


class NodeConsumer:
    """A link's place at a node: what a group's `Membership` is in a group; the subscriber of a topic's receiver."""

    __slots__ = ("_held", "_node", "link", "lossy")

    def __init__(self, node: Node, link: NodeReceiver) -> None:
        self.link = link  # whose it is
        self.lossy = False
        self._node = node
        self._held: dict[int, tuple[Received, int]] = {}

    @property
    def demand(self) -> int:
        """The link's."""
        return self.link.demand

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """A record of a topic; see `Subscriber`."""
        return record.key != self._node.key or self.take(record, 0)

    def take(self, record: Received, attempts: int) -> bool:
        """Send a record if there is capacity."""
        self._held[id(record)] = (record, attempts)  # before the offer: the link may settle from within
        if self.link.offer_nowait(record):
            return True
        del self._held[id(record)]
        return False

    def wake(self) -> None:
        """The link has capacity again."""
        self._node.wake(self)

    def done(self, record: Received) -> None:
        """The record is settled."""
        self._held.pop(id(record), None)

    def done_all(self, records: Sequence[Received]) -> None:
        """As `done` for each."""
        for record in records:
            self._held.pop(id(record), None)

    def again(self, record: Received, *, failed: bool = True) -> None:
        """The record is not settled."""
        found = self._held.pop(id(record), None)
        if found is not None:
            self._node.give_back(record, found[1] + failed)

    def decline(self, record: Received, *, failed: bool = False, keep: bool = False) -> None:
        """The record is not for this receiver: done, or to be kept for another (which may be this one again)."""
        if keep:
            self.again(record, failed=failed)
        else:
            self.done(record)

    def has_other(self, record: Received) -> bool:
        """Whether there is another receiver."""
        return len(self._node.links) > 1

    def attempts(self, record: Received) -> int:
        """How often the record came back."""
        found = self._held.get(id(record))
        return found[1] if found is not None else 0

    def failures(self, record: Received) -> int:
        """Not counted: temporary nodes have no dead letters."""
        return 0

    async def ends(self, topic: str) -> dict[TopicPartition, int]:
        """See `LiveReader.ends`."""
        return await self._node.live_reader.ends(topic)

    def unread(self, ends: Mapping[TopicPartition, int]) -> int:
        """How many offsets below `ends` have yet to be offered, and how many records were given back."""
        return self._node.unread(self, ends)

    async def leave(self, *, failed: bool = True) -> None:
        """Give back what is unsettled."""
        self._node.leave(self)
        held, self._held = self._held, {}
        for record, attempts in held.values():
            self._node.give_back(record, attempts + 1)


class Nodes:
    """All temporary nodes of the process, or of a tenant in it; the `Fanout` of the reply topic."""

    def __init__(
        self,
        live_reader: LiveReader,
        publisher: Publisher,
        topic: str,
        random_id: Callable[[], str],
        address: str | None = None,
    ) -> None:
        """Nothing is read before the first node is made.

        `random_id` gives a name that cannot be guessed, legal in an MQTT topic. `address`: what the nodes' owners call
        the topic, where that is another name.
        """
        self.topic = topic  # the reply topic
        self.address = topic if address is None else address
        self.live_reader = live_reader
        self._publisher = publisher
        self._random_id = random_id
        self._nodes: dict[bytes | None, Node] = {}
        self._watch = LingeringWatch(live_reader, topic, self, lambda: self._nodes, linger_s=LINGER_S)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._nodes)

    def select(self, record: Received) -> Collection[tuple[Subscriber, None]]:
        """The node of the record's key."""
        node = self._nodes.get(record.key)
        return () if node is None else node.candidates

    async def create(self, owner: object, capabilities: Collection[str]) -> tuple[Node, TopicInfo]:
        """Make a node: what is stored for it from now on reaches its receivers.

        Raises:
            Refused: the reply topic is not there and may not be made, or Kafka does not answer.
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
        """The node of an address."""
        topic, slash, name = path_of(address).partition("/") if address else ("", "", "")
        return self._nodes.get(name.encode()) if slash and topic == self.address else None

    def delete(self, node: Node) -> None:
        """Its end; the links that receive from it are the caller's to detach."""
        if self._nodes.pop(node.key, None) is None:
            return
        node.close()
        self._watch.release()

    def close(self) -> None:
        """Timers end."""
        self._watch.close()
