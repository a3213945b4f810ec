"""One reading never ends a job: a job of each kind, and each decoder, under everything that a topic can hold."""

from __future__ import annotations

import io
import json
import random
import struct
import time
from pathlib import Path
from typing import Any

import cbor2
import duckdb
import fastavro
import pytest
from aiokafka import AIOKafkaProducer
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

from spark_sinks.checkpoint import Checkpoint
from spark_sinks.decode import BAD_TIMESTAMP, NOT_READABLE
from spark_sinks.jobs.max_temperature import Options as MaxTemperature
from tests.support.topics import read_all
from tests.support.waiting import wait_until

LIMIT = 1_048_588  # of topics, unless they or the brokers are configured
ANY_TIME = {"message_timestamp_after_max_ms": str(2**63 - 1)}
MICROSECONDS = time.time_ns() // 1_000
LONGEST = b'{"n": 1, "x": 1, "s": "' + b"x" * (LIMIT - 130) + b'"}'
Record = dict[str, Any]

LARGEST = [
    b'{"n": 9223372036854775807, "x": 1.7976931348623157e308, "s": "\\uffff"}',
    b'{"n": -9223372036854775808, "x": -1.7976931348623157e308, "s": ""}',
    b'{"n": 5, "x": 4.9e-324, "s": "a"}',
]
VALUES = [
    None, b"", b" ", b"{}", b"[]", b"null", b"NaN", b"\xff\xfe", b'{"n": null, "x": null, "s": null}',
    b'{"n": 9223372036854775808, "x": 1, "s": "a"}', b'{"n": 1e400, "x": 1e400, "s": 1e400}',
    b'{"n": 1, "x": NaN, "s": "a"}', b'{"n": 1, "x": "Infinity", "s": "a"}', b'{"n": 1, "n": 2, "x": 1, "s": "a"}',
    b'{"n": 1, "x": ' + b"9" * 5_000 + b', "s": "a"}', b'{"x": 1e999999999, "n": 1, "s": "a"}',
    b"[" * 100_000, b'{"n":' * 100_000, b"-" * 100_000, b"9" * 1_000_000, b"," * 100_000, b'"' * 1_001,
    *(
        b'{"n": 1, "x": 1, "s": "a", "at": %s}' % at
        for at in (
            b"0", b"-1", b"1e13", b"99999999999999", b"9" * 400, b'"0000-01-01T00:00:00Z"',
            b'"0001-01-01T00:00:00+14:00"', b'"0001-01-02T00:00:00Z"', b'"9999-12-31T23:59:59-18:00"', b'{"a": [1]}',
        )
    ),
]  # fmt: skip
"""JSON that is at or beyond some limit, and what is not JSON."""


def poison(key: bytes, seed: int) -> list[Record]:
    """Make the largest, smallest, longest, nested, repeated, empty and non-finite records, and arbitrary ones."""
    rng = random.Random(seed)
    pieces = [b"{", b"}", b'"n"', b":", b",", b"1", b"-", b"e9", b"[", b"]", b"\\", b"\xff", b"\0", b" ", b"2e308"]
    made: list[Record] = [{"value": value, "key": key} for value in (*LARGEST, *LARGEST, *VALUES)]
    made += [{"value": rng.randbytes(rng.randint(1, 60)), "key": key} for _ in range(60)]
    made += [{"value": b"".join(rng.choices(pieces, k=rng.randint(1, 12))), "key": key} for _ in range(60)]
    small = LARGEST[2]
    made += [
        {"value": LONGEST, "key": b"long"},
        {"value": LONGEST, "key": b"\xff" * 60},
        {"value": b"\xff" * (LIMIT - 100), "key": key},
        {"value": small, "key": None},
        {"value": small, "key": b""},
        {"value": small, "key": b"k" * (LIMIT - 200)},
        {"value": b"bad", "key": b"k" * (LIMIT - 200)},
        {"value": small, "key": key, "headers": [("h" * 400_000, b"v" * 400_000)]},
        {"value": b"bad", "key": key, "headers": [("h" * 500_000, b"v" * 500_000)]},
        {"value": b"bad", "key": key, "headers": [("", b"") for _ in range(50_000)]},
        {"value": small, "key": key, "headers": [("content-type", b"c" * (LIMIT - 200))]},
        {"value": small, "key": key, "headers": [("creation-time", b"99999999999999"), ("creation-time", b"\xff")]},
        {"value": small, "key": key, "timestamp_ms": 0},
        {"value": small, "key": key, "timestamp_ms": MICROSECONDS},
    ]
    return made


async def send(bootstrap: str, topic: str, records: list[Record]) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, max_request_size=2 * LIMIT) as producer:
        for record in records:
            await (await producer.send(topic, **record))


COLUMNS = 'columns = { n = "long", x = "double", s = "string" }'
COMMON = """
source = { topics = ["SOURCE"], COLUMNS, time = "at", dead_letters = "DEAD" }
sink = { kafka = "TARGET" SINK }
run = { checkpoint = "CHECKPOINT" }
"""
FUNCTIONS = {
    "n": ("count", "min", "max", "sum", "mean", "stddev", "distinct"),
    "x": ("count", "min", "max", "sum", "mean", "stddev", "distinct"),
    "s": ("count", "min", "max", "distinct"),
}
AGGREGATES = "\n".join(
    [
        '[aggregates]\nreadings = "count(*)"\nmedian = "percentile(n, 0.5)"\nmiddle = "percentile(x, 0.5)"',
        *(f'{name}_{column} = "{name}({column})"' for column, names in FUNCTIONS.items() for name in names),
    ]
)
TRANSFORM = """
from pyspark.sql import functions as F

from spark_sinks.spec.jobs import Transform
from spark_sinks.spec.parts import ResultSink, Run, Source

JOB = Transform(
    source=Source(topics=("SOURCE",), columns={"n": "long", "x": "double", "s": "string"}, dead_letters="DEAD"),
    sink=ResultSink(kafka="TARGET"),
    run=Run(checkpoint="CHECKPOINT"),
)


def transform(readings):
    return readings.select("key", F.to_json(F.struct("n", "x", "s", "key", "time")).alias("value"))
"""
KINDS = {
    "window-stats": 'job = "window-stats"\nwindow = { length = "24h", watermark = "24h" }\n' + COMMON + AGGREGATES,
    "sessionize": 'job = "sessionize"\nsession = { gap = "1s", watermark = "1s" }\n'
    + COMMON.replace("SINK", ', emit = "final"') + AGGREGATES,
    "last-known": 'job = "last-known"\n' + COMMON.replace("SINK", ", retained = true"),
    "enrich": 'job = "enrich"\nregistry = { file = "REGISTRY", columns = { place = "string", size = "double" } }\n'
    + COMMON,
    "anomalies": 'job = "anomalies"\nthresholds = { x = { above = 40.0, below = -1e300 }, n = { above = 1e18 } }\n'
    + COMMON,
    "deviations": 'job = "anomalies"\nthresholds = { x = { above = 40.0, deviations = 1.0, after = 2 } }\n' + COMMON,
    "transform": TRANSFORM,
}  # fmt: skip
ARCHIVE = """
job = "archive"
source = { topics = ["SOURCE"], COLUMNS, time = "at" }
sink = { SINK }
run = { checkpoint = "CHECKPOINT" }
"""
NOT_FINITE = {"nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"}
DEVICES = [f"good-{number}" for number in range(5)]


def good(n: int) -> list[Record]:
    value = b'{"n": %d, "x": 50.5, "s": "text"}' % n
    return [{"value": value, "key": device.encode()} for device in DEVICES]


async def counted(bootstrap: str, target: str) -> dict[str, int]:
    """Return how many readings of each good device the newest results have."""
    found: dict[tuple[str, int], int] = {}
    for place, record in enumerate(await read_all(bootstrap, target)):
        value = json.loads(record.value) if record.value else {}
        assert not isinstance(value, dict) or not NOT_FINITE.intersection(map(str, value.values()))
        if (key := (record.key or b"").decode(errors="replace")) in DEVICES:
            found[key, value.get("start", place)] = value.get("readings", value.get("count", 1))
    return {device: sum(count for (key, _), count in found.items() if key == device) for device in DEVICES}


@pytest.mark.parametrize("kind", KINDS)
async def test_all_good_readings_are_counted_whatever_else_a_topic_holds(
    *,
    kind: str,
    run_once: Any,
    run_job: Any,
    declare: Any,
    new_topic: Any,
    bootstrap: str,
    tmp_path: Path,
    gateway: Any,
) -> None:
    source = await new_topic(partitions=1, **ANY_TIME)
    target, dead = [await new_topic(partitions=1, max_message_bytes=str(LIMIT)) for _ in range(2)]
    registry = tmp_path / "registry.jsonl"
    rows = [{"key": device, "place": "x", "size": 1} for device in (*DEVICES, "poison", "long")]
    registry.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = KINDS[kind].replace("SINK", "").replace("SOURCE", source).replace("TARGET", target).replace("DEAD", dead)
    text = text.replace("REGISTRY", str(registry)).replace("COLUMNS", COLUMNS)
    options = declare(text, ".py" if kind == "transform" else ".toml")
    for seed in range(2):
        await send(bootstrap, source, [*good(seed), *poison(b"poison", seed), *good(seed)])
        await run_once(options)
    soon = round(time.time() * 1_000) + 50_000
    await send(bootstrap, source, [{"value": b'{"n": 1, "x": 1, "s": "", "at": %d}' % soon, "key": b"closes"}])
    await run_once(options)
    job = await run_job(options)
    if job.scans:
        await wait_until(lambda: bool(job.examined))
    await job.stop()
    found = await counted(bootstrap, target)
    assert all(found.values()) if kind == "last-known" else found == dict.fromkeys(DEVICES, 4)
    letters = await read_all(bootstrap, dead)
    assert not any(record.key in [device.encode() for device in DEVICES] for record in letters)
    reasons = {dict(record.headers)["error"] for record in letters}
    assert {BAD_TIMESTAMP.encode(), NOT_READABLE["json"].encode()} <= reasons
    if kind not in {"anomalies", "deviations"}:  # whose results are small
        assert any(b"bytes, and the topic" in reason for reason in reasons), reasons


LAKES = {
    "parquet": 'archive = "LAKE"',
    "delta": 'archive = "LAKE", format = "delta"',
    "iceberg": 'archive = "plant.t", format = "iceberg", options = { type = "sql", uri = "sqlite:///LAKE.db", '
    'warehouse = "file://LAKE" }',
}


@pytest.mark.parametrize("lake", LAKES)
async def test_an_archive_holds_every_record_whatever_a_topic_holds(
    *, lake: str, run_once: Any, declare: Any, new_topic: Any, bootstrap: str, tmp_path: Path
) -> None:
    source, place = await new_topic(partitions=1, **ANY_TIME), tmp_path / "lake"
    sink = LAKES[lake].replace("LAKE", str(place))
    text = ARCHIVE.replace("SINK", sink).replace("SOURCE", source).replace("COLUMNS", COLUMNS)
    sent = 0
    for seed in range(2):
        records = [*good(seed), *poison(b"poison", seed)]
        sent += len(records)
        await send(bootstrap, source, records)
        await run_once(declare(text))
    files = [str(path) for path in place.rglob("*.parquet")]
    rows = duckdb.sql(f'SELECT "offset", error FROM read_parquet({files}, union_by_name = true)')
    found = rows.fetchall()
    assert sorted(offset for offset, *_ in found) == list(range(sent))
    assert all(error is None for offset, error in found if offset < len(DEVICES))


async def test_the_maximum_of_each_good_sensor(
    *, run_once: Any, new_topic: Any, bootstrap: str, tmp_path: Path
) -> None:
    options = MaxTemperature(
        bootstrap_servers=bootstrap, checkpoint=str(tmp_path), source=await new_topic(partitions=1, **ANY_TIME),
        target=await new_topic(partitions=1, max_message_bytes=str(LIMIT)),
        dead_letter=await new_topic(partitions=1, max_message_bytes=str(LIMIT)), window_ms=86_400_000,
        slide_ms=86_400_000, watermark_ms=86_400_000,
    )  # fmt: skip
    readings = [{"value": b'{"temperature": 20}', "key": device.encode()} for device in DEVICES]
    for seed in range(2):
        hot = [{**one, "value": (one["value"] or b"").replace(b'"x"', b'"temperature"')} for one in poison(b"p", seed)]
        await send(bootstrap, options.source, [*readings, *hot, *readings])
        await run_once(options)
    assert await counted(bootstrap, options.target) == dict.fromkeys(DEVICES, 4)


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


@pytest.mark.parametrize("decoder", DECODERS)
async def test_each_decoder_goes_on_after_any_value(
    *, decoder: str, run_once: Any, declare: Any, new_topic: Any, bootstrap: str, tmp_path: Path
) -> None:
    source, target, dead = [await new_topic(partitions=1, **ANY_TIME) for _ in range(3)]
    (tmp_path / "avro").write_text(json.dumps(AVRO))
    (tmp_path / "protobuf").write_bytes(descriptor_set())
    rng, value = random.Random(decoder), encoded(decoder)
    broken: list[Record] = []
    for _ in range(200):
        bent = bytearray(value)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(bent))
            bent[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
        broken.append({"value": bytes(bent), "key": b"bent"})
    text = 'job = "anomalies"\nthresholds = { x = { above = 40.0 } }\n' + COMMON.replace("SINK", "")
    text = text.replace(', time = "at"', f', decode = "{decoder}"').replace("COLUMNS", DECODERS[decoder])
    text = text.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", dead)
    readings = [{"value": value, "key": device.encode()} for device in DEVICES]
    await send(bootstrap, source, [*readings, *poison(b"poison", 3), *broken, *readings])
    await run_once(declare(text.replace("DIRECTORY", str(tmp_path))))
    assert await counted(bootstrap, target) == dict.fromkeys(DEVICES, 2)


async def test_a_checkpoint_from_before_sums_could_be_missing_goes_on_with_its_own_plan(
    *, run_once: Any, declare: Any, new_topic: Any, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, dead = [await new_topic(partitions=1) for _ in range(3)]
    text = KINDS["window-stats"].replace("SINK", "").replace("COLUMNS", COLUMNS)
    options = declare(text.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", dead))
    with monkeypatch.context() as former:
        former.setattr(Checkpoint, "lacks_in_state", lambda *_: True)  # the plan of before
        await send(bootstrap, source, good(3))
        await run_once(options)
    await send(bootstrap, source, good(4))
    await run_once(options)
    assert await counted(bootstrap, target) == dict.fromkeys(DEVICES, 2)
    sums = [json.loads(record.value)["sum_n"] for record in await read_all(bootstrap, target)]
    assert sums == [3] * len(DEVICES) + [7] * len(DEVICES)
