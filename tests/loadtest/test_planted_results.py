"""What Spark's proofs, the archives and the tables find when results are missing, double, late or wrong."""

from __future__ import annotations

import json

import pytest
from aiokafka import AIOKafkaProducer

from loadtest.clients.crowd.readers import Reader
from loadtest.clients.topics import create_topic
from loadtest.engine.rows import BAD, sent_columns
from loadtest.engine.steady import Measured, Steady
from loadtest.numbering import Numbering
from loadtest.report import Latencies
from loadtest.scenarios.soak import judge
from loadtest.spark import readings
from loadtest.spark.lakes import Found
from loadtest.spark.proofs import Newest, Value, compare
from loadtest.verify import Ledger, Verdict

AT = 1_700_000_000_000


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (Found(10, 10, 10), True),
        (Found(9, 9, 10), False),  # one is missing before another
        (Found(11, 10, 10), False),  # one is there twice
    ],
)
def test_an_archive(found: Found, *, right: bool) -> None:
    assert found.right is right


async def store(bootstrap: str, topic: str, records: list[tuple[bytes, bytes | None, list[tuple[str, bytes]]]]) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for key, value, headers in records:
            await producer.send(topic, value, key, partition=0, headers=headers, timestamp_ms=AT)


def result(key: bytes, time: int, offset: int) -> tuple[bytes, bytes, list[tuple[str, bytes]]]:
    return key, b"%d" % time, [("origin.time", b"%d" % time), ("origin.offset", b"%d" % offset)]


NEWEST = {b"a": Value(2, 1, b"2"), b"b": Value(3, 2, b"3")}


@pytest.mark.parametrize(
    ("results", "found"),
    [
        ([result(b"a", 1, 0), result(b"a", 2, 1), result(b"b", 3, 2)], Newest(2, 0, 0, 3, 0)),
        ([result(b"a", 2, 1)], Newest(2, 1, 0, 1, 0)),
        ([result(b"a", 2, 1), result(b"a", 1, 0), result(b"b", 3, 2)], Newest(2, 0, 1, 3, 1)),
    ],
    ids=["right", "a loss", "a disorder"],
)
async def test_last_known(bootstrap: str, results: list, found: Newest) -> None:
    topic = f"planted-{Numbering().run}"
    await create_topic(bootstrap, topic, 1)
    await store(bootstrap, topic, results)
    assert await compare(bootstrap, topic, NEWEST) == found


@pytest.mark.parametrize(
    ("counts", "missing", "wrong"),
    [([1] * 5, 0, 0), ([1] * 4, 1, 0), ([2, 1, 1, 1, 1], 0, 1)],
    ids=["right", "a loss", "a double"],
)
async def test_windows(bootstrap: str, counts: list[int], missing: int, wrong: int) -> None:
    topics = await readings.make_topics(bootstrap, 1)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        sender = readings.Sender(producer, topics.source)
        await sender.send("s", 20.0, AT)
        await sender.flush()
    windows = [
        {"sensor": "s", "start": start, "maximum": 20.0, "count": count}
        for start, count in zip(readings.starts(AT), counts, strict=False)
    ]
    await store(bootstrap, topics.target, [(b"s", json.dumps(one).encode(), []) for one in windows])
    verdict = await readings.compare(bootstrap, topics, sender)
    assert (verdict.windows, verdict.missing, verdict.wrong) == (5, missing, wrong)
    assert verdict.kept is (missing == wrong == 0)


@pytest.mark.parametrize(
    ("numbers", "quality", "found"),
    [
        ([0, 1, 2], 1, []),
        ([0, 2], 1, ["1 of 3 acknowledged messages are lost"]),
        ([0, 2], 0, []),
        ([0, 1, 1, 2], 1, ["1 messages are stored more than once"]),
        ([1, 0, 2], 0, ["1 of 3 messages are out of order"]),
    ],
)
def test_a_reader_of_the_soak(numbers: list[int], quality: int, found: list[str]) -> None:
    numbering, ledger = Numbering(), Ledger()
    ledger.acknowledge_run(7, 0, 3)
    reader = Reader(numbering)
    for number in numbers:
        reader.take(numbering.payload(7, number, 50))
    assert judge(reader, ledger, quality) == found


def test_a_row_of_a_table() -> None:
    measured = Measured(10, 10, 1.0, Latencies(), {}, [], 1.0)
    load = Steady(connections=1, messages=10)
    right = sent_columns(load, measured, Verdict(10, 10, 0, 0, 0, 0))
    assert not any(right.get(bad) for bad in BAD)
    wrong = sent_columns(load, measured, Verdict(10, 9, 1, 2, 3, 0))
    assert [wrong[bad] for bad in ("lost", "doubled", "out of order")] == [1, 2, 3]
    flood = sent_columns(load._replace(qos=0), measured, Verdict(1, 9, 0, 0, 0, 8))
    assert flood["lost"] == 1
