"""Alarms for values beyond thresholds, or far from their device's mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.read.decode import PLACE
from spark_sinks.read.records import term
from spark_sinks.spec.parts import Threshold
from spark_sinks.spec.values import Term
from spark_sinks.transforms.results import json_record
from spark_sinks.transforms.stateful import BEYOND, DEVIATION, MEAN, Deviations

_KEY: Final = "_key"
_AT: Final = "_at"


def alarms(by: Term, thresholds: Mapping[str, Threshold], *, packs: bool) -> Column:
    """Return an array with one record for each value of a good reading that is beyond a threshold.

    The record's key is the term `by`. Its JSON object has that term; `id` (topic, partition and offset of the reading,
    its index in a SenML pack, and the column), which is the same if the alarm is written twice; `time` (epoch ms);
    `column`, `value`; and `above` or `below`, the threshold that was crossed.
    """
    about = [term(by).alias(by.name), _origin(packs), F.unix_millis("time")]
    return F.filter(F.array(*_beyond_bounds(about, thresholds)), lambda alarm: alarm.isNotNull())


def with_means(
    good: DataFrame, by: Term, thresholds: Mapping[str, Threshold], forget_ms: int, *, packs: bool
) -> DataFrame:
    """Return the records of `alarms`, and records for values that are far from the mean of their device.

    The latter have the `mean` and `deviation` of the earlier values, and an `id` that ends in `/deviation`.

    Args:
        good: good readings.
        by: the term that has one mean for each value.
        thresholds: by column; those with `deviations` need means.
        forget_ms: how long a device must be silent before its means are reset.
        packs: whether one Kafka record may contain several readings.
    """
    limited = [name for name, threshold in thresholds.items() if threshold.deviations is not None]
    judged = good.select(
        term(by).cast("string").alias(_KEY),
        "topic",
        "partition",
        "offset",
        (F.col(PLACE) if packs else F.lit(0)).alias(PLACE),
        F.unix_millis("time").alias(_AT),
        *(F.col(name).cast("double").alias(name) for name in thresholds),
        (F.size(alarms(by, thresholds, packs=packs)) > 0).alias(BEYOND),
    )
    columns = tuple(name for name in judged.columns if name != BEYOND)
    kinds = dict(judged.dtypes)
    returned = ", ".join(
        f"`{name}` {kinds.get(name, 'double')}"
        for name in (*columns, *(prefix + name for name in limited for prefix in (MEAN, DEVIATION)))
    )
    judged_rows = judged.groupBy(_KEY).transformWithState(
        Deviations(thresholds, columns, forget_ms), returned, "Update", "ProcessingTime"
    )
    about = [F.col(_KEY).alias(by.name), _origin(packs), F.col(_AT)]
    made = [*_beyond_bounds(about, thresholds), *_far_from_means(about, limited)]
    return judged_rows.select(F.explode(F.array(*made)).alias("made")).where(F.col("made").isNotNull()).select("made.*")


def _origin(packs: bool) -> Column:
    places = ["partition", "offset", *([PLACE] if packs else [])]
    return F.concat_ws("/", "topic", *(F.col(column).cast("string") for column in places))


def _beyond_bounds(about: list[Column], thresholds: Mapping[str, Threshold]) -> Iterator[Column]:
    for column, threshold in thresholds.items():
        value = F.col(column).cast("double")
        for name, bound in (("above", threshold.above), ("below", threshold.below)):
            if bound is not None:
                limit = F.lit(float(bound))
                beyond = value > limit if name == "above" else value < limit
                yield F.when(beyond, _record(about, column, [limit.alias(name)]))


def _far_from_means(about: list[Column], limited: list[str]) -> Iterator[Column]:
    for column in limited:
        mean, deviation = F.col(MEAN + column), F.col(DEVIATION + column)
        record = _record(about, column, [mean.alias("mean"), deviation.alias("deviation")], "/deviation")
        yield F.when(mean.isNotNull(), record)


def _record(about: list[Column], column: str, fields: list[Column], suffix: str = "") -> Column:
    key, origin, at = about
    return json_record(
        [key],
        [
            key,
            F.concat_ws("/", origin, F.lit(column + suffix)).alias("id"),
            at.alias("time"),
            F.lit(column).alias("column"),
            F.col(column).cast("double").alias("value"),
            *fields,
        ],
    )
