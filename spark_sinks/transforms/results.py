"""Results as Kafka records: structs of key, value and headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from mapping.record import CONTENT_TYPE
from spark_sinks.progress import DEAD_LETTERS, OBSERVED
from spark_sinks.transforms.dead_letters import KAFKA_HEADERS, header, letter

JSON: Final = "application/json"
EMIT: Final = "emit"
"""Header that marks the last result of a window."""


def json_record(key: Iterable[Column], fields: Sequence[Column], *, final: bool = False) -> Column:
    """Return a record: JSON of `fields` (without nulls), with the `key` columns joined by `/`; `final` marks it."""
    own = [header(CONTENT_TYPE, F.lit(JSON)), *([header(EMIT, F.lit("final"))] if final else [])]
    return F.struct(
        F.concat_ws("/", *(part.cast("string") for part in key)).cast("binary").alias("key"),
        F.to_json(F.struct(*fields)).cast("binary").alias("value"),
        F.array(*own).cast(KAFKA_HEADERS).alias("headers"),
    )


def json_records(results: DataFrame, by: Iterable[str], *, final: bool = False) -> DataFrame:
    """Convert each row to a JSON record, with the `by` columns as key."""
    made = json_record([F.col(name) for name in by], [F.col(name) for name in results.columns], final=final)
    return results.select(made.alias("made")).select("made.*")


def headers(*pairs: tuple[str, Column]) -> Column:
    """Return Kafka headers with these names and values (as text), without those whose value is null."""
    made = F.array(*(header(name, value) for name, value in pairs))
    return F.filter(made, lambda one: one["value"].isNotNull()).cast(KAFKA_HEADERS)


def good(checked: DataFrame) -> DataFrame:
    """Return the good readings from `decode.readings`."""
    return checked.where(F.col("error").isNull())


def routed(checked: DataFrame, made: Column, topic: str, letters_topic: str) -> DataFrame:
    """Route the records made from good readings to `topic`, and bad ones as dead letters to `letters_topic`.

    Args:
        checked: the result of `decode.readings`.
        made: an array of records (key, value, headers) for a good reading, possibly empty.
        topic: the topic for these records.
        letters_topic: the topic for dead letters.
    """

    def at(place: str, records: Column) -> Column:
        return F.transform(
            records,
            lambda one: F.struct(
                F.lit(place).alias("topic"), one["key"].alias("key"), one["value"].alias("value"),
                one["headers"].alias("headers"),
            ),
        )  # fmt: skip

    error = F.col("error")
    counted = checked.observe(OBSERVED, F.count_if(error.isNotNull()).alias(DEAD_LETTERS))
    letters = F.array(letter(F.col("record"), error))
    placed = F.when(error.isNull(), at(topic, made)).otherwise(at(letters_topic, letters))
    return counted.select(F.explode(placed).alias("placed")).select("placed.*")
