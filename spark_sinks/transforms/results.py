"""Results as Kafka records: structs of key, value and headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from mapping.record import CONTENT_TYPE
from spark_sinks.read.decode import LARGEST
from spark_sinks.spark.progress import DEAD_LETTERS, OBSERVED
from spark_sinks.transforms.dead_letters import letter
from spark_sinks.transforms.record_size import KAFKA_HEADERS, header, seldom, size, size_of_all, why_too_large

JSON: Final = "application/json"
EMIT: Final = "emit"
"""Header that marks the last result of a window."""


def json_record(key: Iterable[Column], fields: Sequence[Column], *, final: bool = False) -> Column:
    """Return a record: JSON of `fields` (without nulls), with the `key` columns joined (`joined`); `final` marks it."""
    own = [header(CONTENT_TYPE, F.lit(JSON)), *([header(EMIT, F.lit("final"))] if final else [])]
    return F.struct(
        joined(key).alias("key"),
        F.to_json(F.struct(*fields)).cast("binary").alias("value"),
        F.array(*own).cast(KAFKA_HEADERS).alias("headers"),
    )


def joined(terms: Iterable[Column]) -> Column:
    """Return the key of a result: its terms joined by `/`, different for different terms.

    After the first one, a `/` in a term is written as `%2F`, and `%` as `%25`. The first one may be an MQTT topic.
    """
    first, *others = (term.cast("string") for term in terms)
    escaped = (F.replace(F.replace(term, F.lit("%"), F.lit("%25")), F.lit("/"), F.lit("%2F")) for term in others)
    return F.concat_ws("/", first, *escaped).cast("binary")


def json_records(results: DataFrame, by: Iterable[str], *, final: bool = False) -> DataFrame:
    """Convert each row to a JSON record, with the `by` columns as key. A number that is not finite is left out."""
    fields = [finite(name) if kind == "double" else F.col(name) for name, kind in results.dtypes]
    made = json_record([F.col(name) for name in by], fields, final=final)
    return results.select(*(made[name].alias(name) for name in ("key", "value", "headers")))


def finite(name: str) -> Column:
    """Return a column of doubles under its name, null where it is not finite: JSON has no such numbers."""
    return F.when(F.abs(name) <= LARGEST, F.col(name)).alias(name)


def headers(*pairs: tuple[str, Column]) -> Column:
    """Return Kafka headers with these names and values (as text), without those whose value is null."""
    made = F.array(*(header(name, value) for name, value in pairs))
    return F.filter(made, lambda one: one["value"].isNotNull()).cast(KAFKA_HEADERS)


def good(checked: DataFrame) -> DataFrame:
    """Return the good readings from `decode.readings`."""
    return checked.where(F.col("error").isNull())


def routed(checked: DataFrame, made: Column, topic: str, letters_topic: str, limits: Mapping[str, int]) -> DataFrame:
    """Route the records made from good readings to `topic`, and bad ones as dead letters to `letters_topic`.

    A reading with a result that is too large for `topic` becomes a dead letter too.

    Args:
        checked: the result of `decode.readings`.
        made: an array of records (key, value, headers) for a good reading, possibly empty.
        topic: the topic for these records.
        letters_topic: the topic for dead letters.
        limits: by topic, the most bytes of a record.
    """
    made_once = checked.withColumn("_made", F.when(F.col("error").isNull(), made))
    limit = F.lit(limits[topic])

    def largest_over(records: Column) -> Column:
        return seldom(F.array_max(F.transform(records, size)), lambda most: F.when(most > limit, why(most)))

    def why(bytes_: Column) -> Column:
        return why_too_large(bytes_, F.lit(topic), limit)

    refused = F.when(size_of_all(F.col("_made")) > limit, seldom(F.col("_made"), largest_over))
    judged = made_once.withColumn("error", F.coalesce("error", refused))
    error = F.col("error")
    counted = judged.observe(OBSERVED, F.count_if(error.isNotNull()).alias(DEAD_LETTERS))
    bad = letter(F.col("record"), error, limits[letters_topic])
    return counted.select(
        F.when(error.isNull(), topic).otherwise(letters_topic).alias("topic"),
        F.explode(F.when(error.isNull(), F.col("_made")).otherwise(F.array(bad))).alias("placed"),
    ).select("topic", "placed.*")
