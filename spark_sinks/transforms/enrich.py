"""Adds the columns of a device registry to readings."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.read.records import term
from spark_sinks.spec.values import Term
from spark_sinks.transforms.results import json_record


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


def enriched_records(by: Term, columns: Iterable[str]) -> Column:
    """Return an array with one record: a JSON object of the term `by`, `time` (epoch ms) and `columns`."""
    fields = [term(by).alias(by.name), F.unix_millis("time").alias("time"), *(F.col(name) for name in columns)]
    return F.array(json_record([term(by)], fields))
