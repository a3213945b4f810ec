"""Who sends records: those of one sender without a key lie in one partition of each topic, in order.

A sender is an AMQP link, an HTTP request, an upload, a WebSocket. `TopicWriter.place` chooses its partition with
its first record there. It keeps it for as long as there is that partition, and a link also when it comes back under its
name; it is given another only when its partition has no leader and nothing is on the way there any more, or when the
topic was made anew without it: then all of that partition's senders, and what waited for it, go on in one other.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from gateway.kafka.publish.murmur2 import murmur2
from gateway.kafka.publish.partition_queue import PartitionQueue

REMEMBERED: Final = 16_384
"""Places of links that have left: about 3 MB. Whoever left first is forgotten first, and is placed anew."""


class Sender:
    """One sender."""

    __slots__ = ("_name", "_places", "lasting", "queues")

    def __init__(self, *, lasting: bool = False, name: tuple[str, ...] = (), places: Places | None = None) -> None:
        """A sender whose place nobody remembers, unless `Places` makes it; a lasting one must `leave`."""
        # where its records without a key go, by topic; read it first on the hot path, then ask `TopicWriter.place`
        self.queues: dict[str, PartitionQueue] = {}
        self.lasting = lasting  # it counts among the senders of its partitions: it will send more for some time
        self._name = name
        self._places = places

    @property
    def hint(self) -> int | None:
        """The same number whenever the sender comes, here and at any other gateway; None without a name."""
        return murmur2("\0".join(self._name).encode()) if self._name else None

    def former(self, topic: str) -> int | None:
        """The partition that it had, if that is known."""
        queue = self.queues.get(topic)
        if queue is not None:
            return queue.number
        return None if self._places is None else self._places.find(self._name, topic)

    def settle_in(self, topic: str, queue: PartitionQueue) -> None:
        """It was given a place."""
        former = self.queues.get(topic)
        self.queues[topic] = queue
        if self.lasting:
            queue.senders += 1
            if former is not None:
                former.senders -= 1

    def leave(self) -> None:
        """It sends no more; what is held for it may still be placed, where it was."""
        for topic, queue in self.queues.items():
            if self.lasting:
                queue.senders -= 1
            if self._places is not None:
                self._places.remember(self._name, topic, queue.number)
        self.queues.clear()
        self.lasting = False


class Places:
    """Remembers where senders with a name were, for when they come back."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        # By the hash of name and topic: should two ever have the same, one is placed where the other was.
        self._numbers: OrderedDict[int, int] = OrderedDict()

    def sender(self, *name: str) -> Sender:
        """A lasting sender of this name."""
        return Sender(lasting=True, name=name, places=self)

    def find(self, name: tuple[str, ...], topic: str) -> int | None:
        """The partition of `topic` in which that sender was last."""
        return self._numbers.get(hash((name, topic)))

    def remember(self, name: tuple[str, ...], topic: str, number: int) -> None:
        """That sender leaves the partition `number` of `topic`."""
        place = hash((name, topic))
        self._numbers[place] = number
        self._numbers.move_to_end(place)
        if len(self._numbers) > REMEMBERED:
            self._numbers.popitem(last=False)
