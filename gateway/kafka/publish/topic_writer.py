"""One topic's partition queues, and which of them takes a record without a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flowcontrol.budget import Budget
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.publish.partition_queue import PartitionQueue, QueuedTopic, WriterContext
from gateway.kafka.publish.sender_partitions import Sender
from mapping.outcomes import Outcome

LOOKED_AT: Final = 16
"""How many partitions are compared when a sender is placed: a topic may have thousands, and a choice among some is
nearly as good as one among all."""


def _load(queue: PartitionQueue) -> tuple[int, int]:
    return len(queue.full) + len(queue.in_flight), queue.open.bytes


def _load_and_senders(queue: PartitionQueue) -> tuple[int, int]:
    return len(queue.full) + queue.senders, queue.open.bytes


class TopicWriter:
    """The queues of one topic and the choice between them."""

    def __init__(self, info: TopicInfo, context: WriterContext, budget: Budget) -> None:
        self.topic = QueuedTopic(info, context, budget)  # what they share
        self.name = info.name  # the topic's
        self.info = info  # what is known of it
        self._context = context
        # by the number of the partition
        self.queues = [PartitionQueue(self.topic, number) for number in range(info.partitions)]
        self._filling: PartitionQueue | None = None

    def update(self, info: TopicInfo) -> None:
        """The topic has changed: its partitions, leaders, limits.

        It has fewer partitions when it was deleted and made again: what waits for one that is no more is placed anew.
        """
        self.info = info
        self.topic.update(info)
        dissolved = self.queues[info.partitions :]
        if info.partitions != len(self.queues):
            del self.queues[info.partitions :]
            self.queues.extend(
                PartitionQueue(self.topic, number) for number in range(len(self.queues), info.partitions)
            )
            self._filling = None
        for queue in self.queues:
            queue.lead(not info.available or queue.number in info.available)
        for queue in dissolved:
            self._context.replace(self.name, queue.number, queue.dissolve())

    def vanish(self, outcome: Outcome) -> None:
        """The topic is gone or forbidden: everything in the queues gets `outcome`."""
        self.topic.gone = outcome
        for queue in self.queues:
            queue.shut = True  # its senders are placed anew when there is such a topic again
            queue.lose_patience()

    def place(self, sender: Sender | None) -> PartitionQueue:
        """Where records without a key go that `sender` sends; None: one for which it does not matter.

        One that lasts goes where it was before, else where the fewest batches wait and senders are. A request's go with
        what is being gathered for the next batch, else where the fewest batches wait.
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
            sender.settle_in(self.name, queue)
        return queue

    def successor(self, number: int) -> PartitionQueue:
        """The queue of a partition; where its senders go, and what waited for it, when there is none any more."""
        return self.queues[number % len(self.queues)]

    def _least(self, load: Callable[[PartitionQueue], tuple[int, int]], hint: int | None) -> PartitionQueue:
        """The queue with the least load; among equals the first from that of `hint` on, or from any."""
        numbers = self.info.available or range(len(self.queues))
        count = len(numbers)
        first = self._context.rng.randrange(count) if hint is None else hint
        return min((self.queues[numbers[(first + step) % count]] for step in range(min(count, LOOKED_AT))), key=load)

    async def abandon(self) -> None:
        """Settle everything BUSY, now."""
        for queue in self.queues:
            await queue.abandon()
