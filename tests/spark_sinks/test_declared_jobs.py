"""Every kind of job file on a real Kafka. Results equal a plain computation over the log, also after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

from spark_sinks.archive import segments
from spark_sinks.archive.contract import MERGED, ArchiveError
from spark_sinks.archive.parquet import ParquetArchive
from spark_sinks.read import registry
from spark_sinks.run.declared import DeclaredOptions
from spark_sinks.spark.progress import Progress
from spark_sinks.spec.parts import Maintain, Registry
from spark_sinks.spec.triggers import MICRO_BATCH, REAL_TIME
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.topics import read_all

EXAMPLES = Path(__file__).parents[2] / "examples" / "spark"
START_MS = 1_700_000_000_000

Declare = Callable[..., DeclaredOptions]
RunOnce = Callable[[DeclaredOptions], Awaitable[list[Progress]]]


async def send(producer: AIOKafkaProducer, topic: str, records: list[tuple[str, bytes | None]]) -> None:
    for key, value in records:
        await producer.send(topic, value, key.encode())
    await producer.flush()


def reading(load: float, at: int) -> bytes:
    return json.dumps({"load": load, "at": at}).encode()


STATS = """
job = "window-stats"
by = ["level[2]", "level[3]"]
source = { topics = ["SOURCE"], columns = { load = "double" }, time = "at", dead_letters = "DEAD" }
window = { length = "4s", slide = "2s", watermark = "1m" }
sink = { kafka = "TARGET" }
run = { checkpoint = "CHECKPOINT" }
[aggregates]
n = "count(load)"
low = "min(load)"
high = "max(load)"
mean = "mean(load)"
spread = "stddev(load)"
middle = "percentile(load, 0.5)"
kinds = "distinct(load)"
rate = "rate(*)"
"""


@pytest.mark.usefixtures("two_parts")
async def test_window_stats_follow_the_definition_and_omitted_records_are_dead_letters(
    *, run_job: Any, run_once: RunOnce, declare: Declare, producer: AIOKafkaProducer, new_topic: Any, read_until: Any,
    bootstrap: str,
) -> None:  # fmt: skip
    source, target, dead = await new_topic(partitions=2), await new_topic(partitions=2), await new_topic(partitions=1)
    options = declare(STATS.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", dead))
    rng, at = random.Random(3), START_MS
    windows: dict[tuple[str, int], list[float]] = defaultdict(list)

    def some(count: int) -> list[tuple[str, bytes | None]]:
        nonlocal at
        made: list[tuple[str, bytes | None]] = []
        for _ in range(count):
            at += rng.randint(0, 400)
            key, load = f"floor-{rng.randint(1, 2)}/lift", float(rng.randint(-50, 50))
            made.append((key, reading(load, at)))
            for start in range(at - at % 2_000 - 2_000, at + 1, 2_000):
                windows[key, start].append(load)
        return made

    await send(producer, source, [*some(150), ("nowhere", reading(1, at)), ("floor-1/lift", b"stuck")])
    await run_once(options)  # the watermark advances after the batch, so late records need another batch
    late = reading(1e6, START_MS - 600_000)
    job = await run_job(options)
    await send(producer, source, [*some(50), ("floor-1/lift", late)])
    letters = await read_until(dead, lambda records: len(records) == 3, 180)
    await job.wait_for(lambda done: sum(one.rows for one in done) == 51, 180)
    await job.stop()
    results = {}
    for record in await read_all(bootstrap, target):
        value = json.loads(record.value)
        assert record.key.decode() == f"{value['level2']}/{value['level3']}"
        results[record.key.decode(), value["start"]] = value
    assert results.keys() == windows.keys()
    for key, loads in windows.items():
        found = results[key]
        assert found["end"] == key[1] + 4_000
        assert (found["n"], found["low"], found["high"]) == (len(loads), min(loads), max(loads))
        assert math.isclose(found["mean"], statistics.fmean(loads), abs_tol=1e-9)
        assert found["middle"] == sorted(loads)[math.ceil(len(loads) / 2) - 1]
        assert abs(found["kinds"] - len(set(loads))) <= 2  # of at most 15; the count is approximate
        assert found["rate"] == len(loads) / 4
        if len(loads) > 1:
            assert math.isclose(found["spread"], statistics.stdev(loads), abs_tol=1e-9)
    finals = await new_topic(partitions=1)
    closing = STATS.replace("SOURCE", source).replace("TARGET", finals).replace("DEAD", dead).replace('"1m"', '"10s"')
    closing = closing.replace("kafka = ", 'emit = "final", kafka = ').replace("by =", 'name = "finals"\nby =')
    await run_once(declare(closing))
    done = await read_all(bootstrap, finals)
    found = {(record.key.decode(), json.loads(record.value)["start"]): json.loads(record.value) for record in done}
    assert len(found) == len(done)
    assert all(dict(record.headers)["emit"] == b"final" for record in done)
    closed = {key: one for key, one in results.items() if key[1] + 4_000 + 10_000 <= at}
    assert closed
    assert {key: one["n"] for key, one in found.items() if key[1] > START_MS - 300_000} == {
        key: one["n"] for key, one in closed.items()
    }
    reasons = {letter.value: dict(letter.headers)["error"].decode() for letter in letters}
    assert reasons.pop(late).startswith("late")
    assert reasons.pop(b"stuck") == "the value is not a JSON object in UTF-8"
    assert list(reasons.values()) == ["level[3] is missing or not a text"]


SESSIONS = """
job = "sessionize"
source = { topics = ["SOURCE"], columns = { load = "double" }, time = "at", dead_letters = "DEAD" }
session = { gap = "10s", watermark = "5s" }
aggregates = { readings = "count(*)", high = "max(load)" }
sink = { kafka = "TARGET", emit = "final" }
run = { checkpoint = "CHECKPOINT" }
"""


async def test_sessions_follow_the_definition(
    *, run_once: RunOnce, declare: Declare, producer: AIOKafkaProducer, new_topic: Any, bootstrap: str
) -> None:
    source, target = await new_topic(partitions=1), await new_topic(partitions=1)
    options = declare(SESSIONS.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", "unused"))
    rng = random.Random(4)
    times = sorted(START_MS + rng.randint(0, 600_000) for _ in range(120))
    readings = [(f"d{rng.randint(0, 2)}", rng.random(), at) for at in times]
    expected: dict[str, list[list[tuple[int, float]]]] = defaultdict(list)
    for device, load, at in readings:
        if not expected[device] or at - expected[device][-1][-1][0] >= 10_000:
            expected[device].append([])
        expected[device][-1].append((at, load))
    sent = [(device, reading(load, at)) for device, load, at in readings]
    await send(producer, source, sent[:60])
    await run_once(options)
    await send(producer, source, [*sent[60:], ("closes", reading(0, times[-1] + 3_600_000))])
    await run_once(options)
    found = sorted(record.value for record in await read_all(bootstrap, target))
    assert [json.loads(value) for value in found] == sorted(
        (
            {
                "key": device, "start": one[0][0], "end": one[-1][0], "duration_ms": one[-1][0] - one[0][0],
                "readings": len(one), "high": max(load for _, load in one),
            }
            for device, all_of in expected.items()
            for one in all_of
        ),
        key=lambda session: json.dumps(session, separators=(",", ":")).encode(),
    )  # fmt: skip


LAST = """
job = "last-known"
source = { topics = ["SOURCE"], columns = { load = "double" }, time = "at", dead_letters = "DEAD" }
sink = { kafka = "TARGET", retained = true }
run = { checkpoint = "CHECKPOINT" }
"""


async def test_the_last_known_value_is_the_newest_by_event_time_and_never_goes_back(
    *, run_once: RunOnce, declare: Declare, producer: AIOKafkaProducer, new_topic: Any, bootstrap: str,
    gateway: GatewayProcess,
) -> None:  # fmt: skip
    source, target = await new_topic(partitions=2), await new_topic(partitions=1)
    options = declare(LAST.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", "unused"))
    rng, newest = random.Random(5), dict[str, tuple[int, bytes]]()
    for _ in range(3):
        sent: list[tuple[str, bytes | None]] = []
        for n in range(40):
            device, at = f"d{rng.randint(0, 4)}", START_MS + rng.randint(0, 60_000)
            value = reading(n, at)
            sent.append((device, value))
            newest[device] = max(newest.get(device, (0, b"")), (at, value), key=lambda one: one[0])
        await send(producer, source, sent)
        await run_once(options)
        records = await read_all(bootstrap, target)
        assert {record.key.decode(): record.value for record in records} == {key: one[1] for key, one in newest.items()}
    times: dict[bytes, int] = {}
    for record in records:
        headers = dict(record.headers)
        assert int(headers["origin.time"]) >= times.get(record.key, 0)
        times[record.key] = int(headers["origin.time"])
        assert headers["origin.topic"].decode() == source
        assert headers["origin.offset"].isdigit()
    expected = {f"{target}/{key}": one[1] for key, one in newest.items()}
    seen: dict[str, bytes] = {}
    async with asyncio.timeout(120):
        while seen != expected:  # the gateway reads them a moment later and delivers them to subscribers
            client = await RawClient.connect(gateway.address("mqtt"))
            await client.subscribe(f"{target}/#")
            with contextlib.suppress(TimeoutError):
                while seen != expected:
                    message = await client.message(timeout=3)
                    assert message.retain
                    seen[message.topic] = bytes(message.payload)
            await client.disconnect()


ANOMALIES = """
job = "anomalies"
source = { topics = ["SOURCE"], columns = { load = "double" }, time = "at", dead_letters = "DEAD" }
thresholds = { load = { above = 40.0, below = -40.0 } }
sink = { kafka = "TARGET" }
run = { checkpoint = "CHECKPOINT" }
"""


async def test_readings_beyond_thresholds_are_alarms(
    *, run_once: RunOnce, declare: Declare, producer: AIOKafkaProducer, new_topic: Any, bootstrap: str
) -> None:
    source, target, dead = await new_topic(partitions=2), await new_topic(partitions=1), await new_topic(partitions=1)
    options = declare(ANOMALIES.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", dead))
    rng = random.Random(6)
    sent = [(f"d{rng.randint(0, 3)}", reading(rng.choice([-41, -40, 0, 40, 40.5]), START_MS + n)) for n in range(80)]
    await send(producer, source, [*sent, ("d0", b"broken")])
    batches = await run_once(options)
    assert sum(batch.dead_letters or 0 for batch in batches) == 1
    expected = {}
    for record in await read_all(bootstrap, source):
        value = json.loads(record.value) if record.value != b"broken" else {"load": 0}
        if abs(value["load"]) > 40:
            bound = {"above": 40.0} if value["load"] > 0 else {"below": -40.0}
            key = f"{source}/{record.partition}/{record.offset}/load"
            expected[key] = {
                "key": record.key.decode(), "id": key, "time": value["at"], "column": "load",
                "value": value["load"], **bound,
            }  # fmt: skip
    alarms = [json.loads(record.value) for record in await read_all(bootstrap, target)]
    assert {alarm["id"]: alarm for alarm in alarms} == expected
    assert len(alarms) == len(expected)
    assert [letter.value for letter in await read_all(bootstrap, dead)] == [b"broken"]


MEANS = """
job = "anomalies"
by = "name"
thresholds = { load = { above = 90, deviations = 2.5, after = 10 } }
sink = { kafka = "TARGET" }
run = { checkpoint = "CHECKPOINT" }
[source]
topics = ["SOURCE"]
decode = "senml"
columns = { name = { type = "string", field = "n" }, load = { field = "v", optional = true } }
dead_letters = "DEAD"
"""


WORKER = """#!/bin/sh
case "$*" in
*transform_with_state_driver_worker*) mkdir {once} 2>/dev/null && exit 1 ;;
esac
exec {python} "$@"
"""


async def test_readings_far_from_the_mean_are_alarms_also_after_a_restart(
    *, run_job: Any, declare: Declare, producer: AIOKafkaProducer, new_topic: Any, bootstrap: str, tmp_path: Path,
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    worker = tmp_path / "python"
    worker.write_text(WORKER.format(once=tmp_path / "once", python=sys.executable))
    worker.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(worker))  # the first one does not start in time
    source, target = await new_topic(partitions=1), await new_topic(partitions=1)
    options = declare(MEANS.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", "unused"))
    rng = random.Random(8)

    def pack(device: int) -> bytes:
        loads = [rng.gauss(20 + device, 2) if rng.random() < 0.9 else rng.choice([50, 95]) for _ in range(2)]
        told = [{"n": "t", "v": load} for load in loads]
        return json.dumps([{"bn": f"d{device}:"}, *told, {"n": "t", "vs": "fine"}]).encode()

    for _ in range(2):
        devices = [rng.randint(0, 2) for _ in range(45)]
        await send(producer, source, [(f"d{device}", pack(device)) for device in devices])
        job = await run_job(options)
        await job.wait_for(lambda done: sum(one.rows for one in done) == 45, 300)
        await job.stop()
    assert (tmp_path / "once").is_dir()
    running: dict[str, list[float]] = defaultdict(list)
    expected: dict[str, dict[str, Any]] = {}
    log = sorted(await read_all(bootstrap, source), key=lambda record: (record.partition, record.offset))
    for record in log:
        base, *measured = json.loads(record.value)
        name = base["bn"] + "t"
        for place, one in enumerate(measured):
            if (load := one.get("v")) is None:
                continue
            about = f"{source}/{record.partition}/{record.offset}/{place}/load"
            told = {"name": name, "id": about, "time": record.timestamp, "column": "load", "value": load}
            before = running[name]
            if load > 90:
                expected[about] = {**told, "above": 90.0}
            if len(before) >= 10 and abs(load - statistics.fmean(before)) > 2.5 * statistics.stdev(before):
                mean, deviation = statistics.fmean(before), statistics.stdev(before)
                expected[f"{about}/deviation"] = {
                    **told, "id": f"{about}/deviation", "mean": mean, "deviation": deviation,
                }  # fmt: skip
            before.append(load)
    assert {about.rpartition("/")[2] for about in expected} == {"load", "deviation"}
    alarms = [json.loads(record.value) for record in await read_all(bootstrap, target)]
    found = {alarm["id"]: alarm for alarm in alarms}
    assert found.keys() == expected.keys()
    assert len(alarms) == len(expected)
    assert all(found[about] == pytest.approx(one) for about, one in expected.items())


ENRICH = """
job = "enrich"
source = { topics = ["SOURCE"], columns = { load = "double" }, time = "at", dead_letters = "DEAD" }
registry = { topic = "REGISTRY", columns = { room = "string", limit = "double" } }
sink = { kafka = "TARGET" }
run = { checkpoint = "CHECKPOINT" }
"""


async def test_an_aborted_record_of_a_registry_is_not_used(spark: SparkSession, new_topic: Any, bootstrap: str) -> None:
    topic = await new_topic(partitions=1)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=topic) as producer:
        async with producer.transaction():
            await producer.send(topic, b'{"room": "cellar"}', b"a")
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b'{"room": "roof"}', b"a")
        await producer.abort_transaction()
    found = registry.read(spark, Registry(topic=topic, columns={"room": "string"}), {"bootstrap.servers": bootstrap})
    assert [(row["_key"], row["room"]) for row in await asyncio.to_thread(found.collect)] == [("a", "cellar")]


@pytest.mark.parametrize("trigger", [MICRO_BATCH, REAL_TIME])
async def test_readings_are_enriched_from_the_current_registry(
    *, run_job: Any, declare: Declare, producer: AIOKafkaProducer, new_topic: Any, read_until: Any, bootstrap: str,
    trigger: str,
) -> None:  # fmt: skip
    source, target, dead, known = [await new_topic(partitions=1) for _ in range(4)]
    text = ENRICH.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", dead).replace("REGISTRY", known)
    options = declare(text, trigger=trigger)
    await send(
        producer, known, [("a", b'{"room": "cellar", "limit": 5}'), ("b", b'{"room": "attic"}'), ("gone", b"{}")]
    )
    await send(producer, known, [("a", b'{"room": "kitchen", "limit": 7}'), ("gone", None)])
    await send(producer, source, [(name, reading(1, START_MS)) for name in ("a", "b", "gone", "new")])
    job = await run_job(options)
    told = [json.loads(record.value) for record in await read_until(target, lambda records: len(records) == 2, 180)]
    assert told == [
        {"key": "a", "time": START_MS, "load": 1.0, "room": "kitchen", "limit": 7.0},
        {"key": "b", "time": START_MS, "load": 1.0, "room": "attic"},
    ]
    letters = await read_until(dead, lambda records: len(records) == 2, 180)
    assert [(one.key, dict(one.headers)["error"]) for one in letters] == [
        (b"gone", b"key is not in the registry"),
        (b"new", b"key is not in the registry"),
    ]
    await send(producer, known, [("new", b'{"room": "hall", "limit": "low"}')])
    enriched: list[Any] = []
    async with AIOKafkaConsumer(target, bootstrap_servers=bootstrap) as consumer, asyncio.timeout(180):
        while not enriched:  # when it next reads the registry
            await send(producer, source, [("new", reading(2, START_MS))])
            enriched = [one for batch in (await consumer.getmany(timeout_ms=1_000)).values() for one in batch]
    assert json.loads(enriched[0].value) == {"key": "new", "time": START_MS, "load": 2.0, "room": "hall"}
    await job.stop()


ARCHIVE = """
job = "archive"
source = { topics = ["SOURCE", "OTHER"], columns = { load = "double" }, time = "at" }
sink = { archive = "LAKE", segment = 2 }
run = { checkpoint = "CHECKPOINT" }
"""


async def test_an_archive_holds_every_record_once_also_when_a_batch_is_repeated(
    *, run_once: RunOnce, declare: Declare, producer: AIOKafkaProducer, new_topic: Any, bootstrap: str,
    spark: SparkSession, tmp_path: Path,
) -> None:  # fmt: skip
    source, other, lake = await new_topic(partitions=2), await new_topic(partitions=1), tmp_path / "lake"
    text = ARCHIVE.replace("SOURCE", source).replace("OTHER", other).replace("LAKE", str(lake))
    options = declare(text, max_offsets_per_trigger=30)
    headers = [("unit", b"\x00\xff"), ("none", None)]
    await send(producer, source, [(f"d{n % 5}", reading(n, START_MS + n)) for n in range(50)])
    await producer.send_and_wait(other, None, b"\xff", headers=headers)
    await run_once(options)
    commits = sorted((tmp_path / "checkpoint" / "archive" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    assert len(commits) >= 2
    commits[-1].unlink()  # as if the job had been killed between writing the files and Spark's commit
    commits[-1].with_name(f".{commits[-1].name}.crc").unlink()
    left = tmp_path / "lake.staging" / "killed" / "7" / "date=2023-11-14"
    left.mkdir(parents=True)
    await send(producer, source, [("d0", b"no reading"), ("d0", reading(51, START_MS))])
    await run_once(options)

    files = await asyncio.to_thread(lambda: [str(path) for path in tmp_path.rglob("*.parquet")])
    assert files == [path for path in files if path.startswith(f"{lake}/segment=")]
    assert not left.exists()
    rows = spark.read.option("basePath", str(lake)).parquet(*files).collect()
    found = {(row.topic, row.partition, row.offset): row for row in rows}
    log = [record for topic in (source, other) for record in await read_all(bootstrap, topic)]
    assert len(rows) == len(found) == len(log) == 53
    for record in log:
        row = found[record.topic, record.partition, record.offset]
        assert (row.key, row.value) == (record.key, record.value)
        assert tuple((header.key, header.value) for header in row.headers or ()) == record.headers
        assert row.date.isoformat() == f"{row.timestamp:%Y-%m-%d}"
        assert (row.load is None) == (row.error is not None) == (record.value in (None, b"no reading"))

    done = await asyncio.to_thread(segments.maintain, lake, Maintain(), datetime.datetime.now(datetime.UTC))
    assert done.merged > done.into
    archive = ParquetArchive(spark, str(lake), str(tmp_path / "checkpoint" / "archive"), segment=2)
    (lake / "segment=7").mkdir()
    (lake / "segment=7" / MERGED).touch()
    # A checkpoint restored from a backup repeats a batch whose directory is already merged.
    await asyncio.to_thread(archive.write, spark.read.parquet(str(lake / "segment=1")), 15)
    counted = duckdb.sql(f"SELECT count(*), count(DISTINCT (topic, partition, \"offset\")) FROM '{lake}/**/*.parquet'")
    assert counted.fetchall() == [(53, 53)]
    with pytest.raises(ArchiveError, match="has 2 batches per segment"):
        await run_once(declare(text.replace("segment = 2", "segment = 3")))

    elsewhere = declare(text.replace("CHECKPOINT", str(tmp_path / "another")))
    with pytest.raises(ArchiveError, match="was written with another checkpoint"):
        await run_once(elsewhere)
    renamed = declare(text.replace('job = "archive"', 'job = "archive"\nname = "anew"'))  # starts at batch 0 again
    with pytest.raises(ArchiveError, match="was written with another checkpoint"):
        await run_once(renamed)


@pytest.mark.parametrize("format_", ["delta", "iceberg"])
async def test_a_table_holds_every_record_once_also_when_a_batch_is_repeated(
    *, run_once: RunOnce, declare: Declare, producer: AIOKafkaProducer, new_topic: Any, bootstrap: str, tmp_path: Path,
    format_: str,
) -> None:  # fmt: skip
    source, options = await new_topic(partitions=2), {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    options["warehouse"] = f"file://{tmp_path}/lake"
    sink = f'archive = "{tmp_path}/lake", format = "delta"'
    if format_ == "iceberg":
        given = ", ".join(f'{name} = "{value}"' for name, value in options.items())
        sink = f'archive = "plant.sensors", format = "iceberg", catalog = "test", options = {{ {given} }}'
    text = ARCHIVE.replace(', "OTHER"', "").replace("SOURCE", source).replace('archive = "LAKE", segment = 2', sink)
    await producer.send_and_wait(source, None, b"\xff", headers=[("unit", b"\x00\xff"), ("none", None)])
    await send(producer, source, [(f"d{n}", reading(n, START_MS + n)) for n in range(9)])
    await run_once(declare(text))
    commit = tmp_path / "checkpoint" / "archive" / "commits" / "0"
    commit.unlink()  # as if the job had been killed between the table's commit and Spark's
    commit.with_name(".0.crc").unlink()
    await send(producer, source, [("d0", b"no reading")])
    await run_once(declare(text))

    log = await read_all(bootstrap, source)
    if format_ == "delta":
        table = DeltaTable(tmp_path / "lake").to_pyarrow_table()
    else:
        table = load_catalog("test", **options).load_table("plant.sensors").scan().to_arrow()
    found = {(row["partition"], row["offset"]): row for row in table.to_pylist()}
    assert table.num_rows == len(found) == len(log) == 11
    for record in log:
        row = found[record.partition, record.offset]
        assert (row["topic"], row["key"], row["value"]) == (source, record.key, record.value)
        assert tuple((header["key"], header["value"]) for header in row["headers"] or ()) == record.headers
        assert row["date"] == row["timestamp"].date()
        assert (row["load"] is None) == (row["error"] is not None) == (record.value in (None, b"no reading"))


async def test_a_user_defined_transform(
    *, run_once: RunOnce, declare: Declare, producer: AIOKafkaProducer, new_topic: Any, bootstrap: str
) -> None:
    source, target = await new_topic(partitions=1), await new_topic(partitions=1)
    text = (EXAMPLES / "fahrenheit.py").read_text().replace('"sensors"', f'"{source}"')
    text = text.replace('kafka="fahrenheit"', f'kafka="{target}"').replace(".trivium/spark/fahrenheit", "CHECKPOINT")
    options = declare(text, ".py")
    await send(producer, source, [("oven", b'{"temperature": 100}'), ("oven", b"hot")])
    await run_once(options)
    [record] = await read_all(bootstrap, target)
    value = json.loads(record.value)
    assert (record.key, value["key"], value["fahrenheit"]) == (b"oven", "oven", 212.0)
    wrong = declare(text.replace('"key", F', 'F.lit(1).alias("other"), F'), ".py")
    with pytest.raises(ValueError, match="the records need columns key and value, not only other, value"):
        await run_once(wrong)
