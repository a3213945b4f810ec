"""Records as typed columns, and the decoders. All cases go through Spark in one batch."""

from __future__ import annotations

import io
import json
import random
import re
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import fastavro
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.read import decode, registry
from spark_sinks.read.records import records, term
from spark_sinks.spec.parts import Registry, Source
from spark_sinks.spec.values import Term
from spark_sinks.transforms import enrich

SOURCE = (
    "key binary, value binary, headers array<struct<key: string, value: binary>>, "
    "topic string, partition int, offset bigint, timestamp timestamp"
)
ARRIVAL_MS = 1_700_000_000_123
Headers = list[tuple[str, bytes | None]] | None


class Sent(NamedTuple):
    value: bytes | None
    key: bytes | None = b"kitchen/temp"
    headers: Headers = None


def instant(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC).replace(microsecond=ms % 1000 * 1000)


def frame(spark: SparkSession, sent: list[Sent]) -> DataFrame:
    at = instant(ARRIVAL_MS)
    rows = [(one.key, one.value, one.headers, "sensors", 1, n, at) for n, one in enumerate(sent)]
    return spark.createDataFrame(rows, SOURCE).coalesce(1)  # one task, hence one Python worker


def read(spark: SparkSession, sent: list[Sent], *by: str, **source: Any) -> list[Row]:
    declared = Source(topics=("sensors",), dead_letters="dlq", **source)
    needed = [(text, term(Term.parse(text))) for text in by]
    checked = decode.readings(records(frame(spark, sent)), declared, needed)
    return checked.orderBy("offset").withColumn("time_ms", F.unix_millis("time")).collect()


def test_a_record_has_typed_columns_for_every_protocol(spark: SparkSession) -> None:
    sent = [
        Sent(b"1", headers=[("mqtt.topic", b"sensors/a/b"), ("content-type", b"text/plain"), ("x", b"1"), ("x", b"2")]),
        Sent(b"1", key=None, headers=[("content-type", b"\xff"), ("null", None), ("", b"empty")]),
        Sent(b"1", key=b"\xff\xfe"),
        Sent(b"1", key=b""),
        Sent(None, key="Küche/温度".encode(), headers=[]),
    ]
    rows = records(frame(spark, sent)).orderBy("offset").collect()
    assert [row.key for row in rows] == ["kitchen/temp", None, None, "", "Küche/温度"]
    assert [row.levels for row in rows] == [
        ["sensors", "a", "b"], ["sensors"], ["sensors"], ["sensors"], ["sensors", "Küche", "温度"],
    ]  # fmt: skip
    assert [row.content_type for row in rows] == ["text/plain", None, None, None, None]
    assert rows[0].headers == {"mqtt.topic": "sensors/a/b", "content-type": "text/plain", "x": "1"}
    assert rows[1].headers == {"content-type": None, "null": None, "": "empty"}
    assert [row.headers for row in rows[2:]] == [None, None, {}]
    assert rows[1].record.headers[0].value == b"\xff"


def test_the_time_is_the_first_available_one_that_is_not_ahead(spark: SparkSession) -> None:
    ahead, header, own = ARRIVAL_MS + 60_001, ARRIVAL_MS - 5_000, ARRIVAL_MS - 2_000

    def reading(time: object, *created: int) -> Sent:
        headers: Headers = [("creation-time", b"%d" % at) for at in created]
        return Sent(b'{"v": 1, "at": {"t": %s}}' % str(time).encode(), headers=headers)

    sent = [
        reading(own, header), reading(own), reading("null", header), reading(own, ahead), reading(ahead),
        reading(ahead, ahead),
        reading(ARRIVAL_MS + 60_000), reading('"2023-11-14T22:13:20Z"'),
        reading('"noon"'), reading(-1), reading('"noon"', header), Sent(b'{"v": 1}', headers=[("creation-time", b"x")]),
    ]  # fmt: skip
    rows = read(spark, sent, columns={"v": "long"}, time="at.t")
    assert [row.time_ms for row in rows] == [
        own, own, header, own, ARRIVAL_MS, ARRIVAL_MS, ARRIVAL_MS, 1_700_000_000_000,
        ARRIVAL_MS, ARRIVAL_MS, header, ARRIVAL_MS,
    ]  # fmt: skip
    assert [row.error for row in rows] == [None] * 8 + [decode.BAD_TIME] * 3 + [None]
    strict = read(spark, sent, columns={"v": "long"}, time="at.t", beyond_ahead="dead-letter")
    assert [row.error for row in strict[:7]] == [*[None] * 4, decode.AHEAD, decode.AHEAD, None]
    assert [row.time_ms for row in strict[:7]] == [row.time_ms for row in rows[:7]]


@pytest.mark.parametrize("decoder", ["json", "senml"])
def test_no_time_is_later_than_its_arrival(spark: SparkSession, decoder: str) -> None:
    """Whatever a sender says: in the value, in a header, or in both."""
    rng = random.Random(11)
    near = (-1, 0, 1, 59_999, 60_000, 60_001, 600_000)

    def some() -> int:
        return rng.choice([ARRIVAL_MS + rng.choice(near), rng.randrange(10 ** rng.randint(1, 14))])

    sent = []
    for _ in range(200):
        headers: Headers = [("creation-time", b"%d" % some())] * rng.randint(0, 1)
        own = some()
        value = {"v": 1, "t": own} if decoder == "json" else [{"n": "a", "v": 1, "t": own / 1000}]
        sent.append(Sent(json.dumps(value).encode(), headers=headers))
    columns: dict[str, Any] = {"v": "double"} if decoder == "json" else {"load": {"field": "v"}}
    given = {"time": "t"} if decoder == "json" else {}
    rows = read(spark, sent, decode=decoder, columns=columns, **given)
    assert len(rows) == len(sent)
    assert max(row.time_ms for row in rows) == ARRIVAL_MS
    assert sum(row.error is None for row in rows) > len(sent) // 2


def test_epoch_seconds_are_read_as_what_they_are(spark: SparkSession) -> None:
    texts = ("1700000000", "1700000000.1", "1.7e9", '"1700000000"', "999999999", "10000000000", "1700000000000")
    rows = read(spark, [Sent(b'{"v": 1, "t": %s}' % text.encode()) for text in texts], columns={"v": "long"}, time="t")
    assert [row.time_ms for row in rows] == [
        1_700_000_000_000, 1_700_000_000_100, 1_700_000_000_000, 1_700_000_000_000, 999_999_999, 10_000_000_000,
        1_700_000_000_000,
    ]  # fmt: skip
    assert [row.error for row in rows] == [None] * len(texts)


def test_a_number_in_a_time_is_what_the_pattern_allows(spark: SparkSession) -> None:
    chance = random.Random(28)
    texts = ["".join(chance.choices("0123456789. -+eE\t", k=chance.randint(0, 17))) for _ in range(2_000)]
    texts += [str(chance.randrange(10 ** chance.randint(1, 19))) for _ in range(2_000)]
    texts += [
        "0",
        "007",
        "99999999999999",
        "100000000000000",
        "-1",
        "+1",
        " 1",
        "1 ",
        "1.",
        "1.5",
        "1.7E9",
        "9" * 30,
        "١",
    ]
    rows = (
        spark.createDataFrame([(text,) for text in texts], "text string").select(decode.epoch(F.col("text"))).collect()
    )
    allowed = re.compile(decode.MILLISECONDS)
    assert [row[0] for row in rows] == [float(text) if allowed.search(text) else None for text in texts]


def test_json_columns(spark: SparkSession) -> None:
    columns = {
        "load": "double", "n": "long", "on": {"type": "boolean", "optional": True},
        "_": None, "lat": {"type": "double", "field": "at.lat", "optional": True},
        "who": {"type": "string", "field": "name", "optional": True},
    }  # fmt: skip
    columns.pop("_")
    good = {
        b'{"load": 1, "n": 2}': (1.0, 2, None, None, None),
        b' {"load": -1.5e-3, "n": -9, "on": true, "at": {"lat": 52.5, "x": []}, "name": "a"}\n': (
            -0.0015, -9, True, 52.5, "a",
        ),
        b'{"load": 1, "n": 2, "at": 7, "on": "yes"}': (1.0, 2, None, None, None),
        b'{"n": 2, "load": 1, "name": 5, "text": 1, "error": 2}': (1.0, 2, None, None, "5"),
    }  # fmt: skip
    bad = {
        None: "the value is no", b"": "the value is no", b"21": "the value is no", b"\xff": "the value is no",
        b'{"load": 1, "n": 2': "the value is no", b'{"load": 1, "n": 2} x': "the value is no",
        b'[{"load": 1, "n": 2}]': "the value is no", b'{"load": 1, "n": 2},{"load": 1, "n": 2}': "the value is no",
        b'{"n": 2}': "load is missing or not a finite number", b'{"load": "1", "n": 2}': "load is missing",
        b'{"load": 1e400, "n": 2}': "load is missing", b'{"load": NaN, "n": 2}': "",
        b'{"load": 1, "n": 2.5}': "n is missing or not a whole", b'{"load": 1, "n": 99999999999999999999}': "n is",
    }  # fmt: skip
    rows = read(spark, [Sent(value) for value in (*good, *bad)], columns=columns)
    assert [(row.load, row.n, row.on, row.lat, row.who) for row in rows[: len(good)]] == list(good.values())
    assert [row.error for row in rows[: len(good)]] == [None] * len(good)
    told = [(row.value, row.error) for row in rows[len(good) :]]
    assert [
        one for one, said in zip(told, bad.values(), strict=True) if not (one[1] or "").startswith(said) or not one[1]
    ] == []


@pytest.mark.parametrize(("kind", "value"), [("long", ARRIVAL_MS), ("double", float(ARRIVAL_MS))])
def test_the_field_of_the_time_may_be_a_column_too(spark: SparkSession, kind: str, value: float) -> None:
    sent = [Sent(b'{"at": %d}' % ARRIVAL_MS), Sent(b'{"at": "soon"}')]
    good, bad = read(spark, sent, columns={"at": kind}, time="at")
    assert (good.at, type(good.at), good.time_ms, good.error) == (value, type(value), ARRIVAL_MS, None)
    assert bad.error.startswith("at is missing or not a ")


def test_a_field_may_be_columns_of_several_types(spark: SparkSession) -> None:
    declared = {"number": {"field": "load"}, "text": {"type": "string", "field": "load", "optional": True}}
    good, bad = read(spark, [Sent(b'{"load": 1.5}'), Sent(b'{"load": "much"}')], columns=declared)
    assert (good.number, good.text, good.error) == (1.5, "1.5", None)
    assert bad.error == "number is missing or not a finite number"


def test_numbers(spark: SparkSession) -> None:
    good = {b"21.5": 21.5, b" -1e2\n": -100.0, b"0": 0.0}
    bad = [b"", b"hot", b"NaN", b"1.5d", b"021", b"1e400", b"0x1", b"1 2", None]
    rows = read(spark, [Sent(value) for value in (*good, *bad)], decode="number", columns={"level": "double"})
    assert [row.level for row in rows[:3]] == list(good.values())
    assert [row.error is None for row in rows] == [True] * 3 + [False] * len(bad)


def test_lines_of_csv(spark: SparkSession) -> None:
    good = {
        b"17;1700000000000;7": (17.0, 7, 1_700_000_000_000),
        b'"17";"2023-11-14T22:13:20Z";-7\n': (17.0, -7, 1_700_000_000_000),
        b"17;;7": (17.0, 7, ARRIVAL_MS),
        b"17;": (17.0, None, ARRIVAL_MS),
    }
    bad = [b"", b"x;;1", b"17;noon;1", b"17;;1;4", b"17;;1;4;5", b"17;;1\n18;;2", b";;1", b"\xff;;1", None]
    rows = read(
        spark, [Sent(value) for value in (*good, *bad)], decode="csv", fields=("load", "at", "n"), separator=";",
        columns={"load": "double", "n": {"type": "long", "optional": True}}, time="at",
    )  # fmt: skip
    assert [(row.load, row.n, row.time_ms) for row in rows[:4]] == list(good.values())
    assert [row.error is None for row in rows] == [True] * 4 + [False] * len(bad)


def test_grouping_columns_are_required(spark: SparkSession) -> None:
    sent = [Sent(b"1"), Sent(b"1", key=b"kitchen"), Sent(b"1", key=None), Sent(b"1", headers=[("unit", b"C")])]
    rows = read(spark, sent, "level[3]", decode="none")
    assert [row.error for row in rows] == [None, *["level[3] is missing or not a text"] * 2, None]
    rows = read(spark, sent, "header[unit]", "key", decode="none")
    assert [row.error for row in rows] == ["header[unit] is missing or not a text"] * 3 + [None]


@pytest.mark.parametrize(
    "source",
    [
        {"columns": {"v": "double", "b": {"type": "boolean", "field": "x.b", "optional": True}}, "time": "t"},
        {"decode": "number", "columns": {"v": "long"}},
        {"decode": "csv", "fields": ("v", "t"), "columns": {"v": "double"}, "time": "t"},
    ],
)
def test_random_bytes_never_stop_the_stream(spark: SparkSession, source: dict[str, Any]) -> None:
    rng = random.Random(11)
    pieces = [b"{", b"}", b'"', b"v", b":", b"1", b"e9", b"t", b"-", b"\x00", b"\xc3", b",", b"[", b" ", b"\n", b"x"]
    values = [b"".join(rng.choices(pieces, k=rng.randint(0, 12))) for _ in range(500)]
    values += [rng.randbytes(rng.randint(0, 40)) for _ in range(500)]
    values += [b'{"v": %s, "t": %s}' % (b"9" * n, b"9" * n) for n in range(1, 60)]
    values += [b"%s,%s" % (b"9" * n, b"9" * n) for n in range(1, 60)]
    names = [b"mqtt.topic", b"creation-time", b"content-type", b"x"]
    sent = [
        Sent(value, rng.randbytes(2), [(rng.choice(names).decode(), rng.randbytes(3)) for _ in range(3)])
        for value in values
    ]
    rows = read(spark, sent, "key", "level[1]", **source)
    assert len(rows) == len(values)
    assert all(row.error or (row.v is not None and row.time and row.key is not None) for row in rows)


AVRO: dict[str, Any] = {
    "type": "record", "name": "Reading", "namespace": "plant",
    "fields": [
        {"name": "v", "type": ["null", "float"]},
        {"name": "from", "type": {"type": "record", "name": "Place", "fields": [
            {"name": "floor", "type": "int"}, {"name": "room", "type": ["null", "string"]}]}},
        {"name": "to", "type": ["null", "Place"]},
        {"name": "mode", "type": {"type": "enum", "name": "Mode", "symbols": ["OFF", "HEATING"]}},
        {"name": "t", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "rest", "type": {"type": "map", "values": "bytes"}},
    ],
}  # fmt: skip


def avro_bytes(record: dict[str, Any]) -> bytes:
    written = io.BytesIO()
    fastavro.schemaless_writer(written, AVRO, record)
    return written.getvalue()


def test_records_of_avro(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(2)
    sent = [
        {
            "v": rng.choice([None, rng.uniform(-50, 50)]),
            "from": {"floor": rng.randint(-3, 90), "room": rng.choice([None, "Küche"])},
            "to": rng.choice([None, {"floor": 1, "room": "b"}]), "mode": rng.choice(["OFF", "HEATING"]),
            "t": (ARRIVAL_MS - rng.randint(0, 9_999)) * 1_000, "rest": {"a": b"x"},
        }
        for _ in range(40)
    ]  # fmt: skip
    good = [avro_bytes(one) for one in sent]
    noise = [rng.randbytes(rng.randint(0, 30)) for _ in range(300)]
    noise += [bytes(b ^ (rng.random() < 0.1) << rng.randrange(8) for b in value) for value in good]
    noise += [good[0][:place] for place in range(len(good[0]))]
    noise += [b"\x02" + b"\xfe\xff\xff\xff\x0f" * 3]  # a string length of 2 GB
    schema = tmp_path / "reading.avsc"
    schema.write_text(json.dumps(AVRO))
    columns = {
        "v": {"optional": True}, "floor": {"type": "long", "field": "from.floor"},
        "room": {"type": "string", "field": "from.room", "optional": True},
        "target": {"type": "double", "field": "to.floor", "optional": True}, "mode": {"type": "string"},
    }  # fmt: skip
    header = b"\x00" + struct.pack(">I", 7)
    values = [*(header + value for value in (*good, *noise)), *good, b"\x00\x00\x00\x00\x08" + good[0], None]
    rows = read(
        spark, [Sent(value) for value in values], decode="avro", schema_file=str(schema), columns=columns, time="t",
        framing="confluent", schema_id=7,
    )  # fmt: skip
    expected = [
        (
            None if one["v"] is None else struct.unpack("f", struct.pack("f", one["v"]))[0], one["from"]["floor"],
            one["from"]["room"], one["to"] and one["to"]["floor"], one["mode"], one["t"] // 1_000, None,
        )
        for one in sent
    ]  # fmt: skip
    told = [(row.v, row.floor, row.room, row.target, row.mode, row.time_ms, row.error) for row in rows]
    assert told[: len(good)] == expected
    assert all(row.error or (row.floor is not None and row.mode) for row in rows)
    assert {row.error for row in rows[len(good) + len(noise) : -2]} <= {
        "the value has no Confluent header", "the value was written with schema 16843009, not 7",
    } | {row.error for row in rows if (row.error or "").startswith("the value was written with schema")}  # fmt: skip
    assert [row.error for row in rows[-2:]] == [
        "the value was written with schema 8, not 7", "the value is not a record of the schema",
    ]  # fmt: skip


def test_packs_and_maps_are_decoded_in_python_workers(spark: SparkSession) -> None:
    rng = random.Random(5)
    pack = json.dumps([{"bn": "a:", "n": "t", "v": 20, "t": -5}, {"n": "h", "v": 60, "bt": 1.7e9}]).encode()
    packed = cbor2.dumps([{-2: "b:", 0: "t", 2: 21.5, 6: (ARRIVAL_MS + 600_000) / 1000}])
    noise = [rng.randbytes(rng.randint(0, 30)) for _ in range(50)]
    sent = [Sent(pack), Sent(packed, key=None), Sent(pack, headers=[("creation-time", b"%d" % (ARRIVAL_MS - 9_000))])]
    sent += [Sent(value) for value in (b'[{"n": "a", "v": 1}, {"n": "b"}]', None, *noise)]
    columns = {"name": {"type": "string", "field": "n"}, "load": {"field": "v"}}
    rows = read(spark, sent, "level[3]", decode="senml", columns=columns)
    found = [(row.offset, row.name, row.load, row.time_ms, row.error, row[decode.PLACE]) for row in rows[:7]]
    no_level = "level[3] is missing or not a text"
    assert found[:5] == [
        (0, "a:t", 20.0, ARRIVAL_MS - 5_000, None, 0), (0, "a:h", 60.0, 1_700_000_000_000, None, 1),
        (1, "b:t", 21.5, ARRIVAL_MS, no_level, 0),
        (2, "a:t", 20.0, ARRIVAL_MS - 14_000, None, 0), (2, "a:h", 60.0, 1_700_000_000_000, None, 1),
    ]  # fmt: skip
    assert [row[4] for row in found[5:]] == [
        "record 1 of the pack: a record must have one of v, vs, vb and vd, or a sum", "the value is null",
    ]  # fmt: skip
    assert len(rows) == 2 + len(sent)
    assert all(row.error for row in rows[5:])

    values = [cbor2.dumps({"at": {"t": ARRIVAL_MS - 7}, "n": n, "v": n / 2}) for n in range(3)]
    rows = read(
        spark, [Sent(value) for value in (*values, b"\xa0", *noise)], decode="cbor", time="at.t",
        columns={"v": "double", "n": "long"},
    )  # fmt: skip
    assert [(row.v, row.n, row.time_ms, row.error) for row in rows[:4]] == [
        *((n / 2, n, ARRIVAL_MS - 7, None) for n in range(3)),
        (None, None, ARRIVAL_MS, "v is missing or not a finite number"),
    ]
    assert all(row.error for row in rows[4:])


def test_a_registry_file(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "devices.csv").write_text(
        '\ufeffkey,room,limit,on\na,cellar,6,\na,kitchen,7,true\nb,"the attic, left",,\n'
    )
    (tmp_path / "devices.json").write_text(
        '\ufeff{"key": "a"}\n{"key": "a", "room": "hall", "limit": 7.5}\n\n{"key": "c", "limit": "x"}\n'
    )
    columns = {"room": {"type": "string"}, "limit": {"type": "double"}, "on": {"type": "boolean"}}
    checked = decode.readings(
        records(frame(spark, [Sent(b"1", key=key) for key in (b"a", b"b", b"c")])),
        Source(topics=("sensors",), decode="none", dead_letters="dlq"),
    )
    for name, expected in {
        "devices.csv": [("kitchen", 7.0, True, None), ("the attic, left", None, None, None), (None, None, None, "key")],
        "devices.json": [("hall", 7.5, None, None), (None, None, None, "key"), (None, None, None, None)],
    }.items():
        known = registry.read(spark, Registry(file=str(tmp_path / name), columns=columns), {})
        rows = enrich.enriched(checked, Term.parse("key"), known).orderBy("offset").collect()
        assert [(row.room, row.limit, row.on, row.error and row.error[:3]) for row in rows] == expected
    (tmp_path / "wrong.json").write_text('{"room": "hall"}')
    with pytest.raises(ValueError, match="entry 1 has no key"):
        registry.read(spark, Registry(file=str(tmp_path / "wrong.json"), columns=columns), {})


def test_a_whole_number_may_have_a_fraction_of_zero_or_an_exponent(spark: SparkSession) -> None:
    numbers = {
        b"1": 1, b"1.0": 1, b"1e3": 1_000, b"-2.50e1": -25, b"9223372036854775807": 2**63 - 1,
        b"9007199254740992.0": 2**53, b"9007199254740994.0": None, b"1.5": None, b"1e400": None, b"true": None,
    }  # fmt: skip
    rows = read(spark, [Sent(b'{"n": %s}' % one) for one in numbers], columns={"n": "long"})
    assert [row.n for row in rows] == list(numbers.values())
    assert [row.error is None for row in rows] == [one is not None for one in numbers.values()]
    plain = read(spark, [Sent(one) for one in numbers], decode="number", columns={"n": "long"})
    assert [row.n for row in plain] == list(numbers.values())
