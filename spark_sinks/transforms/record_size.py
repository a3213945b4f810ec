"""The size of Kafka records, and what happens to a record that its topic would refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.read.headers import ERROR, ORIGIN_LENGTH
from spark_sinks.spark.progress import DEAD_LETTERS, OBSERVED

KAFKA_HEADERS: Final = "array<struct<key: string, value: binary>>"
FRAME: Final = 100
"""The most bytes of a batch of one record besides its key, value and headers."""
PER_HEADER: Final = 8
"""The most bytes of a header besides its name and value."""
SHARE: Final = 4
"""A record that is too large keeps its key, and its headers, only below the limit divided by this."""


def header(name: str, value: Column) -> Column:
    """Return a Kafka header with the value as text."""
    return F.struct(F.lit(name).alias("key"), value.cast("string").cast("binary").alias("value"))


def size(record: Column) -> Column:
    """Return an upper bound of the bytes that Kafka needs for a record (a struct of key, value, headers)."""
    return F.lit(FRAME) + _length(record["key"]) + _length(record["value"]) + _headers_size(record["headers"])


def _length(data: Column) -> Column:
    return F.coalesce(F.octet_length(data), F.lit(0))


def _headers_size(headers: Column) -> Column:
    return F.coalesce(
        F.aggregate(
            headers,
            F.lit(0),
            lambda total, header: total + PER_HEADER + _length(header["key"]) + _length(header["value"]),
        ),
        F.lit(0),
    )


def limit_of(topic: Column, limits: Mapping[str, int]) -> Column:
    """Return the most bytes of a record of a topic."""
    found = F.lit(min(limits.values()))
    for name, limit in limits.items():
        found = F.when(topic == name, limit).otherwise(found)
    return found


def too_large(record: Column, topic: Column, limits: Mapping[str, int]) -> Column:
    """Return why a record does not fit into its topic; null if it fits."""
    bytes_, limit = size(record), limit_of(topic, limits)
    return F.when(
        bytes_ > limit, F.format_string("its result has %d bytes, and the topic %s takes %d", bytes_, topic, limit)
    )


def shortened(record: Column, added: Column, limit: int) -> Column:
    """Return a record (a struct of key, value, headers) with more headers, cut if it has more than `limit` bytes.

    A key, or headers, longer than a quarter of the limit are left out; of the value, the end. `ORIGIN_LENGTH` then has
    the length of the value.
    """
    kept = F.coalesce(record["headers"].cast(KAFKA_HEADERS), F.array().cast(KAFKA_HEADERS))
    whole = F.struct(record["key"].alias("key"), record["value"].alias("value"), F.concat(kept, added).alias("headers"))
    key = F.when(F.octet_length(record["key"]) <= limit // SHARE, record["key"])
    few = F.when(_headers_size(kept) <= limit // SHARE, kept).otherwise(F.array().cast(KAFKA_HEADERS))
    length = F.array(header(ORIGIN_LENGTH, _length(record["value"]))).cast(KAFKA_HEADERS)
    headers = F.concat(few, added, length)
    room = F.greatest(F.lit(limit - FRAME) - _length(key) - _headers_size(headers), F.lit(0))
    cut = F.struct(
        key.alias("key"), F.substring(record["value"], F.lit(1), room).alias("value"), headers.alias("headers")
    )
    return F.when(size(whole) > limit, cut).otherwise(whole)


def fitting(records: DataFrame, limits: Mapping[str, int], letters_topic: str) -> DataFrame:
    """Replace each record that its topic would refuse by a dead letter, cut to fit, and count these.

    Args:
        records: topic, key, value, headers.
        limits: by topic, the most bytes of a record.
        letters_topic: the topic for dead letters.
    """
    record = F.struct("key", "value", F.col("headers").cast(KAFKA_HEADERS).alias("headers"))
    checked = records.select("topic", record.alias("_record"), too_large(record, F.col("topic"), limits).alias("_why"))
    counted = checked.observe(OBSERVED, F.count_if(F.col("_why").isNotNull()).alias(DEAD_LETTERS))
    reason = F.array(header(ERROR, F.col("_why"))).cast(KAFKA_HEADERS)
    letter = shortened(F.col("_record"), reason, limits[letters_topic])
    fits = F.col("_why").isNull()
    return counted.select(
        F.when(fits, F.col("topic")).otherwise(letters_topic).alias("topic"),
        F.when(fits, F.col("_record")).otherwise(letter).alias("_record"),
    ).select("topic", "_record.*")
