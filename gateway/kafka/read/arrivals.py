"""Wakes readers that have read everything when more is stored; the live reader waits for all of them.

A consumer that waits by itself asks its broker twice a second. A thousand of them would keep a gateway busy with
nothing. Here they sleep, and the live reader, which reads each watched topic once for the whole process, wakes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final

from aiokafka import TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused, Subscriber
from gateway.kafka.read.live_reader import LiveReader
from mapping.outcomes import Outcome
from mapping.record import Received

LINGER_S: Final = 5.0  # a topic that nobody waits for is still watched for so long: most readers come back at once


class Arrivals:
    """Who waits for which partitions. A fan-out of the live reader that never takes a record."""

    def __init__(self, live_reader: LiveReader, lookup: Lookup) -> None:
        """Nothing is watched before somebody waits; neither is stopped by us."""
        self._live_reader = live_reader
        self._lookup = lookup
        self._waiting: dict[tuple[str, int], set[asyncio.Event]] = {}
        self._partitions: dict[asyncio.Event, tuple[TopicPartition, ...]] = {}
        self._asleep: set[asyncio.Event] = set()
        self._counts: dict[str, int] = {}  # by topic: of pairs of a partition and a sleeper
        self._tailed: set[str] = set()
        self._lingering: dict[str, asyncio.TimerHandle] = {}

    @property
    def sleepers(self) -> int:
        """How many readers sleep: they will be woken, and ask Kafka nothing."""
        return len(self._asleep)

    async def wait_for(self, sleeper: asyncio.Event, positions: Mapping[TopicPartition, int]) -> bool:
        """Have `sleeper` set, once, when something is stored at or behind its `positions`.

        Nothing is stored in a partition without a leader; what was stored in it before is found when it has one again,
        by who looks.

        Returns:
            False when that is there already; the sleeper is not waited for then.

        Raises:
            Refused: a topic is gone, or Kafka does not answer; the sleeper is not waited for then.
        """
        self._add(sleeper, tuple(positions))
        try:
            new = {partition.topic for partition in positions} - self._tailed
            if new:
                found = await self._live_reader.watch_all(new, self)
                self._tailed |= found
                if new != found:
                    raise Refused(Outcome.UNKNOWN_TOPIC, f"topic {min(new - found)!r} does not exist any more")
            ends = await self._lookup.ends(positions, led=True)
            if gone := [place for place in positions if place not in ends and not self._lookup.has(place)]:
                raise Refused(Outcome.UNKNOWN_TOPIC, f"topic {gone[0].topic!r} does not exist any more")
        except BaseException:
            self.forget(sleeper)
            raise
        # From the watch on the live reader tells; what was stored before it lies below these ends.
        if sleeper not in self._partitions or any(end > positions[partition] for partition, end in ends.items()):
            self.forget(sleeper)
            return False
        self._asleep.add(sleeper)
        return True

    def may_have_more(self, positions: Mapping[TopicPartition, int]) -> bool:
        """Whether the log may not end at `positions`, though nothing arrived: records of open transactions do not.

        Nobody is asked: it is what the live reader's last fetch has said, a moment ago.
        """
        return any(self._live_reader.end(partition) != position for partition, position in positions.items())

    def forget(self, sleeper: asyncio.Event) -> None:
        """It does not wait any more."""
        self._asleep.discard(sleeper)
        for partition in self._partitions.pop(sleeper, ()):
            place = (partition.topic, partition.partition)
            waiting = self._waiting[place]
            waiting.discard(sleeper)
            if not waiting:
                del self._waiting[place]
            self._counts[partition.topic] -= 1
            if not self._counts[partition.topic]:
                self._lingering[partition.topic] = asyncio.get_running_loop().call_later(
                    LINGER_S, self._unwatch, partition.topic
                )

    def select(self, record: Received) -> Collection[tuple[Subscriber, None]]:
        """See `contracts.Fanout`: wakes who waits for the record's partition."""
        waiting = self._waiting.get((record.topic, record.partition))
        if waiting is not None:
            for sleeper in tuple(waiting):
                self.forget(sleeper)
                sleeper.set()
        return ()

    def stop(self) -> None:
        """Nobody is woken any more."""
        for topic, timer in self._lingering.items():
            timer.cancel()
            self._live_reader.unwatch(topic, self)
        self._lingering.clear()

    def _add(self, sleeper: asyncio.Event, partitions: tuple[TopicPartition, ...]) -> None:
        assert sleeper not in self._partitions, "waits already"
        self._partitions[sleeper] = partitions
        for partition in partitions:
            self._waiting.setdefault((partition.topic, partition.partition), set()).add(sleeper)
            self._counts[partition.topic] = self._counts.get(partition.topic, 0) + 1
            timer = self._lingering.pop(partition.topic, None)
            if timer is not None:
                timer.cancel()

    def _unwatch(self, topic: str) -> None:
        del self._lingering[topic]
        del self._counts[topic]
        self._tailed.discard(topic)
        self._live_reader.unwatch(topic, self)
