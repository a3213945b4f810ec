"""Kafka records as typed columns, the same for every protocol that a record came by.

Uses native Spark functions only, and none that can raise: headers and keys are untrusted input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (PySpark's usual name for it)

from mapping.record import CONTENT_TYPE, CREATION_TIME, MQTT_TOPIC
from spark_sinks.spec.values import Term

RAW: Final = ("key", "value", "headers", "topic", "partition", "offset", "timestamp")
"""The Kafka source's columns with headers; each record keeps them as `record`, for dead letters and archives."""
_MILLISECONDS: Final = r"^[0-9]{1,14}$"


def records(source: DataFrame) -> DataFrame:
    """Convert each record of the Kafka source to typed columns.

    Returns:
        `record` (the source's own columns), `key` (text; null if it is not UTF-8), `value` (binary), `topic`,
        `partition`, `offset`, `timestamp` (Kafka's), `levels` (of the MQTT topic, an array), `content_type`, `headers`
        (a map of texts; of several headers with one name, the first), `sent_at` (header `creation-time`, or null).
    """
    key = text_of(F.col("key"))
    mqtt_topic = F.coalesce(non_empty(header("headers", MQTT_TOPIC)), F.concat_ws("/", "topic", non_empty(key)))
    created = header("headers", CREATION_TIME)
    names = F.array_distinct(F.transform("headers", lambda one: one["key"]))
    return source.select(
        F.struct(*RAW).alias("record"),
        key.alias("key"),
        "value", "topic", "partition", "offset", "timestamp",
        F.split(mqtt_topic, "/").alias("levels"),
        header("headers", CONTENT_TYPE).alias("content_type"),
        F.map_from_arrays(names, F.transform(names, lambda name: header("headers", name))).alias("headers"),
        F.when(created.rlike(_MILLISECONDS), F.timestamp_millis(created.try_cast("bigint"))).alias("sent_at"),
    )  # fmt: skip


def header(headers: str, name: str | Column) -> Column:
    """Return the first header with this name as text; null if there is none or its value is not UTF-8."""
    all_ = F.col(headers)
    return text_of(F.get(all_["value"], F.array_position(all_["key"], name).cast("int") - 1))


def term(of: Term) -> Column:
    """Return the column that a term refers to; null for a record that has no such level or header."""
    kind, what = of.parts
    if kind == "level":
        return F.get("levels", F.lit(int(what) - 1))
    return header("record.headers", what) if kind == "header" else F.col(what)


def of_partition(values: Mapping[Any, Any], kind: str) -> Column:
    """Return a record's value, of the SQL type `kind`, from those by topic and partition; null if there is none."""
    text = json.dumps({f"{topic} {partition}": value for (topic, partition), value in values.items()})
    table: Any = F.from_json(F.lit(text), f"map<string, {kind}>")
    return F.element_at(table, F.concat_ws(" ", "topic", "partition"))


def text_of(raw: Column) -> Column:
    """Return bytes as text; null if they are not UTF-8."""
    text = raw.cast("string")
    return F.when(F.is_valid_utf8(text), text)


def non_empty(text: Column) -> Column:
    """Return the text; null if it is empty."""
    return F.when(text != "", text)
