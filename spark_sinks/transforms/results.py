"""Results as Kafka records: a struct of key, value and headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from mapping.record import CONTENT_TYPE
from spark_sinks.progress import DEAD_LETTERS, OBSERVED
from spark_sinks.transforms.dead_letters import KAFKA_HEADERS, dead_letters, header, letter

JSON: Final = "application/json"


EMIT: Final = "emit"
"""Header of a result that is the last of its window."""


def json_record(key: Iterable[Column], fields: Sequence[Column], *, final: bool = False) -> Column:
    """A JSON object of `fields` (nulls left out), keyed by the texts of `key`, joined by `/`; `final`: it says so."""
    told = [(CONTENT_TYPE, F.lit(JSON)), *([(EMIT, F.lit("final"))] if final else [])]
    return F.struct(
        F.concat_ws("/", *(part.cast("string") for part in key)).cast("binary").alias("key"),
        F.to_json(F.struct(*fields)).cast("binary").alias("value"),
        headers(*told).alias("headers"),
    )


def json_records(results: DataFrame, by: Iterable[str], *, final: bool = False) -> DataFrame:
    """Each row as such a record, keyed by the columns of `by`."""
    made = json_record([F.col(name) for name in by], [F.col(name) for name in results.columns], final=final)
    return results.select(made.alias("made")).select("made.*")


def headers(*pairs: tuple[str, Column]) -> Column:
    """Kafka's headers of these names and values (as text); those without a value are left out."""
    made = F.array(*(header(name, value) for name, value in pairs))
    return F.filter(made, lambda one: one["value"].isNotNull()).cast(KAFKA_HEADERS)


def good(checked: DataFrame) -> DataFrame:
    """The good readings of `decode.readings`."""
    return checked.where(F.col("error").isNull())


def rejected(checked: DataFrame) -> DataFrame:
    """The bad ones as dead letters."""
    return dead_letters(checked.where(F.col("error").isNotNull()).select("record.*", "error"))


def routed(checked: DataFrame, made: Column, topic: str, letters_topic: str) -> DataFrame:
    """What a good reading makes goes to `topic`, a bad one as a dead letter to `letters_topic`; in one query.

    Args:
        checked: of `decode.readings`.
        made: of a good reading, an array of records (key, value, headers), possibly empty.
        topic: of what is made.
        letters_topic: of dead letters.
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
