"""Alarms for values beyond their bounds."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.records import term
from spark_sinks.spec.parts import Threshold
from spark_sinks.spec.values import Term
from spark_sinks.transforms.results import json_record


def alarms(by: Term, thresholds: Mapping[str, Threshold]) -> Column:
    """Of a good reading: an array with a record for each value that is beyond a bound.

    The record's key is the term of `by`. Its JSON object has that term; `id` (topic, partition and offset of the
    reading, and the column: the same however often it is written); `time` (epoch ms); `column`, `value`; and `above`
    or `below`, the bound that was passed.
    """
    origin = F.concat_ws("/", "topic", F.col("partition").cast("string"), F.col("offset").cast("string"))
    found = []
    for column, threshold in thresholds.items():
        value = F.col(column).cast("double")
        for name, bound in (("above", threshold.above), ("below", threshold.below)):
            if bound is None:
                continue
            limit = F.lit(float(bound))
            record = json_record(
                [term(by)],
                [
                    term(by).alias(by.name),
                    F.concat_ws("/", origin, F.lit(column)).alias("id"),
                    F.unix_millis("time").alias("time"),
                    F.lit(column).alias("column"),
                    value.alias("value"),
                    limit.alias(name),
                ],
            )
            found.append(F.when(value > limit if name == "above" else value < limit, record))
    return F.filter(F.array(*found), lambda one: one.isNotNull())
