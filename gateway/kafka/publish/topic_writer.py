"""One topic's partition queues, and the choice among them for records without a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flowcontrol.budget import Budget
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.publish.partition_queue import PartitionQueue, QueuedTopic, WriterContext
from gateway.kafka.publish.sender_partitions import RememberedSender
from mapping.outcomes import Outcome

COMPARED: Final = 16
"""How many partitions are compared when a sender is placed: a topic may have thousands, and comparing some is nearly
as good as comparing all."""


def _load(queue: PartitionQueue) -> tuple[int, int]:
    return len(queue.full) + len(queue.in_flight), queue.open.bytes


def _load_and_senders(queue: PartitionQueue) -> tuple[int, int]:
    return len(queue.full) + queue.senders, queue.open.bytes


class TopicWriter(QueuedTopic):
    """The partition queues of one topic."""

    def __init__(self, info: TopicInfo, context: WriterContext, budget: Budget) -> None:
        super().__init__(info, context, budget)
        # by partition number
        self.queues = [PartitionQueue(self, number) for number in range(info.partitions)]
        self._filling: PartitionQueue | None = None

    def update(self, info: TopicInfo) -> None:
        """Apply changed partitions, leaders and limits.

        A re-created topic may have fewer partitions; batches for those that no longer exist are placed again.
        """
        self.info = info
        dissolved = self.queues[info.partitions :]
        if info.partitions != len(self.queues):
            del self.queues[info.partitions :]
            self.queues.extend(PartitionQueue(self, number) for number in range(len(self.queues), info.partitions))
            self._filling = None
        for queue in self.queues:
            queue.set_led(not info.available or queue.number in info.available)
        for queue in dissolved:
            self.context.replace(self.name, queue.number, queue.dissolve())

    def fail(self, outcome: Outcome) -> None:
        """Settle all records in the queues with `outcome`: the topic was deleted or is forbidden."""
        self.gone = outcome
        for queue in self.queues:
            queue.shut = True  # its senders are placed again once the topic exists
            queue.expire_in_flight()

    def place(self, sender: RememberedSender | None) -> PartitionQueue:
        """Choose the queue for records without a key of `sender`, or of no particular sender (None).

        A lasting sender gets its former partition, or else the one with the fewest waiting batches and senders. Others
        fill the batch that is being filled already, or else go where the fewest batches wait.
        """
        former = None if sender is None else sender.former(self.name)
        if former is not None and not (successor := self.successor(former)).shut:
            queue = successor
        elif sender is not None and sender.lasting:
            queue = self._least(_load_and_senders, sender.hint)
        else:
            filling = self._filling
            if filling is None or filling.shut or filling.full or not filling.open.count:
                filling = self._filling = self._least(_load, None)
            queue = filling
        if sender is not None:
            sender.assign(self.name, queue)
        return queue

    def successor(self, number: int) -> PartitionQueue:
        """Return a partition's queue; if it no longer exists, the one to which its senders and batches move."""
        return self.queues[number % len(self.queues)]

    def _least(self, load: Callable[[PartitionQueue], tuple[int, int]], hint: int | None) -> PartitionQueue:
        """Return the queue with the least load; among equals the first, starting at `hint` or at random."""
        numbers = self.info.available or range(len(self.queues))
        count = len(numbers)
        first = self.context.rng.randrange(count) if hint is None else hint
        return min((self.queues[numbers[(first + step) % count]] for step in range(min(count, COMPARED))), key=load)

    async def abandon(self) -> None:
        """Settle all records as BUSY now."""
        for queue in self.queues:
            await queue.abandon()
