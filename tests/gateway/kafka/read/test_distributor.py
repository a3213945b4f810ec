"""Fetched records are handed to subscribers in order, once, and not before earlier ones are written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from aiokafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from gateway.kafka.cluster.topic_info import TopicIdentity
from gateway.kafka.contracts import Fanout, Subscriber
from gateway.kafka.read.distributor import PIECE_BYTES, PIECE_RECORDS, Distributor
from gateway.kafka.read.watched_topics import Watch, WatchedPartition, WatchedTopic
from mapping.record import Received
from tests.support.reader_kit import Sink

PLACE = TopicPartition("fan", 0)
FIRST = 100


def records(values: Sequence[bytes]) -> list[Received]:
    return [Received("fan", None, value, (), 0, 0, FIRST + number) for number, value in enumerate(values)]


class Chooser(Fanout):
    """Selects by the first byte of a record."""

    def __init__(self, sinks: dict[int, list[Sink]]) -> None:
        self.sinks = sinks

    def select(self, records: Sequence[Received], at: int) -> tuple[list[tuple[Sink, None]], int]:
        value = records[at].value
        assert value is not None
        return [(sink, None) for sink in self.sinks.get(value[0], ())], 1


class RunChooser(Chooser):
    """Selects for a run of records with the same first byte."""

    def select(self, records: Sequence[Received], at: int) -> tuple[list[tuple[Sink, None]], int]:
        first, count = records[at].value, 1
        assert first is not None
        while at + count < len(records) and (records[at + count].value or b"")[0] == first[0]:
            count += 1
        return super().select(records, at)[0], count


class Bench:
    """A partition with watches; notes subscribers that fall behind, with the offset."""

    def __init__(self, *fanouts: Any) -> None:
        self.topic = WatchedTopic("fan", TopicIdentity(b""))
        for fanout in fanouts:
            self.topic.add(fanout, {})
        self.part = self.topic.partitions[PLACE] = WatchedPartition(self.topic, FIRST)
        self.fell: dict[Subscriber, int] = {}
        self.distributor = Distributor(self.topic.partitions, self._fall_behind)
        self.turns = 0
        self.distributor.written = self._turn

    def _fall_behind(
        self, part: WatchedPartition, watch: Watch, subscriber: Subscriber, partition: TopicPartition, offset: int
    ) -> None:
        assert (part, partition) == (self.part, PLACE)
        assert subscriber not in self.fell
        self.fell[subscriber] = offset
        part.behind[subscriber] = (watch, None)  # type: ignore[assignment]

    async def _turn(self) -> None:
        self.turns += 1


@given(
    values=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=60),
    rooms=st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 20)), st.booleans()), min_size=1, max_size=5),
    piece=st.integers(1, 64),
    cut=st.integers(0, 60),
    runs=st.booleans(),
)
def test_each_subscriber_is_offered_its_records_in_order_and_once(
    values: list[bytes], rooms: list[tuple[int | None, bool]], piece: int, cut: int, runs: bool
) -> None:
    sinks = [Sink(room, lossy=lossy) for room, lossy in rooms]
    plain = Sink()
    chosen = {ord("a"): sinks, ord("b"): sinks[::2]}
    bench = Bench(RunChooser(chosen) if runs else Chooser(chosen), Chooser({ord("c"): [plain], ord("a"): [plain]}))
    bench.topic.piece = piece
    found = records(values)
    for fetched in (found[:cut], found[max(0, cut - 2) :]):  # the second starts with records that were offered before
        asyncio.run(bench.distributor.hand_over([(PLACE, bench.part, fetched)]))
    assert bench.part.position == FIRST + len(values)
    assert plain.got == [record for record in found if record.value in (b"a", b"c")]
    dropped = 0
    for number, (sink, (room, lossy)) in enumerate(zip(sinks, rooms, strict=True)):
        wanted = [one for one in found if one.value == b"a" or (one.value == b"b" and number % 2 == 0)]
        assert sink.got == wanted[:room]
        missed = wanted[len(sink.got) :]
        dropped += len(missed) if lossy else 0
        assert bench.fell.get(sink) == (missed[0].offset if missed and not lossy else None)  # type: ignore[call-overload]
    assert bench.distributor.dropped == dropped
    assert bench.distributor.records == len(values)


async def test_the_next_piece_waits_until_what_was_offered_is_written() -> None:
    sink = Sink()
    bench = Bench(RunChooser({ord("a"): [sink]}))
    gates: list[asyncio.Future[None]] = []

    def written() -> asyncio.Future[None]:
        gates.append(asyncio.get_running_loop().create_future())
        return gates[-1]

    class Slow(Sink):
        """A subscriber whose records take more than a turn each."""

        def offer_nowait(self, record: Received, context: object = None) -> bool:
            spent = time.thread_time()
            while time.thread_time() - spent < 0.03:
                pass
            return super().offer_nowait(record, context)

    slow = Slow()
    bench.topic.add(RunChooser({ord("a"): [slow]}), {})
    bench.distributor.written = written
    task = asyncio.create_task(bench.distributor.hand_over([(PLACE, bench.part, records([b"a"] * 5))]))
    for turn in range(1, 6):
        await _turns(lambda at=turn: len(gates) == at)  # type: ignore[misc]
        assert len(slow.got) == len(sink.got) == turn  # a record that takes too long is alone in its piece
        gates[-1].set_result(None)
    await _turns(lambda: len(gates) == 6)
    assert not task.done()  # the fetch is handed over only when all of it is written
    gates[-1].set_result(None)
    await task


def test_cheap_records_are_handed_over_together_up_to_a_limit() -> None:
    sizes: list[int] = []

    class Counting(RunChooser):
        def select(self, records: Sequence[Received], at: int) -> tuple[list[tuple[Sink, None]], int]:
            chosen, count = super().select(records, at)
            sizes.append(sum(len(record.value or b"") for record in records[at : at + count]))
            return chosen, count

    bench = Bench(Counting({ord("a"): [Sink()]}))
    bench.topic.piece = PIECE_RECORDS
    asyncio.run(bench.distributor.hand_over([(PLACE, bench.part, records([b"a" * 1000] * 200))]))
    assert max(sizes) <= PIECE_BYTES < 2 * max(sizes)
    assert sum(sizes) == 200_000
    asyncio.run(bench.distributor.hand_over([(PLACE, bench.part, records([b"a" * 10] * 210)[200:])]))
    one = records([b"a"] * 210 + [b"a" * 10 * PIECE_BYTES])[210:]
    asyncio.run(bench.distributor.hand_over([(PLACE, bench.part, one)]))
    assert sizes[-1] == 10 * PIECE_BYTES  # one that is larger is alone


async def _turns(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("not within 10,000 turns")
