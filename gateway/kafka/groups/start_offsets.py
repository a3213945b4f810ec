"""Where a group starts in partitions in which it has committed nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.kafka_consumer import committed_positions

log = structlog.get_logger(__name__)

BEGINNINGS_TIMEOUT_S: Final = 1.5

LEADER_S: Final = 1.0
"""Pause before the start is looked up again in partitions that had no leader when the group was joined."""


class StartOffsets:
    """The start offsets of one group: the beginning, or the end at the time of the join, which is remembered."""

    def __init__(self, group: str, lookup: Lookup) -> None:
        # partitions without a leader, and the time (epoch ms) since when the group wants what is stored there
        self.leaderless: dict[TopicPartition, int] = {}
        self._group = group
        self._lookup = lookup
        self._latest: set[str] = set()  # topics that a new group starts at the end of
        self._given: dict[TopicPartition, int] = {}  # where a new group starts, whatever `_latest` says
        self._ends: dict[TopicPartition, int] = {}  # where these ends were
        self._lacking = asyncio.Event()  # set while partitions are leaderless

    def begin_at_end(self, topics: Iterable[str]) -> None:
        """Let a new group start at the end of these topics."""
        self._latest.update(topics)

    def begin_at(self, starts: Mapping[TopicPartition, int]) -> None:
        """Let a new group start at these offsets; of several callers' the lowest counts."""
        given = self._given
        given |= {tp: min(offset, given.get(tp, offset)) for tp, offset in starts.items()}

    def forget_unwanted(self, wanted: Collection[str]) -> None:
        """Forget topics of subscribers that have left before the group was joined for them."""
        self._latest.intersection_update(wanted)
        self._given = {tp: offset for tp, offset in self._given.items() if tp.topic in wanted}

    async def find(self, consumer: AIOKafkaConsumer, topics: frozenset[str], wanted: Collection[str]) -> None:
        """Fix where a new group starts in `topics`, before it is joined; forget topics that are not `wanted`.

        A group is new in a topic when it has committed in none of its partitions. If it has committed in some, the
        others are new partitions (or have been empty since), and are read from their beginning.

        Raises:
            KafkaError: Kafka is unreachable, or denies access.
            Refused: as for KafkaError.
        """
        given = {tp.topic for tp in self._given}
        existing = await self._lookup.existing((self._latest | given) & topics)
        partitions = [tp for tps in existing.values() for tp in tps]
        old = {tp.topic for tp in await committed_positions(consumer, partitions)}
        new = [tp for tp in partitions if tp.topic not in old]
        self._ends |= {tp: self._given[tp] for tp in new if tp in self._given}
        new = [tp for tp in new if tp not in self._given and tp.topic in self._latest]
        if new:
            called = round(time.time() * 1000)
            ends = await self._lookup.ends(new, led=True)
            self._ends |= ends
            self._note_leaderless([tp for tp in new if tp not in ends and self._lookup.has(tp)], called)
        self._latest = (self._latest - topics) & set(wanted)
        self._given = {tp: at for tp, at in self._given.items() if tp.topic in wanted and tp.topic not in topics}
        self._keep(lambda tp: tp.topic in wanted)

    def _note_leaderless(self, partitions: Collection[TopicPartition], since: int) -> None:
        if partitions:
            topic, number = next(iter(partitions))
            log.warning(
                "partitions of a group have no leader; they are read as soon as they have one",
                group=self._group,
                count=len(partitions),
                such_as=f"{topic}-{number}",
            )
            self.leaderless |= dict.fromkeys(partitions, since)
            self._lacking.set()

    async def await_leaders(self) -> dict[TopicPartition, int]:
        """Wait until some leaderless partitions have a leader again; return where the group starts in them."""
        while True:
            await self._lacking.wait()
            await asyncio.sleep(LEADER_S)
            try:
                offsets = await self._lookup.since_leaderless(self.leaderless)
            except Refused:
                continue  # Kafka is unreachable: try later
            offsets = {tp: offset for tp, offset in offsets.items() if self.leaderless.pop(tp, None) is not None}
            self._ends |= offsets
            if not self.leaderless:
                self._lacking.clear()
            if offsets:
                return offsets

    async def offsets_of(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return where the group starts in these partitions, as far as it can be found."""
        starts = {tp: self._ends[tp] for tp in partitions if tp in self._ends}
        others = [tp for tp in partitions if tp not in starts and tp not in self.leaderless]
        if others:
            try:
                async with asyncio.timeout(BEGINNINGS_TIMEOUT_S):
                    starts |= await self._lookup.beginnings(others, led=True)
            except (Refused, TimeoutError) as error:
                # aiokafka finds each beginning as soon as it can, like those of partitions without a leader.
                log.warning("cannot look up the beginnings", group=self._group, error=repr(error))
        return starts

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """Forget partitions in which the group has committed: if a commit vanishes, the partition counts as new."""
        self._keep(lambda tp: tp not in partitions)

    def forget_topic(self, topic: str) -> None:
        """Forget a recreated topic, so that all of its records are read."""
        self._keep(lambda tp: tp.topic != topic)

    def _keep(self, wanted: Callable[[TopicPartition], bool]) -> None:
        self._ends = {tp: offset for tp, offset in self._ends.items() if wanted(tp)}
        self.leaderless = {tp: since for tp, since in self.leaderless.items() if wanted(tp)}
