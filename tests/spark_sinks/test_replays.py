"""Replays on a real Kafka: each record exactly once, unchanged and in order, whenever a replay is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from hypothesis import given
from hypothesis import strategies as st

from mapping.dead_letters import Cause, dead_letter
from mapping.record import Received
from spark_sinks.replay.items import Item, NotReplayableError, Place, marked, of_letter
from spark_sinks.replay.kafka import ReplayTarget
from spark_sinks.replay.ledger import LedgerError
from spark_sinks.replay.order import Merge, OffsetBits, in_order, target_partition
from spark_sinks.replay.run import Replayed, replay
from spark_sinks.run.job_file import read
from spark_sinks.spec import kafka_client
from tests.support.topics import read_all, read_committed

ROOT = Path(__file__).parents[2]
START_MS = 1_700_000_000_000
Header = tuple[str, bytes | None]
NAMES = st.sampled_from(
    ["error", "origin.topic", "origin.partition", "origin.offset", "origin.timestamp", "origin.length", "unit",
     "dead-letter.topic", "dead-letter.offset", "dead-letter.partition", "creation-time"]
)  # fmt: skip
VALUES = st.none() | st.binary(max_size=6) | st.sampled_from([b"7", b"t", b"9" * 5_000, "Ⅷ".encode()])


def letter_of(headers: Sequence[Header], **fields: Any) -> Any:
    return SimpleNamespace(
        **{"topic": "dlq", "partition": 0, "offset": 5, "timestamp": 9, "key": b"k", "value": b"v", **fields},
        headers=tuple(headers),
    )


@given(st.lists(st.tuples(NAMES, VALUES), max_size=9))
def test_any_headers_of_a_letter_give_a_record_or_an_error(headers: list[Header]) -> None:
    item: Item | None = None
    with contextlib.suppress(NotReplayableError):
        item = of_letter(letter_of(headers), anywhere=False)
    assert item is None or (item.key, item.value) == (b"k", b"v")


@given(st.lists(st.tuples(NAMES, st.binary(max_size=3)), max_size=5))
def test_letters_also_of_replayed_records_are_restored(own: list[Header]) -> None:
    origin = [("origin.topic", b"t"), ("origin.partition", b"3"), ("origin.offset", b"44"), ("origin.timestamp", b"8")]
    was = Item("t", 3, 44, 8, b"k", b"v", tuple(own))
    assert of_letter(letter_of([*own, ("error", b"bad"), *origin]), anywhere=False) == was
    again = marked(was, "r")
    assert again == [*own, *origin, ("origin.replay", b"r")]
    once_more = of_letter(letter_of([*again, ("error", b"bad"), *origin]), anywhere=False)
    assert [name for name, _ in marked(once_more, "r2")].count("origin.replay") == 1


def test_letters_of_the_gateway_are_restored() -> None:
    was = Received("t", b"k", b"v", (("unit", b"C"),), START_MS, 2, 17)
    letter = dead_letter(was, "dlq", Cause("group", 3, "rejected"))
    item = of_letter(letter_of(letter.headers), anywhere=False)
    assert (item.topic, item.partition, item.offset, item.headers) == ("t", 2, 17, was.headers)


@pytest.mark.parametrize(("created", "expected"), [(START_MS - 5, START_MS - 5), (START_MS + 600_000, START_MS)])
def test_a_fast_clock_gives_no_replayed_record_a_later_time_than_its_dead_letter(created: int, expected: int) -> None:
    was = Received("t", b"k", b"v", (("creation-time", b"%d" % created),), START_MS, 2, 17)
    letter = dead_letter(was, "dlq", Cause("group", 3, "rejected"))
    assert of_letter(letter_of(letter.headers, timestamp=START_MS), anywhere=False).timestamp == expected


def test_letters_that_are_truncated_or_of_internal_topics_are_not_replayable() -> None:
    origin = [("error", b""), ("origin.topic", b"t"), ("origin.partition", b"3"), ("origin.offset", b"4")]
    with pytest.raises(NotReplayableError, match="of 77 bytes was truncated"):
        of_letter(letter_of([*origin, ("origin.length", b"77")]), anywhere=True)
    origin[1] = ("origin.topic", b"__consumer_offsets")
    with pytest.raises(NotReplayableError, match="its origin is unknown"):
        of_letter(letter_of(origin), anywhere=False)
    assert of_letter(letter_of(origin), anywhere=True).topic == "dlq"


@given(st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=3), st.data())
def test_logs_are_merged_by_time_and_each_keeps_its_order(times: list[list[int]], data: st.DataObject) -> None:
    """Pages may be of any size, and the offsets may have gaps."""
    places = [Place("t", number) for number in range(len(times))]
    logs = {
        place: [SimpleNamespace(place=place, offset=3 * index, timestamp=time) for index, time in enumerate(column)]
        for place, column in zip(places, times, strict=True)
    }
    ends = {place: 3 * len(log) for place, log in logs.items()}
    merge = Merge(dict.fromkeys(places, 0), ends)
    taken, shown, read_to = [], [], dict.fromkeys(places, 0)
    while merge.left:
        while merge.waiting:
            place = min(merge.waiting)
            behind = data.draw(st.integers(read_to[place] + 1, ends[place] + 2))
            merge.feed(place, [one for one in logs[place] if read_to[place] <= one.offset < behind], behind)
            read_to[place] = behind
        if (time := merge.peek()) is not None:
            shown.append(time)
            taken.append(merge.pop())
            assert merge.positions[taken[-1].place] in {taken[-1].offset + 1, ends[taken[-1].place]}
    assert shown == sorted(shown)
    assert merge.positions == ends
    for place, log in logs.items():
        assert [one for one in taken if one.place == place] == log


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(0, 9)), unique_by=lambda one: one[:2]))
def test_letters_are_sorted_into_partition_order(letters: list[tuple[int, int, int]]) -> None:
    items = [Item("t", partition, offset, time, None, None, ()) for partition, offset, time in letters]
    ordered = in_order(items)
    assert sorted(map(str, ordered)) == sorted(map(str, items))
    for partition in range(3):
        offsets = [item.offset for item in ordered if item.partition == partition]
        assert offsets == sorted(offsets)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5_000))))
def test_each_origin_is_new_only_once(origins: list[tuple[int, int]]) -> None:
    seen, plain = OffsetBits(), set()
    for partition, offset in origins:
        assert seen.add(Place("t", partition), offset) == ((partition, offset) not in plain)
        plain.add((partition, offset))


def test_a_record_goes_to_its_original_partition_or_by_key() -> None:
    item = Item("t", 5, 0, 0, b"k", b"", ())
    assert target_partition(item, "t", 6, 6, 1) == 5
    assert target_partition(item, "t", 3, 3, 1) == 1  # the topic was recreated with fewer partitions
    assert target_partition(item, "other", 6, 6, 1) == 5
    assert target_partition(item, "other", 8, 6, 1) == 1
    assert target_partition(item, "other", 3, None, -1) == 2


def test_a_timestamp_is_kept_if_the_topic_allows_it() -> None:
    topic = ReplayTarget("t", 1, before_ms=1_000, after_ms=10, retention_ms=500)
    assert [topic.timestamp(time, 5_000) for time in (3_999, 4_000, 5_010, 5_011, None)] == [
        None,
        4_000,
        5_010,
        None,
        None,
    ]
    assert ReplayTarget("t", 1, own_time=False).timestamp(5_000, 5_000) is None
    assert [topic.forgets(time, 5_000) for time in (4_499, 4_500, None)] == [True, False, False]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sasl.kerberos.service.name": "kafka"}, "sasl.kerberos.service.name is not supported for this job"),
        ({"ssl.truststore.location": "a.jks"}, "ssl.truststore.type: this job supports PEM only"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI"}, "sasl.mechanism: this job supports"),
        ({"security.protocol": "SASL_SSL"}, "sasl.jaas.config: expected"),
    ],
)
def test_an_unsupported_kafka_setting_is_reported(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kafka_client.check(settings)


def test_kafka_settings_by_their_java_names() -> None:
    module = "org.apache.kafka.common.security.scram.ScramLoginModule required"
    told = kafka_client.arguments(
        {
            "bootstrap.servers": "a:1, b:2",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.jaas.config": rf'{module} username="me" password="a\"b\\";',
        }
    )
    assert told["bootstrap_servers"] == ["a:1", "b:2"]
    assert (told["sasl_plain_username"], told["sasl_plain_password"]) == ("me", 'a"b\\')


Run = Callable[[str], Awaitable[tuple[list[Replayed], Replayed, list[str]]]]


@pytest.fixture
def run_file(tmp_path: Path) -> Run:
    """Run a job file in this process; return its transactions, its totals and its lines."""

    async def run(text: str) -> tuple[list[Replayed], Replayed, list[str]]:
        (tmp_path / "job.toml").write_text(text)
        job: Any = read(tmp_path / "job.toml").spec
        done: list[Replayed] = []
        said: list[str] = []
        totals = await replay(job, report=done.append, say=said.append, stopped=asyncio.Event())
        return done, totals, said

    return run


DLQ = """
job = "dlq-replay"
name = "NAME"
source = { topics = ["DEAD"] }
run = { bootstrap_servers = "BOOTSTRAP", rate = RATE }
"""


async def test_letters_replayed_twice_by_a_killed_job_arrive_once_and_unchanged(
    *, run_file: Run, producer: AIOKafkaProducer, new_topic: Any, bootstrap: str, tmp_path: Path
) -> None:
    topic, dead = await new_topic(partitions=2), await new_topic(partitions=3)
    expected: dict[tuple[int, int], tuple[bytes, bytes | None, int]] = {}
    for offset in range(150):
        for partition in range(2):
            was = b"s%d" % (offset % 7), None if offset == 40 else b"%d" % offset, START_MS + offset
            expected[partition, offset] = was
            headers = [
                ("unit", b"C"), ("error", b"bad"), ("origin.topic", topic.encode()),
                ("origin.partition", b"%d" % partition), ("origin.offset", b"%d" % offset),
                ("origin.timestamp", b"%d" % was[2]),
            ]  # fmt: skip
            for _ in range(1 if offset % 10 else 2):  # as if a killed job had written some letters again
                await producer.send(dead, was[1], was[0], headers=headers)
    await producer.send(dead, b"no letter", b"k")
    await producer.flush()
    text = DLQ.replace("NAME", topic).replace("DEAD", dead).replace("BOOTSTRAP", bootstrap)

    (tmp_path / "killed.toml").write_text(text.replace("RATE", "100"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "spark_sinks", str(tmp_path / "killed.toml"), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    told = json.loads(await process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert (told["kind"], 0 < told["records"] < 300) == ("replayed", True)

    # A replay killed within a transaction: its records stay in the log but are never committed.
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"trivium-replay-{topic}") as cut_off:
        await cut_off.begin_transaction()
        for _ in range(3):
            await cut_off.send_and_wait(topic, b"cut off", b"s1")

    done, totals, said = await run_file(text.replace("RATE", "100000"))
    assert 0 < totals.records < 300
    assert sum(one.records for one in done) == totals.records
    assert [line for line in said if "its origin is unknown" in line]
    _, again, _ = await run_file(text.replace("RATE", "100000"))
    assert (again.records, again.unfit, again.repeated) == (0, 0, 0)

    assert len(await read_all(bootstrap, topic)) == len(expected) + 3
    found: dict[tuple[int, int], tuple[bytes, bytes | None, int]] = {}
    for record in await read_committed(bootstrap, topic, len(expected)):
        headers = dict(record.headers)
        assert [name for name, _ in record.headers] == [
            "unit", "origin.topic", "origin.partition", "origin.offset", "origin.timestamp", "origin.replay",
        ]  # fmt: skip
        origin = int(headers["origin.partition"]), int(headers["origin.offset"])
        assert origin not in found
        assert record.partition == origin[0]
        assert int(headers["origin.timestamp"]) == record.timestamp
        found[origin] = record.key, record.value, record.timestamp
    assert found == expected
    for partition in range(2):
        offsets = [origin[1] for origin in found if origin[0] == partition]
        assert offsets == sorted(offsets)


REPLAY = """
job = "replay"
name = "NAME"
source = { topics = ["SOURCE"], SELECTED }
sink = { kafka = "TARGET" }
run = { bootstrap_servers = "BOOTSTRAP" }
"""


async def test_a_part_of_the_log_is_replayed_by_time_and_by_offsets(
    run_file: Run, producer: AIOKafkaProducer, new_topic: Any, bootstrap: str
) -> None:
    source, target = await new_topic(partitions=2), await new_topic(partitions=3)
    for number in range(60):
        await producer.send(
            source, b"%d" % number, b"k%d" % (number % 5), partition=number % 2, timestamp_ms=START_MS + 1_000 * number
        )
    await producer.flush()
    text = REPLAY.replace("SOURCE", source).replace("TARGET", target).replace("BOOTSTRAP", bootstrap)
    by_time = text.replace("SELECTED", "since = 2023-11-14T22:13:30Z, until = 2023-11-14T22:13:50")
    _, totals, _ = await run_file(by_time.replace("NAME", source))
    assert totals.records == 20
    records = await read_committed(bootstrap, target, 20)
    assert sorted(int(record.value) for record in records) == list(range(10, 30))
    assert all(record.timestamp == START_MS + 1_000 * int(record.value) for record in records)
    assert all(len({one.partition for one in records if one.key == record.key}) == 1 for record in records)
    by_offsets = text.replace("SELECTED", f"offsets = {{ {source} = {{ 1 = [28, 99] }} }}")
    with pytest.raises(LedgerError, match="is used by another task"):
        await run_file(by_offsets.replace("NAME", source).replace(target, f"{target}-2"))
    _, totals, _ = await run_file(by_offsets.replace("NAME", f"{source}-2"))
    assert totals.records == 2
    found = [int(record.value) for record in await read_committed(bootstrap, target, 22)]
    assert sorted(found) == [*range(10, 30), 57, 59]
