"""What a group reader commits: by partition the first open offset, and a ledger of what is settled behind it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetMetadataTooLargeError
from aiokafka.structs import OffsetAndMetadata

from flowcontrol.offsets import LEDGER
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.kafka_consumer import commit_offsets
from gateway.kafka.groups.assignment import AssignedPartition
from gateway.kafka.groups.dispatch import Dispatch

log = logging.getLogger(__name__)

COMMIT_TIMEOUT_S: Final = 3.0
RETENTION_S: Final = 60.0
"""Between two looks whether retention has deleted what nobody selected: the group's offset follows."""


class Commits:
    """The commits of one group reader."""

    def __init__(
        self,
        group: str,  # its name
        dispatch: Dispatch,  # knows the partitions and what is settled
        lookup: Lookup,  # tells what retention has deleted
        consumer: Callable[[], AIOKafkaConsumer | None],  # the member of the group, as of now
        *,
        interval_s: float,  # the least time between two commits
    ) -> None:
        self.lock = asyncio.Lock()  # held while something is being committed, or the positions are being set
        self.count = 0  # commit requests answered, ever
        self._group = group
        self._dispatch = dispatch
        self._lookup = lookup
        self._consumer = consumer
        self._interval_s = interval_s
        self._ledgers = True  # Kafka takes metadata of their size

    async def run(self) -> None:
        """Commit what is settled, at most once an interval."""
        while True:
            await self._dispatch.progress.wait()
            try:
                await self.commit()
            except Exception:
                self._dispatch.progress.set()  # it is to be tried again
                raise
            await asyncio.sleep(self._interval_s)

    async def commit(self) -> bool:
        """Commit the settled prefixes that grew. A failure (False) is no loss: tried again, or redelivered."""
        async with self.lock:
            dispatch = self._dispatch
            dispatch.progress.clear()
            consumer = self._consumer()
            if consumer is None:
                return False
            offsets = {
                assigned: committable
                for assigned in dispatch.assignment.values()
                if (committable := self._committable(assigned)) is not None and committable != assigned.committed
            }
            if not offsets:
                return True
            try:
                async with asyncio.timeout(COMMIT_TIMEOUT_S):
                    await commit_offsets(consumer, {assigned.partition: offset for assigned, offset in offsets.items()})
            except OffsetMetadataTooLargeError as error:
                log.warning(
                    "group %s: %r; what is settled behind a gap comes again after a restart", self._group, error
                )
                self._ledgers = False
                dispatch.progress.set()
                return False
            except (KafkaError, TimeoutError) as error:
                log.info("group %s: commit failed: %r", self._group, error)
                dispatch.progress.set()
                return False
            self.count += 1
            for assigned, committed in offsets.items():
                assigned.committed = committed
            return True

    def _committable(self, assigned: AssignedPartition, settled: Collection[int] = ()) -> OffsetAndMetadata | None:
        found = assigned.committable(settled)
        return found if found is None or self._ledgers else OffsetAndMetadata(found.offset, "")

    async def follow_retention(self) -> None:
        """What retention has deleted of the records that nobody selects is not waited for."""
        while True:
            await asyncio.sleep(RETENTION_S)
            assignment = {one.partition: one for one in self._dispatch.assignment.values() if one.unselected}
            try:
                firsts = await self._lookup.beginnings(assignment, led=True) if assignment else {}
            except Refused:
                continue  # Kafka is away, or a topic: later
            for partition, first in firsts.items():
                assigned = assignment[partition]
                self._dispatch.catch_up.gone(assigned, assigned.unselected.first or 0, first)

    @contextlib.asynccontextmanager
    async def committing(
        self, settled: Mapping[AssignedPartition, Collection[int]]
    ) -> AsyncIterator[dict[TopicPartition, OffsetAndMetadata]]:
        """Let somebody else commit for the group, in a transaction, what it is about to settle.

        Nothing else is committed meanwhile: a later commit would win over the transaction's. When the block raises,
        nothing was committed as far as we know. `settled` has offsets of records that subscribers hold, by partition
        that is ours.

        Yields:
            What to commit, by partition. A record behind a gap is told by the ledger, as far as it fits.
        """
        async with self.lock:
            offsets: dict[AssignedPartition, OffsetAndMetadata] = {}
            for assigned, numbers in settled.items():
                alone = {number for number in numbers if assigned.copies.get(number, 1) == 1}
                stored = self._committable(assigned, alone)
                if stored is not None and stored != assigned.committed:
                    offsets[assigned] = stored
            yield {assigned.partition: offset for assigned, offset in offsets.items()}
            for assigned, offset in offsets.items():
                assigned.committed = offset

    async def commit_for(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit what `committing` has yielded, alone and as a member of the group: all of it or nothing.

        Raises:
            KafkaError: not committed, as far as we know.
        """
        consumer = self._consumer()
        if consumer is None:
            raise KafkaError("the group was left meanwhile")
        await commit_offsets(consumer, offsets)
        self.count += 1


def ours(stored: OffsetAndMetadata) -> OffsetAndMetadata:
    """What somebody has committed, without what is no ledger of ours."""
    return OffsetAndMetadata(stored.offset, stored.metadata if stored.metadata.startswith(LEDGER) else "")
