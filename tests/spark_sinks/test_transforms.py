"""The transforms on static DataFrames. All cases of a kind go through Spark in one batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.spec.parts import Window
from spark_sinks.spec.values import Duration
from spark_sinks.transforms import dead_letters
from spark_sinks.transforms import maximum as transforms
from spark_sinks.transforms.results import good, json_records

SOURCE = (
    "key binary, value binary, headers array<struct<key: string, value: binary>>, "
    "topic string, partition int, offset bigint, timestamp timestamp"
)
ARRIVAL_MS = 1_700_000_000_123
HOUR_MS = 3_600_000


def instant(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC).replace(microsecond=ms % 1000 * 1000)


def records(spark: SparkSession, rows: list[tuple[bytes | None, bytes | None]], headers: Any = None) -> DataFrame:
    at = instant(ARRIVAL_MS)
    return spark.createDataFrame(
        [(key, value, headers, "sensors", 1, n, at) for n, (key, value) in enumerate(rows)], SOURCE
    )


class Good(NamedTuple):
    key: bytes | None
    value: bytes
    sensor: str
    temperature: float
    time: int = ARRIVAL_MS
    sent: int | None = None


GOOD = {
    "number": Good(b"kitchen/temp", b"21.5", "kitchen/temp", 21.5),
    "negative exponent": Good(b"k", b" -1.5e-3\n", "k", -0.0015),
    "zero": Good(b"k", b"0", "k", 0.0),
    "object": Good(b"k", b'{"temperature": 21}', "k", 21.0),
    "white space": Good(b"k", b' \n{"temperature": 21 }\n', "k", 21.0),
    "sensor by field": Good(None, b'{"temperature": 1, "sensor": "attic"}', "attic", 1.0),
    "sensor by field, empty key": Good(b"", b'{"temperature": 1, "sensor": "attic"}', "attic", 1.0),
    "key before field": Good(b"k", b'{"temperature": 1, "sensor": "attic"}', "k", 1.0),
    "field instead of a binary key": Good(b"\xff\xfe", b'{"temperature": 1, "sensor": "attic"}', "attic", 1.0),
    "sensor in any script": Good("Küche/温度".encode(), b"1", "Küche/温度", 1.0),
    "time in ms": Good(b"k", b'{"temperature": 1, "time": 1700000000000}', "k", 1.0, 1_700_000_000_000),
    "time in ms as text": Good(b"k", b'{"temperature": 1, "time": "1700000000000"}', "k", 1.0, 1_700_000_000_000),
    "time with a fraction": Good(b"k", b'{"temperature": 1, "time": 1700000000000.7}', "k", 1.0, 1_700_000_000_000),
    "time zero": Good(b"k", b'{"temperature": 1, "time": 0}', "k", 1.0, 0),
    "ISO, UTC": Good(b"k", b'{"temperature": 1, "time": "2023-11-14T22:13:20Z"}', "k", 1.0, 1_700_000_000_000),
    "ISO, zone": Good(b"k", b'{"temperature": 1, "time": "2023-11-14T23:13:20.1+01:00"}', "k", 1.0, 1_700_000_000_100),
    "ISO, no zone is UTC": Good(
        b"k", b'{"temperature": 1, "time": "2023-11-14 22:13:20"}', "k", 1.0, 1_700_000_000_000
    ),
    "time null": Good(b"k", b'{"temperature": 1, "time": null}', "k", 1.0),
    "just tolerably ahead": Good(b"k", b'{"temperature": 1, "time": %d}' % (ARRIVAL_MS + 60_000), "k", 1.0),
    "sent": Good(b"k", b'{"temperature": 1, "sent": 1700000000001}', "k", 1.0, ARRIVAL_MS, 1_700_000_000_001),
    "sent unusable": Good(b"k", b'{"temperature": 1, "sent": "yesterday"}', "k", 1.0),
    "other fields": Good(b"k", b'{"id": {"n": [1, 2]}, "temperature": 1, "unit": "C"}', "k", 1.0),
    "largest": Good(b"k", b"1.7976931348623157e308", "k", 1.7976931348623157e308),
}

BAD: dict[str, tuple[bytes | None, bytes | None, str]] = {
    "null": (b"k", None, transforms.NOT_READABLE),
    "empty": (b"k", b"", transforms.NOT_READABLE),
    "text": (b"k", b"hot", transforms.NOT_READABLE),
    "not UTF-8": (b"k", b"\xff\xfe\x00", transforms.NOT_READABLE),
    "object not UTF-8": (b"k", b'{"temperature": 1, "sensor": "\xff"}', transforms.NOT_READABLE),
    "cut off": (b"k", b'{"temperature": 21', transforms.NOT_READABLE),
    "trailing text": (b"k", b'{"temperature": 21} x', transforms.NOT_READABLE),
    "text after a bracket": (b"k", b'{"temperature": 21}] x', transforms.NOT_READABLE),
    "an object after a bracket": (b"k", b'{"temperature": 21}] {"temperature": 22}', transforms.NOT_READABLE),
    "two objects": (b"k", b'{"temperature": 1}{"temperature": 2}', transforms.NOT_READABLE),
    "two objects with a comma": (b"k", b'{"temperature": 1},{"temperature": 2}', transforms.NOT_READABLE),
    "an array": (b"k", b'[{"temperature": 1}]', transforms.NOT_READABLE),
    "a string": (b"k", b'"21.5"', transforms.NOT_READABLE),
    "NaN": (b"k", b"NaN", transforms.NOT_READABLE),
    "Java's own number": (b"k", b"1.5d", transforms.NOT_READABLE),
    "leading zero": (b"k", b"021", transforms.NOT_READABLE),
    "a null byte": (b"k", b'{"temperature": 1}\x00', transforms.NOT_READABLE),
    "no temperature": (b"k", b'{"humidity": 21}', transforms.NO_NUMBER),
    "empty object": (b"k", b"{}", transforms.NO_NUMBER),
    "temperature null": (b"k", b'{"temperature": null}', transforms.NO_NUMBER),
    "temperature true": (b"k", b'{"temperature": true}', transforms.NO_NUMBER),
    "temperature as text": (b"k", b'{"temperature": "21"}', transforms.NO_NUMBER),
    "temperature NaN as text": (b"k", b'{"temperature": "NaN"}', transforms.NO_NUMBER),
    "temperature infinite": (b"k", b'{"temperature": 1e400}', transforms.NO_NUMBER),
    "number infinite": (b"k", b"-1e400", transforms.NO_NUMBER),
    "no sensor": (None, b"21", transforms.NO_SENSOR),
    "no sensor in the object": (None, b'{"temperature": 21}', transforms.NO_SENSOR),
    "empty sensor": (b"", b'{"temperature": 21, "sensor": ""}', transforms.NO_SENSOR),
    "key not UTF-8": (b"\xff", b"21", transforms.NO_SENSOR),
    "time in words": (b"k", b'{"temperature": 1, "time": "noon"}', transforms.BAD_TIME),
    "time negative": (b"k", b'{"temperature": 1, "time": -1}', transforms.BAD_TIME),
    "time only a date": (b"k", b'{"temperature": 1, "time": "2023-11-14"}', transforms.BAD_TIME),
    "no such day": (b"k", b'{"temperature": 1, "time": "2023-02-30T00:00:00Z"}', transforms.BAD_TIME),
    "time in nanoseconds": (b"k", b'{"temperature": 1, "time": 1700000000000000000}', transforms.BAD_TIME),
    "time with an exponent": (b"k", b'{"temperature": 1, "time": 1.7e300}', transforms.BAD_TIME),
    "ahead": (b"k", b'{"temperature": 1, "time": %d}' % (ARRIVAL_MS + 60_001), transforms.AHEAD),
    "in microseconds": (b"k", b'{"temperature": 1, "time": 17000000000000}', transforms.AHEAD),
}  # fmt: skip


def window(length_ms: int, slide_ms: int) -> Window:
    return Window(length=Duration(f"{length_ms}ms"), slide=Duration(f"{slide_ms}ms"), watermark=Duration("10s"))


@pytest.fixture(scope="module")
def good_rows(spark: SparkSession) -> dict[str, Row]:
    checked = transforms.parsed(records(spark, [(case.key, case.value) for case in GOOD.values()]))
    return dict(zip(GOOD, checked.orderBy("offset").collect(), strict=True))


@pytest.fixture(scope="module")
def bad_rows(spark: SparkSession) -> dict[str, Row]:
    checked = transforms.parsed(records(spark, [(key, value) for key, value, _ in BAD.values()]))
    return dict(zip(BAD, checked.orderBy("offset").collect(), strict=True))


@pytest.mark.parametrize("name", GOOD)
def test_good_reading(good_rows: dict[str, Row], name: str) -> None:
    row, case = good_rows[name], GOOD[name]
    assert row.error is None
    assert (row.sensor, row.temperature, row.sent) == (case.sensor, case.temperature, case.sent)
    # collect() returns times in the session's time zone, so compare instants
    assert round(row.time.timestamp() * 1000) == case.time


@pytest.mark.parametrize("name", BAD)
def test_malformed_reading_has_a_reason(bad_rows: dict[str, Row], name: str) -> None:
    assert bad_rows[name].error == BAD[name][2]


def test_random_bytes_never_stop_the_stream(spark: SparkSession) -> None:
    rng = random.Random(11)
    pieces = [
        b"{",
        b"}",
        b'"',
        b"temperature",
        b":",
        b"1",
        b"e9",
        b"time",
        b"-",
        b"\x00",
        b"\xc3",
        b",",
        b"[",
        b" ",
        b"sent",
    ]
    values = [b"".join(rng.choices(pieces, k=rng.randint(0, 12))) for _ in range(1_000)]
    values += [rng.randbytes(rng.randint(0, 40)) for _ in range(1_000)]
    values += [
        b'{"temperature": 1, "time": "%s"}' % b"".join(rng.choices([b"2", b"9", b"-", b":", b"T", b"Z", b"."], k=20))
        for _ in range(500)
    ]
    values += [b'{"temperature": %s, "sent": %s}' % (b"9" * n, b"9" * n) for n in range(1, 60)]
    checked = transforms.parsed(records(spark, [(rng.randbytes(3), value) for value in values]))
    rows = checked.selectExpr("error", "temperature", "sensor", "time").collect()
    assert len(rows) == len(values)
    assert all(row.error or (row.temperature is not None and row.sensor and row.time) for row in rows)


@pytest.mark.parametrize(("window_ms", "slide_ms"), [(5_000, 1_000), (4_000, 4_000), (3_000, 2_000), (1_000, 250)])
def test_windows_follow_the_definition(
    spark: SparkSession, model: Callable[..., Any], window_ms: int, slide_ms: int
) -> None:
    rng = random.Random(window_ms)
    at = 1_700_000_000_000
    readings = [
        (
            f"case-{case}/{rng.randint(0, 2)}",
            rng.choice([-1e9, -2.5, 0.0, 7.25, 21.0, rng.random()]),
            at + rng.choice([0, 999, 1000, rng.randint(0, 12_000)]),
        )
        for case in range(40)
        for _ in range(rng.randint(1, 12))
    ]
    good = spark.createDataFrame(
        [(sensor, temperature, instant(time), time) for sensor, temperature, time in readings],
        "sensor string, temperature double, time timestamp, sent bigint",
    )
    rows = transforms.maxima(good, window(window_ms, slide_ms)).collect()
    assert {(row.sensor, row.start): (row.end, row.maximum, row["count"]) for row in rows} == model(
        readings, window_ms, slide_ms
    )
    newest: dict[tuple[str, int], int] = {}
    for row in rows:
        newest[row.sensor, row.start] = row.latest
    for sensor, _, time in readings:
        assert newest[sensor, time - time % slide_ms] >= time


def test_result_records(spark: SparkSession) -> None:
    results = spark.createDataFrame(
        [("kitchen/temp", 1000, 6000, 21.5, 3, 5999), ("attic", 0, 5000, -1.0, 1, None)],
        "sensor string, start bigint, end bigint, maximum double, count bigint, latest bigint",
    )
    header = [Row(key="content-type", value=bytearray(b"application/json"))]
    expected = spark.createDataFrame(
        [
            (
                bytearray(b"kitchen/temp"),
                bytearray(b'{"sensor":"kitchen/temp","start":1000,"end":6000,"maximum":21.5,"count":3,"latest":5999}'),
                header,
            ),
            (
                bytearray(b"attic"),
                bytearray(b'{"sensor":"attic","start":0,"end":5000,"maximum":-1.0,"count":1}'),
                header,
            ),
        ],
        "key binary, value binary, headers array<struct<key: string, value: binary>>",
    )
    assert_df_equality(json_records(results, ["sensor"]), expected, ignore_nullable=True, ignore_row_order=True)


def letters(source: DataFrame, watermark_ms: int = 0) -> DataFrame:
    checked = transforms.parsed(source)
    return dead_letters.dead_letters(transforms.rejected(checked, window(5_000, 1_000), F.lit(watermark_ms)), 500_000)


def test_dead_letter_keeps_the_record_with_reason_and_origin(spark: SparkSession) -> None:
    own = [Row(key="trace", value=bytearray(b"\x00\x01")), Row(key="null", value=None)]
    rows = letters(records(spark, [(b"k", b"hot"), (b"k", b"21"), (None, None)], own)).collect()
    assert [(row.key, row.value) for row in rows] == [(b"k", b"hot"), (None, None)]
    for row, offset in zip(rows, (b"0", b"2"), strict=True):
        assert [(header.key, header.value) for header in row.headers] == [
            ("trace", b"\x00\x01"),
            ("null", None),
            ("error", transforms.NOT_READABLE.encode()),
            ("origin.topic", b"sensors"),
            ("origin.partition", b"1"),
            ("origin.offset", offset),
            ("origin.timestamp", b"1700000000123"),
        ]


def test_every_malformed_record_becomes_a_dead_letter(spark: SparkSession) -> None:
    rows = letters(records(spark, [(key, value) for key, value, _ in BAD.values()])).collect()
    assert [row.headers[0].value.decode() for row in rows] == [reason for _, _, reason in BAD.values()]


def test_dead_letter_of_a_record_without_headers(spark: SparkSession) -> None:
    [row] = letters(records(spark, [(b"k", b"hot")])).collect()
    assert [header.key for header in row.headers] == [
        "error", "origin.topic", "origin.partition", "origin.offset", "origin.timestamp",
    ]  # fmt: skip


def test_dead_letter_is_truncated_to_fit(spark: SparkSession) -> None:
    [row] = letters(records(spark, [(b"k", b"x" * 1_000_000)])).collect()
    assert 0 < len(row.value) < 500_000
    assert len(row.value) + sum(len(one.key) + len(one.value) for one in row.headers) + len(row.key) <= 500_000
    assert (row.headers[-1].key, row.headers[-1].value) == ("origin.length", b"1000000")


@pytest.mark.parametrize(("window_ms", "slide_ms"), [(5_000, 1_000), (3_000, 2_000)])
def test_a_reading_is_late_if_all_its_windows_are_closed(
    spark: SparkSession, model: Callable[..., Any], window_ms: int, slide_ms: int
) -> None:
    watermark = ARRIVAL_MS - 20_000
    times = [watermark + step for step in range(-9_000, 3_000, 250)] + [
        watermark - window_ms - 1,
        watermark - window_ms,
    ]
    values = [(b"k", b'{"temperature": 1, "time": %d}' % time) for time in times]
    checked = transforms.parsed(records(spark, values))
    rows = transforms.rejected(checked, window(window_ms, slide_ms), F.lit(watermark)).collect()
    expected = {
        offset
        for offset, time in enumerate(times)
        if all(end <= watermark for end, _, _ in model([("k", 1.0, time)], window_ms, slide_ms).values())
    }
    assert 0 < len(expected) < len(times)
    assert {row.offset for row in rows} == expected
    assert {row.error for row in rows} == {dead_letters.LATE}


def test_transforms_run_without_python_on_the_executors(spark: SparkSession) -> None:
    checked = transforms.parsed(records(spark, [(b"k", b"21")]))
    for frame in (
        json_records(transforms.maxima(good(checked), window(5_000, 1_000)), ["sensor"]),
        letters(records(spark, [(b"k", b"21")])),
    ):
        plan = frame._jdf.queryExecution().executedPlan().toString()
        assert "Python" not in plan
        assert "BatchEval" not in plan


def test_different_groups_have_different_keys(spark: SparkSession) -> None:
    groups = [("a/b", "c"), ("a", "b/c"), ("a", "b%2Fc"), ("a%2Fb", "c"), ("a/b%2Fc", ""), ("a", "b")]
    made = json_records(spark.createDataFrame(groups, "one string, other string"), ["one", "other"]).collect()
    keys = [row.key.decode() for row in made]
    assert len(set(keys)) == len(groups)
    assert (keys[0], keys[1], keys[-1]) == ("a/b/c", "a/b%2Fc", "a/b")
