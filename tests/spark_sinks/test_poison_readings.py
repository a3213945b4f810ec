"""One reading never ends a job: a job of each kind, and each decoder, under everything that a topic can hold."""

from __future__ import annotations

import asyncio
import io
import json
import random
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import cbor2
import duckdb
import fastavro
import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

from loadtest.spark.readings import Topics
from spark_sinks.jobs.max_temperature import Options as MaxTemperature
from spark_sinks.read.decode import BAD_TIMESTAMP, NOT_READABLE
from spark_sinks.spark.checkpoint import JobCheckpoint
from spark_sinks.spec.triggers import MICRO_BATCH, REAL_TIME
from tests.support.poison_jobs import COLUMNS, GOOD, IN_REAL_TIME, KINDS, LAKES, counted, job_file, suffix
from tests.support.poison_records import (
    ANY_TIME,
    DEVICES,
    LIMIT,
    Record,
    arbitrary,
    at_once,
    fast,
    good,
    send,
    stream,
)
from tests.support.topics import create_topic, read_all
from tests.support.waiting import wait_until

SHORT_BATCHES = {  # in TOML and in Python
    "run = { ": 'run = { conf = { "spark.sql.streaming.realTimeMode.minBatchDuration" = "1s" }, ',
    "run=Run(": 'run=Run(conf={"spark.sql.streaming.realTimeMode.minBatchDuration": "1s"}, ',
}
TIMES = {name.replace(".", "_"): value for name, value in ANY_TIME.items()}


def turns(now_ms: int) -> list[list[Record]]:
    """Make the records of two batches of a minute before; the last reading, of now, closes their windows."""
    second = [*good(1), *fast(1, now_ms), *arbitrary(1), *fast(1, now_ms), *good(1)]
    last = {"value": b'{"n": 1, "x": 1, "s": "", "at": %d}' % (now_ms + 50_000), "key": b"closes"}
    return [stream(now_ms - 60_000), [*at_once(second, now_ms - 59_000), {**last, "timestamp_ms": now_ms}]]


FIRST, SECOND = map(len, turns(0))
SENT = FIRST + SECOND


@pytest.fixture(scope="session")
async def everything(bootstrap: str, admin: AIOKafkaAdminClient) -> str:
    """A topic with the records of `turns`."""
    topic = await create_topic(admin, partitions=1, **TIMES)
    for records in turns(round(time.time() * 1_000)):
        await send(bootstrap, topic, records)
    return topic


def told_to(options: Any, trigger: str) -> Any:
    """Return options for two batches, or for real time."""
    if trigger == MICRO_BATCH:
        return msgspec.structs.replace(options, max_offsets_per_trigger=FIRST)
    return msgspec.structs.replace(options, trigger=trigger, interval_ms=2_000)


RunKind = Callable[[str, str], Awaitable[None]]


@pytest.fixture
def run_kind(
    *, run_job: Any, declare: Any, everything: str, new_topic: Any, bootstrap: str, tmp_path: Path, gateway: Any
) -> RunKind:
    """Run a job of a kind with a trigger over `everything`, and check that it has counted what is good."""

    async def run(kind: str, trigger: str) -> None:
        target, dead = [await new_topic(partitions=1, max_message_bytes=str(LIMIT)) for _ in range(2)]
        text = job_file(kind, Topics(everything, target, dead), tmp_path, real_time=trigger == REAL_TIME)
        for before, after in SHORT_BATCHES.items() if trigger == REAL_TIME else ():
            text = text.replace(before, after)
        job = await run_job(told_to(declare(text, suffix(kind)), trigger))
        await job.wait_for(lambda done: sum(one.rows for one in done) == SENT, 180)
        if job.scans:
            await wait_until(lambda: sum(one.rows for one in job.examined) == SENT, 180)

        async def are_counted() -> bool:
            found = await counted(bootstrap, target)
            return all(found.values()) if kind == "last-known" else found == dict.fromkeys(GOOD, 4)

        await wait_until(are_counted, 180)
        await job.stop()
        letters = await read_all(bootstrap, dead)
        assert not any(record.key in [device.encode() for device in GOOD] for record in letters), kind
        reasons = {dict(record.headers)["error"] for record in letters}
        assert {BAD_TIMESTAMP.encode(), NOT_READABLE["json"].encode()} <= reasons, kind
        if kind not in {"anomalies", "deviations"}:  # whose results are small
            assert any(b"bytes, and the topic" in reason for reason in reasons), (kind, reasons)

    return run


@pytest.mark.parametrize("kind", KINDS)
async def test_all_good_readings_are_counted_whatever_else_a_topic_holds(kind: str, run_kind: RunKind) -> None:
    await run_kind(kind, MICRO_BATCH)


@pytest.mark.parametrize("kind", IN_REAL_TIME)
async def test_all_good_readings_are_counted_in_real_time_too(kind: str, run_kind: RunKind) -> None:
    await run_kind(kind, REAL_TIME)


async def test_an_archive_holds_every_record_whatever_a_topic_holds(
    *, run_once: Any, declare: Any, everything: str, tmp_path: Path
) -> None:
    jobs = []
    for lake in LAKES:
        text = job_file(lake, Topics(everything, "", ""), tmp_path, real_time=False)
        jobs.append(run_once(told_to(declare(text), MICRO_BATCH)))
    await asyncio.gather(*jobs)
    for lake in LAKES:
        files = [str(path) for path in (tmp_path / lake / "lake").rglob("*.parquet")]
        rows = duckdb.sql(f'SELECT "offset", key, error FROM read_parquet({files}, union_by_name = true)').fetchall()
        assert sorted(offset for offset, *_ in rows) == list(range(SENT)), lake
        assert all(error is None for _, key, error in rows if key in [device.encode() for device in GOOD]), lake


async def test_the_maximum_of_each_good_sensor(
    *, run_once: Any, new_topic: Any, bootstrap: str, tmp_path: Path
) -> None:
    options = MaxTemperature(
        bootstrap_servers=bootstrap, checkpoint=str(tmp_path), source=await new_topic(partitions=1, **TIMES),
        target=await new_topic(partitions=1, max_message_bytes=str(LIMIT)),
        dead_letter=await new_topic(partitions=1, max_message_bytes=str(LIMIT)), window_ms=10_000, slide_ms=10_000,
        watermark_ms=10_000,
    )  # fmt: skip
    for records in turns(round(time.time() * 1_000)):
        hot = [{**one, "value": (one["value"] or b"").replace(b'"x"', b'"temperature"')} for one in records]
        await send(bootstrap, options.source, hot)
    await run_once(told_to(options, MICRO_BATCH))
    assert await counted(bootstrap, options.target) == dict.fromkeys(GOOD, 4)


AVRO = {"type": "record", "name": "R", "fields": [{"name": "x", "type": "double"}, {"name": "n", "type": "long"}]}


def encoded(decoder: str) -> bytes:
    """Return a good reading, x = 50.5 and n = 7, in a decoder's format."""
    written = io.BytesIO()
    fastavro.schemaless_writer(written, fastavro.parse_schema(AVRO), {"x": 50.5, "n": 7})
    return {
        "number": b"50.5",
        "csv": b"50.5,7",
        "avro": written.getvalue(),
        "cbor": cbor2.dumps({"x": 50.5, "n": 7}),
        "protobuf": b"\x09" + struct.pack("<d", 50.5) + b"\x10\x07",
        "senml": b'[{"n": "a", "v": 50.5}]',
    }[decoder]


def descriptor_set() -> bytes:
    file = descriptor_pb2.FileDescriptorProto(name="r.proto", syntax="proto3")
    message = file.message_type.add(name="R")
    message.field.add(name="x", number=1, type=Field.TYPE_DOUBLE, label=Field.LABEL_OPTIONAL)
    message.field.add(name="n", number=2, type=Field.TYPE_INT64, label=Field.LABEL_OPTIONAL)
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


DECODERS = {
    "number": 'columns = { x = "double" }',
    "csv": 'columns = { x = "double", n = "long" }, fields = ["x", "n"]',
    "avro": 'columns = { x = "double", n = "long" }, schema_file = "DIRECTORY/avro"',
    "cbor": 'columns = { x = "double", n = "long" }',
    "protobuf": 'columns = { x = "double", n = "long" }, schema_file = "DIRECTORY/protobuf", message = "R"',
    "senml": 'columns = { x = { field = "v", optional = true } }',
}


async def test_each_decoder_goes_on_after_any_value(
    *, run_once: Any, declare: Any, everything: str, new_topic: Any, bootstrap: str, tmp_path: Path
) -> None:
    schemas = tmp_path / "schemas"
    schemas.mkdir()
    (schemas / "avro").write_text(json.dumps(AVRO))
    (schemas / "protobuf").write_bytes(descriptor_set())
    jobs, targets = [], {}
    for decoder, columns in DECODERS.items():
        own, targets[decoder], dead = [await new_topic(partitions=1) for _ in range(3)]
        rng, value = random.Random(decoder), encoded(decoder)
        broken: list[Record] = []
        for _ in range(200):
            bent = bytearray(value)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(bent))
                bent[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
            broken.append({"value": bytes(bent), "key": b"bent"})
        readings = [{"value": value, "key": device.encode()} for device in GOOD]
        await send(bootstrap, own, [*readings, *broken, *readings])
        topics = Topics(everything, targets[decoder], dead)
        text = job_file("anomalies", topics, tmp_path, real_time=False)
        text = text.replace(', time = "at"', f', decode = "{decoder}"').replace(COLUMNS, columns)
        text = text.replace(", n = { above = 1e18 }", "").replace(f'["{everything}"]', f'["{everything}", "{own}"]')
        text = text.replace("DIRECTORY", str(schemas)).replace("/anomalies/", f"/{decoder}/")
        jobs.append(run_once(declare(text.replace('name = "anomalies"', f'name = "{decoder}"'))))
    await asyncio.gather(*jobs)
    for decoder, target in targets.items():
        assert await counted(bootstrap, target) == dict.fromkeys(GOOD, 2), decoder


async def test_a_checkpoint_from_before_sums_could_be_missing_goes_on_with_its_own_plan(
    *, run_once: Any, declare: Any, new_topic: Any, bootstrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, dead = [await new_topic(partitions=1) for _ in range(3)]
    text = job_file("window-stats", Topics(source, target, dead), tmp_path, real_time=False)
    options = declare(text.replace('"10s"', '"24h"'))
    with monkeypatch.context() as former:
        former.setattr(JobCheckpoint, "lacks_in_state", lambda *_: True)  # the plan of before
        await send(bootstrap, source, good(3))
        await run_once(options)
    await send(bootstrap, source, good(4))
    await run_once(options)
    found = await counted(bootstrap, target)
    assert {device: found[device] for device in DEVICES} == dict.fromkeys(DEVICES, 2)
    sums = [json.loads(record.value)["sum_n"] for record in await read_all(bootstrap, target)]
    assert sums == [3] * len(DEVICES) + [7] * len(DEVICES)
