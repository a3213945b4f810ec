"""The commits of a group reader: per partition the first open offset, a ledger of what is settled behind it, and marks.

The marks say how often open records came back, and up to which offset records are in the hands of subscribers
(`flowcontrol.marks`). The next owner of the partition, perhaps after a crash, continues to count.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from typing import Any, Final

import msgspec
import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError, KafkaError, OffsetMetadataTooLargeError
from aiokafka.structs import OffsetAndMetadata

from flowcontrol.bucket import Bucket
from flowcontrol.offsets import LEDGER
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.kafka_consumer import commit_offsets, next_offset
from gateway.kafka.groups.delivery.assignment import AssignedPartition
from gateway.kafka.groups.delivery.dispatch import Dispatch

log = structlog.get_logger(__name__)

COMMIT_INTERVAL_S: Final = 1.0  # the time between two commits of a busy group
EARLY_S: Final = 0.05  # the least time between two commits of a group that settles little
LITTLE: Final = 100  # offsets that a commit passes; more is not little
BUILDS: Final = 50  # the time between two commits is at least this many times the time to build one
EARLY_RATE: Final = 200.0  # commits a second in all groups of the process that may be early
COMMIT_TIMEOUT_S: Final = 3.0
LEFT_GROUP: Final = "this member has left the group"
RETENTION_S: Final = 60.0
"""Pause between two checks for unselected records that retention has deleted, so that the committed offset follows."""


class Commits(msgspec.Struct, eq=False):
    """The commits of one group reader."""

    _group: str  # its name
    _dispatch: Dispatch  # has the partitions and their settled records
    _lookup: Lookup  # finds what retention has deleted
    _consumer: Callable[[], AIOKafkaConsumer | None]  # returns the current member of the group
    _early: Bucket  # all groups' early commits share it
    # held during a commit, and while the positions are being set
    lock: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    count: int = 0  # commit requests answered so far
    _ledgers: bool = True  # Kafka accepts metadata of their size
    _passed: int = 0  # how many offsets the last commit passed
    _build_s: float = 0.0  # the time that it took to build

    @property
    def works(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        """The tasks of a reader that commits."""
        return self.run, self.follow_handed_out, self.follow_retention

    async def run(self) -> None:
        """Commit settled records: soon if they are few, so that a crash brings few again; else once a second."""
        while True:
            await self._dispatch.progress.wait()
            try:
                await self.commit()
            except Exception:
                self._dispatch.progress.set()  # so that it is tried again
                raise
            await asyncio.sleep(self._pause())

    def _pause(self) -> float:
        """Return the seconds until the next commit."""
        now = time.monotonic()
        if self._passed > LITTLE or self._early.level(now) < 1:
            return COMMIT_INTERVAL_S
        self._early.spend(1, now)
        return min(COMMIT_INTERVAL_S, max(EARLY_S, BUILDS * self._build_s))

    async def follow_handed_out(self) -> None:
        """Commit which records subscribers hold for longer than the interval, though nothing is settled."""
        handed_out = self._dispatch.handed_out
        while True:
            await handed_out.wait()
            handed_out.clear()
            await asyncio.sleep(COMMIT_INTERVAL_S)
            self._dispatch.progress.set()

    async def commit(self, *, again: bool = False) -> bool:
        """Commit the settled prefixes that grew, or all of them `again`.

        After a failure (False) it is tried again, or records come again.
        """
        async with self.lock:
            dispatch = self._dispatch
            dispatch.progress.clear()
            consumer = self._consumer()
            if consumer is None:
                return False
            began = time.monotonic()
            self.pass_markers()
            offsets = self._grown(dict.fromkeys(dispatch.assignment.values(), ()), again=again)
            self._build_s = time.monotonic() - began
            self._passed = sum(
                offset.offset - assigned.committed.offset for assigned, offset in offsets.items() if assigned.committed
            )
            if not offsets:
                return True
            try:
                async with asyncio.timeout(COMMIT_TIMEOUT_S):
                    await commit_offsets(consumer, {assigned.partition: offset for assigned, offset in offsets.items()})
            except OffsetMetadataTooLargeError as error:
                log.warning(
                    "records settled behind a gap will be redelivered after a restart",
                    group=self._group,
                    error=repr(error),
                )
                self._ledgers = False
                dispatch.progress.set()
                return False
            except (KafkaError, TimeoutError) as error:
                log.warning("a commit has failed", group=self._group, error=repr(error))
                dispatch.progress.set()
                return False
            self.count += 1
            for assigned, committed in offsets.items():
                assigned.committed = committed
            return True

    def pass_markers(self) -> None:
        """Follow the consumer past transaction markers and aborted records, or the group's lag would never be 0."""
        dispatch, consumer = self._dispatch, self._consumer()
        if consumer is None or dispatch.suspended:
            return
        for partition, assigned in dispatch.assignment.items():
            position = next_offset(consumer, partition)
            if position is not None and assigned.position is not None and position > assigned.position:
                assigned.position = position
                dispatch.progress.set()

    def _grown(
        self, partitions: Mapping[AssignedPartition, Collection[int]], *, again: bool = False
    ) -> dict[AssignedPartition, OffsetAndMetadata]:
        """Return the offsets that differ from what is committed, or all `again`, as if these records were settled."""
        offsets = {}
        handed_out = _ends_handed_out(self._dispatch)
        for assigned, settled in partitions.items():
            last = {one for one in settled if assigned.copies.get(one, 1) == 1}
            end = assigned.committable(last, handed_out.get(assigned, 0))
            if end is not None and not self._ledgers:
                end = OffsetAndMetadata(end.offset, "")
            if end is not None and (again or end != assigned.committed):
                offsets[assigned] = end
        return offsets

    async def follow_retention(self) -> None:
        """Drop unselected records that retention has deleted, so that commits do not wait for them."""
        while True:
            await asyncio.sleep(RETENTION_S)
            assignment = {one.partition: one for one in self._dispatch.assignment.values() if one.unselected}
            try:
                firsts = await self._lookup.beginnings(assignment, led=True) if assignment else {}
            except Refused:
                continue  # Kafka or a topic is unreachable: try later
            for partition, first in firsts.items():
                assigned = assignment[partition]
                self._dispatch.catch_up.note_deleted(assigned, assigned.unselected.first or 0, first)

    @contextlib.asynccontextmanager
    async def committing(
        self, settled: Mapping[AssignedPartition, Collection[int]]
    ) -> AsyncIterator[dict[TopicPartition, OffsetAndMetadata]]:
        """Let a transaction commit for the group the records that it is about to settle.

        No other commit is made meanwhile: a later commit would override the transaction's. When the block raises, we
        assume that nothing was committed. `settled` has the offsets of records that subscribers hold, by partition that
        is assigned here.

        Yields:
            The offsets to commit, by partition. The ledger lists records settled behind a gap, as far as they fit.

        Raises:
            CommitFailedError: a partition was lost before its turn: another member may have settled its records.
        """
        async with self.lock:
            if not all(assigned.ours for assigned in settled):
                raise CommitFailedError("a partition was lost")
            offsets = self._grown(settled)
            yield {assigned.partition: offset for assigned, offset in offsets.items()}
            for assigned, offset in offsets.items():
                assigned.committed = offset

    async def commit_for(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit the offsets that `committing` yielded, alone and as a member of the group: all of them or none.

        Raises:
            KafkaError: as far as we know nothing was committed.
        """
        consumer = self._consumer()
        if consumer is None:
            raise KafkaError(LEFT_GROUP)
        await commit_offsets(consumer, offsets)
        self.count += 1


def _ends_handed_out(dispatch: Dispatch) -> dict[AssignedPartition, int]:
    """Return, by partition, the offset below which records were handed out; empty while no subscriber holds any."""
    if not any(member.held for member in dispatch.members.values()):
        return {}
    ends = {assigned: assigned.position for assigned in dispatch.assignment.values() if assigned.position is not None}
    for pool in dispatch.ready.pools:
        for delivery in pool.ready:
            if delivery.turn > pool.handed_out and delivery.record.offset < ends.get(delivery.assigned, 0):
                ends[delivery.assigned] = delivery.record.offset
    return ends


def without_foreign_metadata(stored: OffsetAndMetadata) -> OffsetAndMetadata:
    """Return a committed offset, without metadata that is not Trivium's."""
    return OffsetAndMetadata(stored.offset, stored.metadata if stored.metadata.startswith(LEDGER) else "")
