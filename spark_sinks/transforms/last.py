"""The last value of each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from mapping.record import CONTENT_TYPE
from spark_sinks.read.headers import ORIGIN_OFFSET, ORIGIN_PARTITION, ORIGIN_TOPIC
from spark_sinks.read.records import term
from spark_sinks.spec.values import Term
from spark_sinks.transforms.results import headers, joined

ORIGIN_TIME: Final = "origin.time"
"""Event time (epoch ms) of the reading; together with its origin it orders two values of a device."""
RETAINED: Final = "__trivium_retained"
"""The gateway's topic of MQTT retained messages: key = MQTT topic, value = payload; a null value clears it."""


def newest(readings: DataFrame, by: Sequence[Term]) -> DataFrame:
    """Return the newest reading of each group by event time; of two with the same time, the one that arrived later.

    Returns:
        Kafka records: key (the terms, `joined`), the reading's own value (null: a tombstone) and content type,
        headers of its origin.
    """
    names = [of.name for of in by]
    order = F.struct("time", "timestamp", "topic", "partition", "offset")
    kept = F.struct("value", "content_type", "time", "topic", "partition", "offset")
    chosen = readings.select(*(term(of).alias(of.name) for of in by), kept.alias("_kept"), order.alias("_order"))
    return (
        chosen.groupBy(*names)
        .agg(F.max_by("_kept", "_order").alias("last"))
        .select(
            joined(F.col(name) for name in names).alias("key"),
            F.col("last.value").alias("value"),
            headers(
                (CONTENT_TYPE, F.col("last.content_type")),
                (ORIGIN_TIME, F.unix_millis("last.time")),
                (ORIGIN_TOPIC, F.col("last.topic")),
                (ORIGIN_PARTITION, F.col("last.partition")),
                (ORIGIN_OFFSET, F.col("last.offset")),
            ).alias("headers"),
        )
    )


def as_retained(records: DataFrame, topic: str) -> DataFrame:
    """Return each record twice, with its target topic: for `topic`, and as `topic/key` for the retained messages."""
    mqtt_topic = F.concat(F.lit(f"{topic}/").cast("binary"), F.col("key"))
    twice = F.array(
        F.struct(F.lit(topic).alias("topic"), F.col("key").alias("key")),
        F.struct(F.lit(RETAINED).alias("topic"), mqtt_topic.alias("key")),
    )
    return records.select(F.explode(twice).alias("place"), "value", "headers").select("place.*", "value", "headers")
