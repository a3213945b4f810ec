"""Start positions other than the end of the log: their offsets, and watches from there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.kafka.contracts import Refused
from gateway.kafka.read.start_positions import AtOffset, AtTime, BeyondEnd, Start, StartPosition, starting_offsets
from mapping.outcomes import Outcome

FIRST_TIME = 1_700_000_000_000


async def fill(producer: Any, topic: str) -> None:
    """Ten records in partition 0, a second apart; four in partition 1; none in partition 2."""
    for partition, count in ((0, 10), (1, 4)):
        waiting = [
            await producer.send(topic, b"%d" % number, partition=partition, timestamp_ms=FIRST_TIME + number * 1000)
            for number in range(count)
        ]
        await asyncio.gather(*waiting)


OFFSETS: list[tuple[Start, int | None, dict[int, int]]] = [
    (StartPosition.BEGINNING, None, {0: 0, 1: 0, 2: 0}),
    (StartPosition.LAST, None, {0: 9, 1: 3, 2: 0}),
    (StartPosition.END, None, {}),
    (AtOffset(7), 0, {0: 7}),
    (AtOffset(10), 0, {0: 10}),
    (AtTime(FIRST_TIME + 2500), None, {0: 3, 1: 3, 2: 0}),
    (AtTime(FIRST_TIME + 3500), None, {0: 4, 1: 4, 2: 0}),
    (AtTime(-5), 1, {1: 0}),
]


async def test_offsets(readers: Any, producer: Any, new_topic: Any) -> None:
    topic = await new_topic(partitions=3)
    await fill(producer, topic)
    for start, partition, offsets in OFFSETS:
        assert await starting_offsets(readers.lookup, topic, start, partition) == offsets, start
    with pytest.raises(BeyondEnd, match="ends at offset 10 in partition 0"):
        await starting_offsets(readers.lookup, topic, AtOffset(11), 0)
    with pytest.raises(Refused) as refused:
        await starting_offsets(readers.lookup, topic, StartPosition.END, 3)
    assert refused.value.outcome is Outcome.UNKNOWN_TOPIC


async def test_a_watch_from_a_time_goes_on_at_the_tail(readers: Any, producer: Any, new_topic: Any) -> None:
    topic = await new_topic(partitions=3)
    await fill(producer, topic)
    sink = readers.Sink()
    await readers.live_reader.watch_from(topic, readers.Fan(sink), sink, AtTime(FIRST_TIME + 2500))
    for partition in range(3):
        await producer.send_and_wait(topic, b"new", partition=partition)
    await readers.wait_until(lambda: len(sink.got) == 7 + 1 + 3)
    assert sink.by_partition() == {(topic, 0): list(range(3, 11)), (topic, 1): [3, 4], (topic, 2): [0]}


async def test_records_between_the_live_reader_and_the_end_are_caught_up_on(
    readers: Any, producer: Any, new_topic: Any
) -> None:
    """The live reader is behind the log's end when a subscriber starts at or behind its position."""
    topic = await new_topic(partitions=1)
    await readers.live_reader.watch(topic, readers.Fan(readers.Sink()))
    sinks = []
    for number in range(40):
        await producer.send_and_wait(topic, b"%d" % number)
        sink = readers.Sink()
        first = max(0, number - number % 3)
        await readers.live_reader.watch_from(topic, readers.Fan(sink), sink, AtOffset(first), 0)
        sinks.append((first, sink))
    await producer.send_and_wait(topic, b"last")
    await readers.wait_until(lambda: all(sink.got and sink.got[-1].offset == 40 for _, sink in sinks))
    for first, sink in sinks:
        assert [record.offset for record in sink.got] == list(range(first, 41))


async def test_a_deleted_topic_is_no_reason_to_wait(readers: Any, new_topic: Any, admin: Any) -> None:
    """aiokafka would ask for its offsets until the time is up, and all requests behind it would wait."""
    stays, goes = await new_topic(partitions=1), await new_topic(partitions=1)
    asked = [*await readers.lookup.partitions(stays), *await readers.lookup.partitions(goes)]
    assert await readers.lookup.ends(asked) == dict.fromkeys(asked, 0)
    await admin.delete_topics([goes])
    async with asyncio.timeout(60):
        while len(found := await readers.lookup.ends(asked, existing=True)) > 1:  # it vanishes a moment later
            pass
    assert found == {asked[0]: 0}
    for question in (readers.lookup.ends(asked), readers.lookup.beginnings(asked), readers.lookup.since(asked, 0)):
        with pytest.raises(Refused) as refused:
            await question
        assert refused.value.outcome is Outcome.UNKNOWN_TOPIC
    assert await readers.lookup.beginnings(asked[:1]) == {asked[0]: 0}
