"""Dead letters: the unchanged record with the reason and its origin in headers."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.headers import ERROR, ORIGIN_LENGTH, ORIGIN_OFFSET, ORIGIN_PARTITION, ORIGIN_TIMESTAMP, ORIGIN_TOPIC
from spark_sinks.records import RAW

KAFKA_HEADERS: Final = "array<struct<key: string, value: binary>>"
LATE: Final = "late: every window of the reading was closed"
LATE_BY_OTHERS: Final = "late: newer readings closed every window of the reading, which was in time at its arrival"

LIMIT: Final = 900_000
"""The longest value of a dead letter: a record at the topic's limit (1 MiB) has no room for the new headers."""


def dead_letters(records: DataFrame) -> DataFrame:
    """Convert source records with a column `error` to Kafka records for the dead-letter topic."""
    return records.select(letter(F.struct(*RAW), F.col("error")).alias("letter")).select("letter.*")


def letter(record: Column, error: Column) -> Column:
    """Convert a record (a struct of the source's columns) to a Kafka record with the reason and origin as headers."""
    added = F.array(
        header(ERROR, error),
        header(ORIGIN_TOPIC, record["topic"]),
        header(ORIGIN_PARTITION, record["partition"]),
        header(ORIGIN_OFFSET, record["offset"]),
        header(ORIGIN_TIMESTAMP, F.unix_millis(record["timestamp"])),
    ).cast(KAFKA_HEADERS)
    value = record["value"]
    cut = F.octet_length(value) > LIMIT
    length = F.when(cut, F.array(header(ORIGIN_LENGTH, F.octet_length(value))).cast(KAFKA_HEADERS))
    none = F.array().cast(KAFKA_HEADERS)
    kept = record["headers"].cast(KAFKA_HEADERS)
    return F.struct(
        record["key"].alias("key"),
        F.when(cut, F.substring(value, 1, LIMIT)).otherwise(value).alias("value"),
        F.concat(F.coalesce(kept, none), added, F.coalesce(length, none)).alias("headers"),
    )


def header(name: str, value: Column) -> Column:
    """Return a Kafka header with the value as text."""
    return F.struct(F.lit(name).alias("key"), value.cast("string").cast("binary").alias("value"))
