"""Senders of records: all records of a sender without a key go to one partition of each topic, in order.

A sender is an AMQP connection (or one of its links), an HTTP request, an upload or a WebSocket. `TopicWriter.place`
chooses its partition for its first record in a topic. The sender keeps the partition; one with a name gets it again
when it comes back. It is moved only when the partition has no leader and no batches left here, or when the topic was
re-created without that partition; then all senders and waiting batches of the partition move to the same other one.
"""

from __future__ import annotations

from typing import Final

import msgspec
from aiokafka.partitioner import murmur2

from gateway.kafka.publish.partition_queue import PartitionQueue
from gateway.runtime.recent import Recent

REMEMBERED: Final = 16_384
"""How many partitions of senders that left are remembered (about 3 MB). The oldest is forgotten first."""


class RememberedSender(msgspec.Struct, eq=False, kw_only=True):
    """One sender; `Places.sender` creates one that is remembered. `leave` must be called if it is lasting."""

    lasting: bool = False  # will send for some time, so it counts in `PartitionQueue.senders`
    name: tuple[str, ...] = ()
    places: Places | None = None
    # its queue for records without a key, by topic; a cache for the hot path, filled by `TopicWriter.place`
    queues: dict[str, PartitionQueue] = {}

    @property
    def hint(self) -> int | None:
        """A hash of the sender's name, the same at every gateway; None without a name."""
        return murmur2("\0".join(self.name).encode()) if self.name else None

    def former(self, topic: str) -> int | None:
        """Return the sender's last partition of a topic, or None when unknown."""
        queue = self.queues.get(topic)
        if queue is not None:
            return queue.number
        return None if self.places is None else self.places.get(hash((self.name, topic)))

    def assign(self, topic: str, queue: PartitionQueue) -> None:
        """Assign a queue to this sender."""
        former = self.queues.get(topic)
        self.queues[topic] = queue
        if self.lasting:
            queue.senders += 1
            if former is not None:
                former.senders -= 1

    def leave(self) -> None:
        """Remove the sender and remember its partitions. Its held records may still be placed afterwards."""
        for topic, queue in self.queues.items():
            if self.lasting:
                queue.senders -= 1
            if self.places is not None:
                self.places[hash((self.name, topic))] = queue.number
        self.queues.clear()
        self.lasting = False


class Places(Recent[int, int]):
    """The partitions of senders with a name, for when they attach again.

    By the hash of name and topic: a collision is harmless, as one sender gets the other's partition.
    """

    def __init__(self) -> None:
        super().__init__(REMEMBERED)

    def sender(self, *name: str) -> RememberedSender:
        """Create a lasting sender with this name."""
        return RememberedSender(lasting=True, name=name, places=self)
