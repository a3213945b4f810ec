"""Hands what a fetch has brought to the subscribers that fan-outs choose, and lets others go on in between.

A record for a thousand subscribers is a thousand offers and a thousand writes. So several records that have come are
handed over together, to one fan-out after the other: a subscriber of a run of them is asked once, and written to once.
How many is found out: as many as keep the loop for a moment only. Behind each such piece the next one waits until what
was offered is written, which happens a bounded number of sockets in a turn; Kafka's answers, and every other client,
have theirs in between. The busier the loop, the more has come meanwhile, and the less each record costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from aiokafka import TopicPartition

from gateway.failures import failures
from gateway.kafka.contracts import Subscriber
from gateway.kafka.read.watched_topics import Chosen, Partition, Watch
from gateway.turns import SLICE_S
from mapping.record import Received

TURN_S: Final = 0.001
"""How long offers keep the loop before others have their turn, so that acknowledgements do not wait."""
PIECE_RECORDS: Final = 256
PIECE_BYTES: Final = 32 * 1024
"""Most of what is handed over together: each slow reader may have so much more than its share."""

Fetched = list[tuple[TopicPartition, Partition, list[Received]]]
"""What a fetch has brought of each partition."""


class FallBehind(Protocol):
    """What is called for a subscriber that has no capacity for a record that may not be dropped."""

    def __call__(
        self, part: Partition, watch: Watch, subscriber: Subscriber, partition: TopicPartition, offset: int
    ) -> None:
        """It is offered everything from `offset` on by the catch-up reader; it is in `part.behind` from now on."""


class FanOut:
    """See the module."""

    def __init__(self, partitions: Mapping[TopicPartition, Partition], fall_behind: FallBehind) -> None:
        """`partitions` are those that are watched now; what was fetched of others is for nobody."""
        self.records = self.offers = self.dropped = 0
        # told a topic, a partition and the offset of the next record, each time some were offered
        self.passed: Callable[[str, int, int], None] | None = None
        # waits until what was offered is written
        self.written: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)
        self._partitions = partitions
        self._fall_behind = fall_behind

    async def hand_over(self, fetched: Fetched) -> None:
        """Offer all of it, in the order of each partition. Returns when it is written."""
        began = time.thread_time()
        for place, part, records in fetched:
            at = 0
            while at < len(records) and self._partitions.get(place) is part:  # else it is not watched any more
                at = self._offer_piece(place, part, records, at)
                if self.passed is not None:
                    self.passed(place.topic, place.partition, part.position)
                if time.thread_time() - began >= TURN_S:
                    await self.written()
                    began = time.thread_time()
        await self.written()

    def _offer_piece(self, place: TopicPartition, part: Partition, records: list[Received], at: int) -> int:
        """Offer as many records from `at` on as are little work; where the next one stands."""
        began = time.thread_time()
        piece = _piece(part, records, at)
        for watch in part.topic.watches if piece else ():
            self._offer(watch, place, part, piece)
        at += max(len(piece), 1)
        part.position = max(part.position, records[at - 1].offset + 1)
        self.records += len(piece)
        took = time.thread_time() - began
        if took > SLICE_S:
            part.topic.piece = max(1, part.topic.piece // 2)
        elif took < SLICE_S / 2 and len(piece) == part.topic.piece < PIECE_RECORDS:
            part.topic.piece *= 2
        return at

    def _offer(self, watch: Watch, place: TopicPartition, part: Partition, piece: list[Received]) -> None:
        """Offer a piece to those whom one fan-out chooses, its runs one after the other."""
        select_run = watch.select_run
        at = 0
        while at < len(piece):
            record, count = piece[at], 1
            if not (watch.since and watch.is_early(record)):
                try:
                    if select_run is None:
                        chosen = watch.select(record)
                    else:
                        chosen, count = select_run(piece, at)
                except Exception as error:  # our bug, in one record; the others must come
                    failures.tell("delivery", error, f"{place.topic}-{place.partition} offset {record.offset}")
                else:
                    self._offer_run(watch, place, part, piece[at : at + count], chosen)
            at += count

    def _offer_run(
        self, watch: Watch, place: TopicPartition, part: Partition, run: list[Received], chosen: Chosen
    ) -> None:
        """Offer records to all whom they are for."""
        behind, count = part.behind, len(run)
        subscriber: Any  # whether it is lossy decides what it is
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
            except Exception as error:  # our bug, in one subscriber: the others do not pay for it
                # What may not be lost is tried once more by the catch-up reader.
                failures.tell("delivery", error, f"{place.topic}-{place.partition} offset {run[taken].offset}")
            self.offers += taken
            if taken == count:
                continue
            if subscriber.lossy:
                self.dropped += count - taken
            else:
                self._fall_behind(part, watch, subscriber, place, run[taken].offset)


def _piece(part: Partition, records: list[Received], at: int) -> list[Received]:
    """Some records from `at` on that are to be offered; none when the first is not."""
    if records[at].offset < part.position:
        return []  # watched anew since it was asked for, further on
    end = min(at + part.topic.piece, len(records))
    left = PIECE_BYTES
    for number in range(at, end):
        record = records[number]
        left -= len(record.value or b"") + sum(len(value or b"") for _, value in record.headers)
        if left < 0:
            return records[at : max(number, at + 1)]
    return records[at:end]
