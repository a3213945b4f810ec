"""The bound of a record's size, for arbitrary records. All go through Spark in one batch."""

from __future__ import annotations

import random

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.read.headers import ERROR, ORIGIN_LENGTH
from spark_sinks.transforms.record_size import KAFKA_HEADERS, fitting, size, size_of_all

RECORD = f"struct<key: binary, value: binary, headers: {KAFKA_HEADERS}>"
Record = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None]


def arbitrary(chance: random.Random) -> Record:
    def data(most: int) -> bytes | None:
        return chance.randbytes(chance.randint(0, most)) if chance.random() < 0.8 else None

    names = ("", "k", "mqtt-topic", "Küche/温度", "x" * 300)
    headers = [(chance.choice(names), data(200)) for _ in range(chance.choice((0, 0, 1, 3, 40)))]
    return data(500), data(5_000), None if chance.random() < 0.1 else headers


def stored(record: Record) -> int:
    key, value, headers = record
    batch = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1 << 20)
    batch.append(0, 1_700_000_000_000, key, value, headers or [])
    return len(batch.build())


def test_no_record_is_larger_in_kafka_than_its_bound_and_the_bound_is_near(spark: SparkSession) -> None:
    chance = random.Random(28)
    groups = [[arbitrary(chance) for _ in range(chance.randint(1, 3))] for _ in range(300)]
    rows = (
        spark.createDataFrame([(group,) for group in groups], f"made array<{RECORD}>")
        .select(size_of_all(F.col("made")).alias("all"), F.transform("made", size).alias("each"))
        .collect()
    )
    for group, row in zip(groups, rows, strict=True):
        found = [stored(record) for record in group]
        assert all(
            real <= bound <= real + 40 + 8 * len(record[2] or ())
            for real, bound, record in zip(found, row["each"], group, strict=True)
        )
        assert row["all"] >= max(row["each"]) or any(headers is None for _, _, headers in group)


def test_no_records_fit(spark: SparkSession) -> None:
    [row] = (
        spark.createDataFrame([(None,), ([],)], f"made array<{RECORD}>")
        .agg(F.max(size_of_all(F.col("made"))))
        .collect()
    )
    assert row[0] <= 100


@pytest.mark.parametrize("most", [1_500, 2_000, 20_000], ids=["smaller", "equal", "larger"])
def test_a_record_that_its_topic_refuses_is_a_letter_that_its_topic_takes(spark: SparkSession, most: int) -> None:
    chance = random.Random(most)
    limits = {"small": 2_000, "large": 4_000, "letters": most}
    # The key leads from a letter back to its record.
    given = [
        (chance.choice(("small", "large")), b"%d" % number, value, headers)
        for number, (_, value, headers) in enumerate(arbitrary(chance) for _ in range(300))
    ]
    rows = spark.createDataFrame(given, f"topic string, key binary, value binary, headers {KAFKA_HEADERS}")
    whole = 0
    for row in fitting(rows, limits, "letters").collect():
        topic, key, value, own = given[int(row.key)]
        found = row.headers and [(header.key, header.value) for header in row.headers]
        assert stored((row.key, row.value, found)) <= limits[row.topic]
        if row.topic == topic:
            assert (row.key, row.value, found) == (key, value, own)
            continue
        assert row.topic == "letters"
        assert stored((key, value, own)) > limits[topic] - 40 - 8 * len(own or [])
        names = dict(found)
        assert ERROR in names
        if ORIGIN_LENGTH in names:
            assert names[ORIGIN_LENGTH] == b"%d" % len(value or b"")
            assert (value or b"").startswith(row.value or b"")
        else:
            whole += 1
            assert (row.value, found[:-1]) == (value, own or [])
    assert (whole > 0) == (most > 2_000)
