"""Wakes readers that have read everything when more is stored; the live reader waits for all of them.

A consumer that waits by itself polls its broker twice a second. A thousand of them would keep a gateway busy for
nothing. Here they sleep, and the live reader, which reads each watched topic once for the whole process, wakes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from aiokafka import TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Fanout, Refused
from gateway.kafka.read.live_reader import LiveReader
from mapping.outcomes import Outcome
from mapping.record import Received

LINGER_S: Final = 5.0  # how long a topic without sleepers is still watched: most readers come back immediately


class Arrivals(Fanout, msgspec.Struct, eq=False):
    """The sleeping readers, by partition. A fan-out of the live reader that never accepts a record."""

    _live_reader: LiveReader  # it and the look-up are stopped by their owner
    _lookup: Lookup
    _waiting: dict[str, dict[int, set[asyncio.Event]]] = {}  # by topic and partition
    _partitions: dict[asyncio.Event, tuple[TopicPartition, ...]] = {}
    _tailed: set[str] = set()
    _lingering: dict[str, asyncio.TimerHandle] = {}

    @property
    def sleepers(self) -> int:
        """How many readers sleep: they will be woken, and send no requests to Kafka."""
        return len(self._partitions)

    async def wait_for(self, sleeper: asyncio.Event, positions: Mapping[TopicPartition, int]) -> bool:
        """Arrange for `sleeper` to be set, once, when a record is stored at or behind one of its `positions`.

        A partition without a leader stores nothing. Records from before are found by the reader's own check when it has
        a leader again.

        Returns:
            False when such a record is stored already; then the sleeper is not registered.

        Raises:
            Refused: a topic no longer exists, or Kafka does not answer; then the sleeper is not registered.
        """
        self._add(sleeper, tuple(positions))
        try:
            new = {partition.topic for partition in positions} - self._tailed
            if new:
                starts = await self._live_reader.watch_all(new, self)
                self._tailed |= starts
                if new != starts:
                    raise Refused(Outcome.UNKNOWN_TOPIC, f"topic {min(new - starts)!r} does not exist any more")
            ends = await self._lookup.ends(positions, led=True)
            if gone := [tp for tp in positions if tp not in ends and not self._lookup.has(tp)]:
                raise Refused(Outcome.UNKNOWN_TOPIC, f"topic {gone[0].topic!r} does not exist any more")
        except BaseException:
            self.forget(sleeper)
            raise
        # From here on the live reader wakes the sleeper; records from before lie below these ends.
        if sleeper not in self._partitions or any(end > positions[partition] for partition, end in ends.items()):
            self.forget(sleeper)
            return False
        return True

    def may_have_more(self, positions: Mapping[TopicPartition, int]) -> bool:
        """Whether the log may end beyond `positions` though no record arrived, as with open transactions.

        This sends no request: it compares with the ends in the live reader's last fetch, a moment ago.
        """
        return any(self._live_reader.end(partition) != position for partition, position in positions.items())

    def forget(self, sleeper: asyncio.Event) -> None:
        """Remove a sleeper."""
        for partition in self._partitions.pop(sleeper, ()):
            waiting = self._waiting[partition.topic]
            waiting[partition.partition].discard(sleeper)
            if not waiting[partition.partition]:
                del waiting[partition.partition]
            if not waiting:
                self._lingering[partition.topic] = asyncio.get_running_loop().call_later(
                    LINGER_S, self._unwatch, partition.topic
                )

    def select(self, records: Sequence[Received], at: int) -> tuple[tuple[()], int]:
        """Wake the sleepers of the records' partition; see `contracts.Fanout`."""
        record = records[at]
        for sleeper in tuple(self._waiting.get(record.topic, {}).get(record.partition, ())):
            self.forget(sleeper)
            sleeper.set()
        return (), len(records) - at

    def stop(self) -> None:
        """Stop watching; sleepers are no longer woken."""
        for topic, timer in self._lingering.items():
            timer.cancel()
            self._live_reader.unwatch(topic, self)
        self._lingering.clear()

    def _add(self, sleeper: asyncio.Event, partitions: tuple[TopicPartition, ...]) -> None:
        assert sleeper not in self._partitions, "waits already"
        self._partitions[sleeper] = partitions
        for partition in partitions:
            self._waiting.setdefault(partition.topic, {}).setdefault(partition.partition, set()).add(sleeper)
            timer = self._lingering.pop(partition.topic, None)
            if timer is not None:
                timer.cancel()

    def _unwatch(self, topic: str) -> None:
        del self._lingering[topic]
        del self._waiting[topic]
        self._tailed.discard(topic)
        self._live_reader.unwatch(topic, self)
