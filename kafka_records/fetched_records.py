"""Convert what an aiokafka consumer fetches directly to `Received`, and step over what nothing can read.

aiokafka makes a `ConsumerRecord` of each record, by a generator, two methods and a dataclass: most of the cost of
reading one. Here `Received` is made directly from the output of its compiled parser. Besides, aiokafka's generator is a
reference cycle around the whole fetch, which only the garbage collector frees unless it is exhausted (ADR 0030).

aiokafka raises where it cannot parse a batch, and again at each later attempt: one batch would stop its reader for
ever. Here such a batch is parsed by `record_batch`. If that fails, too, it is fetched again, since a wrong checksum may
come from the network, and then stepped over (ADR 0092).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final

import aiokafka.consumer.fetcher
import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, FetchResult, PartitionRecords
from aiokafka.errors import CorruptRecordException

from kafka_records.decompression import bound_decompression
from kafka_records.record_batch import BEHIND_THE_END, FetchedBatches, offset_behind, records
from mapping.record import Received

FETCHED_AGAIN: Final = 3
"""How often a batch that cannot be read is fetched again before it is stepped over."""


class Unreadable(msgspec.Struct, frozen=True):
    """Offsets of a partition that a reader steps over, from `first` until `behind`, exclusive."""

    partition: TopicPartition
    first: int
    behind: int
    why: str

    def __str__(self) -> str:
        topic, number = self.partition
        last = self.behind - 1
        offsets = f"offset {self.first}" if last == self.first else f"offsets {self.first} to {last}"
        return f"{topic}-{number}, {offsets}: {self.why}"


Tell = Callable[[Unreadable], None]


def convert_arrivals(consumer: AIOKafkaConsumer, tell: Tell, most_headers: int = sys.maxsize) -> None:
    """Make a started consumer return `Received` records, which are freed with their last reference.

    `tell` is called for what it steps over; that includes records with more than `most_headers`.
    """
    fetcher = consumer._fetcher
    fetched, fetcher._records = fetcher._records, _Arrivals(_Trials(tell, most_headers))
    fetcher._records.update(fetched)


def keep_fetched_bytes() -> None:
    """Make all aiokafka consumers of this process keep the bytes of the batches that they fetch."""
    aiokafka.consumer.fetcher.MemoryRecords = FetchedBatches


keep_fetched_bytes()
bound_decompression()


class _Arrivals(OrderedDict[TopicPartition, Any]):
    """Replaces a fetcher's `_records`: fetched records that are not all read."""

    def __init__(self, trials: _Trials) -> None:
        super().__init__()
        self._trials = trials

    def __setitem__(self, partition: TopicPartition, result: Any) -> None:
        if type(result) is FetchResult and type(result._partition_records) is PartitionRecords:
            end = result._assignment.state_value(partition).highwater
            result._partition_records = _Converted(result._partition_records, end, self._trials)
        super().__setitem__(partition, result)


class _Trials:
    """How often a consumer could not read the batch at its position, by partition."""

    def __init__(self, tell: Tell, most_headers: int) -> None:
        self.tell = tell
        self.most_headers = most_headers
        self._failed: dict[TopicPartition, tuple[int, int]] = {}  # the offset, and how often

    def is_last(self, partition: TopicPartition, offset: int) -> bool:
        """Note that the batch at `offset` was not read; return whether it was fetched again often enough."""
        at, times = self._failed.get(partition, (offset, 0))
        times = times if at == offset else 0
        if times >= FETCHED_AGAIN:
            self._failed.pop(partition, None)
            return True
        self._failed[partition] = (offset, times + 1)
        return False


class _Converted:
    """Replaces aiokafka's `PartitionRecords` in a `FetchResult`, which iterates it and reads `next_fetch_offset`."""

    __slots__ = ("_records", "_source")

    def __init__(self, source: PartitionRecords, end: int, trials: _Trials) -> None:
        """`end` is the end of the log."""
        source._records_iterator = None  # a reference cycle
        self._source = source
        self._records = _unpack(source, end, trials)

    def __iter__(self) -> Iterator[Received]:
        return self._records  # continues where the last iteration stopped

    @property
    def next_fetch_offset(self) -> int:
        offset: int = self._source.next_fetch_offset
        return offset


def _unpack(source: PartitionRecords, end: int, trials: _Trials) -> Iterator[Received]:
    """Yield the visible records, moving `next_fetch_offset` past each, and past those that are left out.

    Ends at a batch that cannot be read, which the fetcher then fetches again, or the one behind it.
    """
    topic, partition = source._tp
    most = trials.most_headers
    batches = source._records
    while batches.has_next():
        try:
            batch = batches.next_batch()
            if not batch.validate_crc():
                raise CorruptRecordException("its checksum is wrong")
            if batch.next_offset > end:
                raise CorruptRecordException(BEHIND_THE_END)
            if not (_is_aborted(source, batch) or batch.is_control_batch):
                for record in batch:
                    offset = record.offset
                    if offset >= source.next_fetch_offset:  # the first batch may start before the requested offset
                        source.next_fetch_offset = offset + 1
                        headers = tuple(record.headers)
                        if len(headers) > most:
                            trials.tell(_crowded(source._tp, offset, most))
                            continue
                        yield Received(topic, record.key, record.value, headers, record.timestamp, partition, offset)
            source.next_fetch_offset = max(source.next_fetch_offset, batch.next_offset)
            continue
        except Exception as error:  # whatever aiokafka or a codec raises for these bytes
            why = _reason(error)
        raw = batches.last
        behind = offset_behind(raw, source.next_fetch_offset, end)
        try:
            for read in records(topic, partition, raw, end, most):
                if read.offset >= source.next_fetch_offset:
                    source.next_fetch_offset = read.offset + 1
                    if len(read.headers) > most:
                        trials.tell(_crowded(source._tp, read.offset, most))
                        continue
                    yield read
            source.next_fetch_offset = max(source.next_fetch_offset, behind)
            continue
        except Exception as error:  # as above
            why = _reason(error)
        first = source.next_fetch_offset
        if trials.is_last(source._tp, first):
            source.next_fetch_offset = behind
            trials.tell(Unreadable(source._tp, first, behind, why))
        return


def _crowded(partition: TopicPartition, offset: int, most: int) -> Unreadable:
    return Unreadable(partition, offset, offset + 1, f"it has more than {most} headers")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _is_aborted(source: PartitionRecords, batch: Any) -> bool:
    """Whether a `read_committed` reader must leave out the batch: its transaction was aborted."""
    producer = batch.producer_id
    if source._isolation_level != READ_COMMITTED or producer is None:
        return False
    source._consume_aborted_up_to(batch.base_offset)
    if batch.is_control_batch and source._contains_abort_marker(batch):
        source._aborted_producers.discard(producer)
    return batch.is_transactional and producer in source._aborted_producers
