"""What a record of Kafka is in a job: typed columns, whichever protocol it came by.

Native functions only, and nothing that can raise: a header or a key is whatever its sender wrote.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name everybody knows it by)

from mapping.record import CONTENT_TYPE, CREATION_TIME, MQTT_TOPIC
from spark_sinks.spec.values import Term

RAW: Final = ("key", "value", "headers", "topic", "partition", "offset", "timestamp")
"""The Kafka source's columns, headers included; a record keeps them as `record`, for dead letters and archives."""
_MILLISECONDS: Final = r"^[0-9]{1,14}$"


def records(source: DataFrame) -> DataFrame:
    """Each record of the Kafka source as typed columns.

    Returns:
        `record` (the source's own columns), `key` (text; null where it is no UTF-8), `value` (binary), `topic`,
        `partition`, `offset`, `timestamp` (Kafka's), `levels` (of its MQTT topic, an array), `content_type`, `headers`
        (a map of texts, the first of a name counts), `sent_at` (header `creation-time`, or null).
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
    """The first header of a name in a column of Kafka's headers, as text; null when there is none or it is no UTF-8."""
    wanted = F.lit(name) if isinstance(name, str) else name
    return text_of(F.get(F.filter(headers, lambda one: one["key"] == wanted), F.lit(0))["value"])


def term(of: Term) -> Column:
    """What results are grouped by; null where a record has nothing of the kind."""
    kind, what = of.parts
    if kind == "level":
        return F.get("levels", F.lit(int(what) - 1))
    return header("record.headers", what) if kind == "header" else F.col(what)


def text_of(raw: Column) -> Column:
    """Bytes as text; null when they are no UTF-8."""
    text = raw.cast("string")
    return F.when(F.is_valid_utf8(text), text)


def non_empty(text: Column) -> Column:
    """The text, null where it is empty."""
    return F.when(text != "", text)
