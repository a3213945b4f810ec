"""Adds the columns of a device registry to readings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyspark.sql import Column as SqlColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.decode import WHITE_SPACE, json_columns
from spark_sinks.records import term, text_of
from spark_sinks.spec.parts import Column
from spark_sinks.spec.values import Term
from spark_sinks.transforms.results import json_record


def registry_of_topic(records: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    """Return the newest record of each key of a compacted topic, without the keys whose newest value is null.

    Returns:
        `_key` and the declared columns.
    """
    newest = (
        records.select(text_of(F.col("key")).alias("_key"), "value", "offset")
        .where(F.col("_key").isNotNull())
        .groupBy("_key")
        .agg(F.max_by("value", "offset").alias("value"))
        .where(F.col("value").isNotNull())
        .withColumn("_text", F.trim(text_of(F.col("value")), F.lit(WHITE_SPACE)))
    )
    return newest.select("_key", *json_columns(F.col("_text"), columns))


def enriched(checked: DataFrame, by: Term, registry: DataFrame) -> DataFrame:
    """Add the registry's columns; a good reading of a device that is not in the registry gets an error.

    Args:
        checked: the result of `decode.readings`.
        by: the term that is looked up in the registry's keys.
        registry: `_key` and columns. It must be small: every task holds all of it.
    """
    known = registry.withColumnRenamed("_key", "_known")
    joined = checked.join(F.broadcast(known), term(by) == F.col("_known"), "left")
    unknown = F.when(F.col("_known").isNull(), f"{by} is not in the registry")
    return joined.withColumn("error", F.coalesce("error", unknown)).drop("_known")


def enriched_records(by: Term, columns: Iterable[str]) -> SqlColumn:
    """Return an array with one record: a JSON object of the term `by`, `time` (epoch ms) and `columns`."""
    fields = [term(by).alias(by.name), F.unix_millis("time").alias("time"), *(F.col(name) for name in columns)]
    return F.array(json_record([term(by)], fields))
