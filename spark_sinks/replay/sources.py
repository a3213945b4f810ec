"""Sources of replayed records: a range of the log, or dead letters. Each yields slices for one transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import Final, Protocol

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition

from spark_sinks.replay.items import Item, NotReplayableError, Place, item_of, of_letter
from spark_sinks.replay.kafka import CommittedReader, LogReader, ReplayTarget, partitions_of
from spark_sinks.replay.order import OffsetBits, in_order
from spark_sinks.spec.replays import DlqReplay, Replay

SLICE_BYTES: Final = 8 << 20
MOST_TOGETHER: Final = 50_000
"""The most dead letters with the same timestamp that are sorted together."""


class Slice(msgspec.Struct):
    """The records of one transaction."""

    items: list[Item]
    positions: dict[Place, int]  # next offsets after this slice
    unfit: list[str]  # one sentence per record that cannot be replayed
    repeated: int = 0  # skipped: a dead letter of the same record came before
    left: int = 0  # upper limit of the records after it


class ReplaySource(Protocol):
    """A source of records to replay."""

    began: dict[Place, int]

    def slices(self, records: int) -> AsyncIterator[Slice]:
        """Yield slices of about `records` records each; the last one may be empty."""
        ...


class SourceError(RuntimeError):
    """The records to replay cannot be read; the message says why."""


class LogItems:
    """A range of the log.

    Attributes:
        began: the start offsets of the first run.
    """

    def __init__(self, began: dict[Place, int], reader: LogReader) -> None:
        self.began = began
        self._reader = reader

    async def slices(self, records: int) -> AsyncIterator[Slice]:
        """Yield the records in order, at most `records` at a time."""
        merge = self._reader.merge
        noted = dict(merge.positions)
        while await self._reader.next_time() is not None:
            part = await self._slice(records)
            noted = part.positions
            part.unfit += self._unreadable()
            yield part
        if merge.positions != noted:  # offsets after the last record that hold no records
            yield Slice([], dict(merge.positions), self._unreadable())

    def _unreadable(self) -> list[str]:
        return [str(gap) for gap in self._reader.unreadable()]

    async def _slice(self, records: int) -> Slice:
        merge, items, size = self._reader.merge, list[Item](), 0
        while len(items) < records and size < SLICE_BYTES and await self._reader.next_time() is not None:
            items.append(item_of(merge.pop()))
            size += len(items[-1].value or b"")
        return Slice(items, dict(merge.positions), [], left=merge.left)


class LetterItems(LogItems):
    """Dead letters: only the first of each original record, in the order of the original partitions.

    The dead letters of one original partition were written in order, so their times are in order too, even if they are
    in several partitions of the dead-letter topic. So a slice has all dead letters of a millisecond, and sorts them.
    """

    def __init__(self, job: DlqReplay, began: dict[Place, int], reader: LogReader, seen: OffsetBits) -> None:
        super().__init__(began, reader)
        self._job = job
        self._seen = seen

    async def _slice(self, records: int) -> Slice:
        merge, part, size = self._reader.merge, Slice([], {}, []), 0
        taken, last = 0, -1
        while (time := await self._reader.next_time()) is not None:
            if (taken >= records or size >= SLICE_BYTES) and (time != last or taken >= MOST_TOGETHER):
                break
            record = merge.pop()
            taken, last, size = taken + 1, time, size + len(record.value or b"")
            try:
                item = letter(self._job, record)
            except NotReplayableError as error:
                part.unfit.append(f"{record.topic}-{record.partition} at {record.offset}: {error}")
                continue
            if item is None:
                continue
            if self._seen.add(item.place, item.offset):
                part.items.append(item)
            else:
                part.repeated += 1
        part.items = list(in_order(part.items))
        part.positions, part.left = dict(merge.positions), merge.left
        return part


def letter(job: DlqReplay, record: object) -> Item | None:
    """Return the original record of a dead letter; None if the job excludes it. Raises NotReplayableError."""
    item = of_letter(record, anywhere=job.sink.kafka is not None)
    return item if not job.source.of or item.topic in job.source.of else None


async def of_log(
    job: Replay | DlqReplay,
    consumer: CommittedReader,
    sources: Mapping[str, ReplayTarget],
    *,
    began: Mapping[Place, int],
    positions: Mapping[Place, int],
    say: Callable[[str], None],
) -> LogItems:
    """Open the source of a job at the position in its ledger entry.

    Args:
        job: the job.
        consumer: a started consumer; its assignment is changed.
        sources: the source topics.
        began: start offsets of the first run; empty if this is the first.
        positions: end offsets of the last run.
        say: called with messages for people.

    Raises:
        SourceError: a topic was re-created since the last run.
    """
    first, ends = await _range(job, consumer, sources)
    begins = {place: positions.get(place, offset) for place, offset in first.items()}
    oldest = await consumer.beginning_offsets(partitions_of(begins))
    newest = await consumer.end_offsets(partitions_of(begins))
    for place, begin in begins.items():
        partition = TopicPartition(*place)
        if place in positions and begin > newest[partition]:
            raise SourceError(
                f"{place.topic}-{place.partition} ends at {newest[partition]}, before {begin}, where {job.name} is: "
                "the topic was re-created; use another name for the replay"
            )
        if begin < oldest[partition]:
            if place in positions or (isinstance(job, Replay) and job.source.offsets):
                gone = oldest[partition] - begin
                say(f"{place.topic}-{place.partition}: {gone:,} offsets were deleted before they were replayed")
            begins[place] = oldest[partition]
        ends[place] = max(begins[place], ends[place])
    beginning = {**begins, **began}
    if isinstance(job, Replay):
        return LogItems(beginning, LogReader(consumer, begins, ends))
    seen = await _seen(
        job, consumer, {place: max(beginning[place], oldest[TopicPartition(*place)]) for place in begins}, begins
    )
    return LetterItems(job, beginning, LogReader(consumer, begins, ends), seen)


async def _seen(
    job: DlqReplay, consumer: CommittedReader, began: Mapping[Place, int], positions: Mapping[Place, int]
) -> OffsetBits:
    """Read the dead letters of earlier runs again, to find the original records that were already replayed."""
    seen = OffsetBits()
    async for record in LogReader(consumer, began, positions).records():
        try:
            item = letter(job, record)
        except NotReplayableError:
            continue
        if item is not None:
            seen.add(item.place, item.offset)
    return seen


async def _range(
    job: Replay | DlqReplay, consumer: AIOKafkaConsumer, sources: Mapping[str, ReplayTarget]
) -> tuple[dict[Place, int], dict[Place, int]]:
    """Return each partition's first and end offset, from the job's range and the present log."""
    offsets = job.source.offsets if isinstance(job, Replay) else {}
    places = [
        Place(topic, number)
        for topic in job.source.topics
        for number in range(sources[topic].partitions)
        if topic not in offsets or number in offsets[topic]
    ]
    partitions = partitions_of(places)
    ends = await consumer.end_offsets(partitions)
    begins = await consumer.beginning_offsets(partitions)
    if job.source.since is not None:
        begins = {**begins, **await _at(consumer, partitions, job.source.since, ends)}
    if job.source.until is not None:
        ends = {**ends, **await _at(consumer, partitions, job.source.until, ends)}
    first = {place: begins[TopicPartition(*place)] for place in places}
    last = {place: ends[TopicPartition(*place)] for place in places}
    for topic, numbers in offsets.items():
        for number, (begin, behind) in numbers.items():
            place = Place(topic, number)
            if place not in first:
                raise SourceError(f"offsets.{topic}.{number}: {topic} has only {sources[topic].partitions} partitions")
            first[place], last[place] = begin, min(behind, last[place])
    return first, last


async def _at(
    consumer: AIOKafkaConsumer, partitions: list[TopicPartition], moment: datetime, ends: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Return each partition's first offset with this timestamp or a later one; its end if there is none."""
    asked = dict.fromkeys(partitions, round(moment.timestamp() * 1000))
    offsets = await consumer.offsets_for_times(asked)
    return {
        partition: ends[partition] if at is None else min(at.offset, ends[partition])
        for partition, at in offsets.items()
    }
