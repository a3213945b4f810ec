"""The size of Kafka records, and what happens to a record that its topic would refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.read.headers import ERROR, ORIGIN_LENGTH
from spark_sinks.spark.progress import DEAD_LETTERS, OBSERVED

KAFKA_HEADERS: Final = "array<struct<key: string, value: binary>>"
_TEXTS: Final = "array<string>"
FIELDS: Final = ("key", "value", "headers")
"""Of a record."""
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
    return _size(*(record[name] for name in FIELDS))


def _size(key: Column, value: Column, headers: Column) -> Column:
    return _length(key) + _length(value) + (_headers_size(headers) + FRAME)  # headers that are constant are added once


def size_of_all(records: Column) -> Column:
    """Return an upper bound of the bytes that Kafka needs for the largest of an array of records, all with headers."""
    texts = F.concat_ws("", *(records[name].cast(_TEXTS) for name in ("key", "value")))
    return F.lit(FRAME) + F.octet_length(texts) + _headers_size(F.flatten(records["headers"]))


def _length(data: Column) -> Column:
    return F.coalesce(F.octet_length(data), F.lit(0))


def _headers_size(headers: Column) -> Column:
    # Joined, and not added up one by one, because Java compiles a function of one header for each query.
    texts = F.concat_ws("", headers["key"], headers["value"].cast(_TEXTS))
    return F.coalesce(F.octet_length(texts) + F.size(headers) * PER_HEADER, F.lit(0))


def limit_of(topic: Column, limits: Mapping[str, int]) -> Column:
    """Return the most bytes of a record of a topic."""
    least = min(limits.values())
    chosen = F.lit(least)
    for name, limit in limits.items():
        if limit != least:
            chosen = F.when(topic == name, limit).otherwise(chosen)
    return chosen


def why_too_large(bytes_: Column, topic: Column, limit: Column) -> Column:
    """Return why a record of so many bytes does not fit into its topic."""
    return F.format_string("its result has %d bytes, and the topic %s takes %d", bytes_, topic, limit)


def seldom(of: Column, made: Callable[[Column], Column]) -> Column:
    """Return `made(of)`, for what few records need.

    Spark generates no code for `zip_with`, which Java would compile for each query. `of` is in the plan once, however
    often `made` uses it: each batch of a stream is planned anew.
    """
    return F.get(F.zip_with(F.array(of), F.array(F.lit(0)), lambda one, _: made(one)), F.lit(0))


def shortened(record: Column, added: Column, limit: int, *, may_fit: bool = True) -> Column:
    """Return a record (a struct of key, value, headers) with more headers, cut if it has more than `limit` bytes.

    A key, or headers, longer than a quarter of the limit are left out; of the value, the end. `ORIGIN_LENGTH` then has
    the length of the value. Without `may_fit` the record is known to have more bytes.
    """
    none = F.array().cast(KAFKA_HEADERS)

    def judged(of: Column) -> Column:
        whole = _record(of["key"], of["value"], F.concat(of["kept"], of["added"]))
        bytes_ = F.lit(FRAME) + _length(of["key"]) + _length(of["value"]) + _headers_size(whole["headers"])
        return F.when(bytes_ > limit, cut(of)).otherwise(whole)

    def cut(of: Column) -> Column:
        few = F.when(_headers_size(of["kept"]) <= limit // SHARE, of["kept"]).otherwise(none)
        length = F.array(header(ORIGIN_LENGTH, _length(of["value"]))).cast(KAFKA_HEADERS)
        key = F.when(F.octet_length(of["key"]) <= limit // SHARE, of["key"])
        return seldom(_record(key, of["value"], F.concat(few, of["added"], length)), to_room)

    def to_room(of: Column) -> Column:
        room = F.greatest(F.lit(limit - FRAME) - _length(of["key"]) - _headers_size(of["headers"]), F.lit(0))
        return _record(of["key"], F.substring(of["value"], F.lit(1), room), of["headers"])

    parts = F.struct(
        record["key"].alias("key"),
        record["value"].alias("value"),
        F.coalesce(record["headers"].cast(KAFKA_HEADERS), none).alias("kept"),
        added.alias("added"),
    )
    return seldom(parts, judged if may_fit else cut)


def _record(key: Column, value: Column, headers: Column) -> Column:
    return F.struct(key.alias("key"), value.alias("value"), headers.alias("headers"))


def fitting(records: DataFrame, limits: Mapping[str, int], letters_topic: str) -> DataFrame:
    """Replace each record that its topic would refuse by a dead letter, cut to fit, and count these.

    Args:
        records: topic, key, value, headers.
        limits: by topic, the most bytes of a record.
        letters_topic: the topic for dead letters.
    """
    key, value, headers = F.col("key"), F.col("value"), F.col("headers").cast(KAFKA_HEADERS)
    bytes_, limit, cut = _size(key, value, headers), limit_of(F.col("topic"), limits), F.col("_letter")
    why = F.array(header(ERROR, why_too_large(bytes_, F.col("topic"), limit))).cast(KAFKA_HEADERS)
    most = limits[letters_topic]
    letter = shortened(_record(key, value, headers), why, most, may_fit=most > min(limits.values()))
    large = F.when(bytes_ > limit, letter).alias("_letter")
    # Spark analyses each step for itself, so there are few.
    judged = records.select("topic", key, value, headers.alias("headers"), large)
    return judged.observe(OBSERVED, F.count(cut).alias(DEAD_LETTERS)).select(
        F.when(cut.isNull(), F.col("topic")).otherwise(letters_topic).alias("topic"),
        *(F.when(cut.isNull(), F.col(name)).otherwise(cut[name]).alias(name) for name in FIELDS),
    )
