"""Offers fetched records to the subscribers that fan-outs select, in pieces that leave time for other work.

A record for a thousand subscribers is a thousand offers and a thousand writes. So several records are handed over
together, to one fan-out after the other: a subscriber of all of them gets one offer, and one write. The number of
records adapts: as many as occupy the loop for a moment only. After each piece the next one waits until the offered
records are written, to a bounded number of sockets per turn; Kafka's answers and all other clients get turns in
between. The busier the loop, the more records arrive meanwhile, and the less each costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from aiokafka import TopicPartition

from gateway.kafka.contracts import Subscriber
from gateway.kafka.read.delays import LIVE, delays
from gateway.kafka.read.watched_topics import Chosen, Watch, WatchedPartition
from gateway.runtime.failures import failures
from gateway.runtime.turns import SLICE_S
from mapping.record import Received

TURN_S: Final = 0.001
"""How long offers occupy the loop before other work gets a turn, so that acknowledgements do not wait."""
PIECE_RECORDS: Final = 256
PIECE_BYTES: Final = 32 * 1024
"""The most that is handed over together: each slow reader may exceed its share by this."""

Fetched = list[tuple[TopicPartition, WatchedPartition, list[Received]]]
"""The records of one fetch, by partition."""

FallBehind = Callable[[WatchedPartition, Watch, Subscriber, TopicPartition, int], None]
"""Called for a subscriber without capacity for a record that must not be dropped. From now on it is in `part.behind`
and the catch-up reader offers it everything from the offset on."""


@dataclass(slots=True, eq=False)
class Distributor:
    """Offers fetched records to the fan-outs of their topics."""

    _partitions: Mapping[
        TopicPartition, WatchedPartition
    ]  # watched now; records that were fetched of others are dropped
    _fall_behind: FallBehind
    records: int = 0
    offers: int = 0
    dropped: int = 0
    # called with topic, partition and next offset after records were offered
    passed: Callable[[str, int, int], None] | None = None
    # waits until the offered records are written
    written: Callable[[], Awaitable[None]] = field(default_factory=lambda: partial(asyncio.sleep, 0))

    async def hand_over(self, fetched: Fetched) -> None:
        """Offer all records, in order within each partition. Returns when they are written."""
        began = time.thread_time()
        for tp, part, records in fetched:
            delays.note(LIVE, records)
            at = 0
            while at < len(records) and self._partitions.get(tp) is part:  # else it is no longer watched
                at = self._offer_piece(tp, part, records, at)
                if self.passed is not None:
                    self.passed(tp.topic, tp.partition, part.position)
                if time.thread_time() - began >= TURN_S:
                    await self.written()
                    began = time.thread_time()
        await self.written()

    def _offer_piece(self, tp: TopicPartition, part: WatchedPartition, records: list[Received], at: int) -> int:
        """Offer the next records from index `at` on, as many as are little work; return the index behind them."""
        began = time.thread_time()
        piece = _piece(part, records, at)
        for watch in part.topic.watches if piece else ():
            self._offer(watch, tp, part, piece)
        at += max(len(piece), 1)
        part.position = max(part.position, records[at - 1].offset + 1)
        self.records += len(piece)
        took = time.thread_time() - began
        if took > SLICE_S:
            part.topic.piece = max(1, part.topic.piece // 2)
        elif took < SLICE_S / 2 and len(piece) == part.topic.piece < PIECE_RECORDS:
            part.topic.piece *= 2
        return at

    def _offer(self, watch: Watch, tp: TopicPartition, part: WatchedPartition, piece: list[Received]) -> None:
        """Offer a piece, run by run, to the subscribers that one fan-out selects."""
        select = watch.fanout.select
        at = 0
        while at < len(piece):
            record, count = piece[at], 1
            if not (watch.since and watch.is_early(record)):
                try:
                    chosen, count = select(piece, at)
                except Exception as error:  # our bug, in one record: deliver the others
                    failures.report("delivery", error, f"{tp.topic}-{tp.partition} offset {record.offset}")
                else:
                    self._offer_run(watch, tp, part, piece[at : at + count], chosen)
            at += count

    def _offer_run(
        self, watch: Watch, tp: TopicPartition, part: WatchedPartition, run: list[Received], chosen: Chosen
    ) -> None:
        """Offer a run of records to all of its subscribers."""
        behind, count = part.behind, len(run)
        subscriber: Any  # `lossy` decides which protocol it has
        for subscriber, context in chosen:
            if behind and subscriber in behind:
                continue
            taken = 0
            try:
                if subscriber.lossy:
                    taken = subscriber.offer_run(run, context)
                else:
                    for record in run:
                        if not subscriber.offer_nowait(record, context):
                            break
                        taken += 1
            except Exception as error:  # our bug, in one subscriber: the others are not affected
                # A record that must not be lost is retried by the catch-up reader.
                failures.report("delivery", error, f"{tp.topic}-{tp.partition} offset {run[taken].offset}")
            self.offers += taken
            if taken == count:
                continue
            if subscriber.lossy:
                self.dropped += count - taken
            else:
                self._fall_behind(part, watch, subscriber, tp, run[taken].offset)


def _piece(part: WatchedPartition, records: list[Received], at: int) -> list[Received]:
    """Return the records from index `at` on that may be offered together; none when the first must be skipped."""
    if records[at].offset < part.position:
        return []  # since the fetch the watch has been renewed, at a later offset
    end = min(at + part.topic.piece, len(records))
    left = PIECE_BYTES
    for number in range(at, end):
        record = records[number]
        left -= len(record.value or b"") + sum(len(value or b"") for _, value in record.headers)
        if left < 0:
            return records[at : max(number, at + 1)]
    return records[at:end]
