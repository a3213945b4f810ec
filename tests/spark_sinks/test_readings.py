"""Records as typed columns, and what the decoders make of them: every case goes through Spark in one batch."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks import decode
from spark_sinks.records import records, term
from spark_sinks.spec.parts import Source
from spark_sinks.spec.values import Term

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
    return spark.createDataFrame(rows, SOURCE)


def read(spark: SparkSession, sent: list[Sent], *by: str, **source: Any) -> list[Row]:
    declared = Source(topics=("sensors",), dead_letters="dlq", **source)
    needed = [(text, term(Term.parse(text))) for text in by]
    checked = decode.readings(records(frame(spark, sent)), declared, needed)
    return checked.orderBy("offset").withColumn("time_ms", F.unix_millis("time")).collect()


def test_a_record_has_typed_columns_whichever_protocol_it_came_by(spark: SparkSession) -> None:
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


def test_the_time_is_the_first_that_is_there_and_not_ahead(spark: SparkSession) -> None:
    ahead, header, own = ARRIVAL_MS + 60_001, ARRIVAL_MS - 5_000, ARRIVAL_MS - 2_000

    def reading(time: object, *created: int) -> Sent:
        headers: Headers = [("creation-time", b"%d" % at) for at in created]
        return Sent(b'{"v": 1, "at": {"t": %s}}' % str(time).encode(), headers=headers)

    sent = [
        reading(own, header), reading(own), reading("null"), reading(own, ahead), reading(ahead), reading(ahead, ahead),
        reading(ARRIVAL_MS + 60_000), reading('"2023-11-14T22:13:20Z"'),
        reading('"noon"'), reading(-1), reading('"noon"', header), Sent(b'{"v": 1}', headers=[("creation-time", b"x")]),
    ]  # fmt: skip
    rows = read(spark, sent, columns={"v": "long"}, time="at.t")
    assert [row.time_ms for row in rows] == [
        header, own, ARRIVAL_MS, own, ARRIVAL_MS, ARRIVAL_MS, ARRIVAL_MS + 60_000, 1_700_000_000_000,
        ARRIVAL_MS, ARRIVAL_MS, header, ARRIVAL_MS,
    ]  # fmt: skip
    assert [row.error for row in rows] == [None] * 8 + [decode.BAD_TIME] * 3 + [None]


def test_json_by_its_columns(spark: SparkSession) -> None:
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
        b'{"n": 2}': "load is missing or no finite number", b'{"load": "1", "n": 2}': "load is missing",
        b'{"load": 1e400, "n": 2}': "load is missing", b'{"load": NaN, "n": 2}': "",
        b'{"load": 1, "n": 2.5}': "n is missing or no whole number", b'{"load": 1, "n": 99999999999999999999}': "n is",
    }  # fmt: skip
    rows = read(spark, [Sent(value) for value in (*good, *bad)], columns=columns)
    assert [(row.load, row.n, row.on, row.lat, row.who) for row in rows[: len(good)]] == list(good.values())
    assert [row.error for row in rows[: len(good)]] == [None] * len(good)
    told = [(row.value, row.error) for row in rows[len(good) :]]
    assert [
        one for one, said in zip(told, bad.values(), strict=True) if not (one[1] or "").startswith(said) or not one[1]
    ] == []


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


def test_what_a_job_groups_by_must_be_there(spark: SparkSession) -> None:
    sent = [Sent(b"1"), Sent(b"1", key=b"kitchen"), Sent(b"1", key=None), Sent(b"1", headers=[("unit", b"C")])]
    rows = read(spark, sent, "level[3]", decode="none")
    assert [row.error for row in rows] == [None, *["level[3] is missing or no text"] * 2, None]
    rows = read(spark, sent, "header[unit]", "key", decode="none")
    assert [row.error for row in rows] == ["header[unit] is missing or no text"] * 3 + [None]


@pytest.mark.parametrize(
    "source",
    [
        {"columns": {"v": "double", "b": {"type": "boolean", "field": "x.b", "optional": True}}, "time": "t"},
        {"decode": "number", "columns": {"v": "long"}},
        {"decode": "csv", "fields": ("v", "t"), "columns": {"v": "double"}, "time": "t"},
    ],
)
def test_random_bytes_never_stop_the_stream(spark: SparkSession, source: dict[str, Any]) -> None:
    chance = random.Random(11)
    pieces = [b"{", b"}", b'"', b"v", b":", b"1", b"e9", b"t", b"-", b"\x00", b"\xc3", b",", b"[", b" ", b"\n", b"x"]
    values = [b"".join(chance.choices(pieces, k=chance.randint(0, 12))) for _ in range(500)]
    values += [chance.randbytes(chance.randint(0, 40)) for _ in range(500)]
    values += [b'{"v": %s, "t": %s}' % (b"9" * n, b"9" * n) for n in range(1, 60)]
    values += [b"%s,%s" % (b"9" * n, b"9" * n) for n in range(1, 60)]
    names = [b"mqtt.topic", b"creation-time", b"content-type", b"x"]
    sent = [
        Sent(value, chance.randbytes(2), [(chance.choice(names).decode(), chance.randbytes(3)) for _ in range(3)])
        for value in values
    ]
    rows = read(spark, sent, "key", "level[1]", **source)
    assert len(rows) == len(values)
    assert all(row.error or (row.v is not None and row.time and row.key is not None) for row in rows)
