"""What a job computes: functions from DataFrame to DataFrame, native functions only, nothing that can raise.

One malformed record must never stop a stream, so every cast of a sender's text is a `try_cast` behind a
pattern, and every number has a range.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name everybody knows it by)

from mapping.record import CONTENT_TYPE
from spark_sinks.transforms.dead_letters import ERROR, KAFKA_HEADERS, LATE, header

READING_SCHEMA = "array<struct<temperature: double, time: string, sensor: string, sent: string>>"
"""The fields of a reading that this job uses. Texts are judged by `parsed`, so that a bad one has a reason."""

EMIT = "emit"
"""Header of a result that is the last of its window."""

NOT_READABLE = "the value is neither a number nor a JSON object in UTF-8"
NO_NUMBER = "temperature is missing or not a finite number"
NO_SENSOR = "no sensor: neither a record key in UTF-8 nor a field sensor"
BAD_TIME = "time is neither epoch milliseconds nor ISO 8601"
AHEAD = "time is ahead of the record's arrival by more than is allowed"

_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_MILLISECONDS = r"^([0-9]{1,14}(\.[0-9]*)?|[0-9](\.[0-9]+)?E1[0-3])$"  # Spark writes a fraction with an exponent
_WHITE_SPACE = " \t\r\n"
_ISO_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.,][0-9]{1,9})?)?(Z|[+-][0-9]{2}:?[0-9]{2})?$"


def parsed(records: DataFrame, ahead: str = "1 minute") -> DataFrame:
    """Read each record of the source: sensor, temperature, time, sent, and `error` (null: a good reading).

    A value is a JSON object with a number `temperature`, or a bare number. The sensor is the record's key,
    else the field `sensor`. The time is the field `time` (epoch milliseconds or ISO 8601, UTC without a zone),
    else Kafka's timestamp. A time further than `ahead` in front of Kafka's timestamp is an error: it would
    push the watermark so far that every other sensor's readings counted as late.

    Args:
        records: the Kafka source's columns; without headers where nobody needs them. They are kept.
        ahead: the tolerated difference of clocks.
    """
    text = F.when(
        F.is_valid_utf8(F.col("value").cast("string")), F.trim(F.col("value").cast("string"), F.lit(_WHITE_SPACE))
    )
    key = F.when(F.is_valid_utf8(F.col("key").cast("string")), F.col("key").cast("string"))
    is_number = F.col("text").rlike(_NUMBER)
    is_object = F.col("text").startswith("{")
    # As the only element of an array: alone, Spark's parser overlooks what follows the object's end.
    objects = F.from_json(
        F.concat(F.lit("["), F.col("text"), F.lit("]")), READING_SCHEMA, {"allowNonNumericNumbers": "false",
                                                                           "allowSingleQuotes": "false"},
    )  # fmt: skip
    fields = F.get(F.col("objects"), F.lit(0))
    temperature = F.when(is_number, F.col("text").try_cast("double")).otherwise(fields["temperature"])
    time = F.col("own_time")
    sent = fields["sent"]
    own = [
        name
        for name in ("key", "value", "headers", "topic", "partition", "offset", "timestamp")
        if name in records.columns
    ]
    return (
        records.select(
            *own,
            text.alias("text"),
            key.alias("key_text"),
        )
        .withColumn("objects", F.when(is_object, objects))
        .select(
            *own,
            (is_number | (F.size("objects") == 1)).alias("readable"),
            temperature.alias("temperature"),
            F.coalesce(_non_empty(F.col("key_text")), _non_empty(fields["sensor"])).alias("sensor"),
            fields["time"].alias("own_time"),
            F.when(sent.rlike(_MILLISECONDS), sent.try_cast("double").try_cast("bigint")).alias("sent"),
        )
        .withColumn(
            "time",
            F.when(time.isNull(), F.col("timestamp"))
            .when(time.rlike(_MILLISECONDS), F.timestamp_millis(time.try_cast("double").try_cast("bigint")))
            .when(time.rlike(_ISO_TIME), F.regexp_replace(time, ",", ".").try_cast("timestamp")),
        )
        .select(
            *own,
            "sensor", "temperature", "time", "sent",
            F.when(~F.coalesce("readable", F.lit(False)), NOT_READABLE)
            .when(F.col("temperature").isNull() | ~F.abs("temperature").between(0.0, 1.7976931348623157e308), NO_NUMBER)
            .when(F.col("sensor").isNull(), NO_SENSOR)
            .when(F.col("time").isNull(), BAD_TIME)
            .when(F.col("time") > F.col("timestamp") + F.expr(f"interval {ahead}"), AHEAD)
            .alias("error"),
        )
    )  # fmt: skip


def readings(checked: DataFrame) -> DataFrame:
    """The good readings of `parsed`: sensor, temperature, time, sent."""
    return checked.where(F.col("error").isNull()).select("sensor", "temperature", "time", "sent")


def maxima(good: DataFrame, window: str, slide: str, watermark: str) -> DataFrame:
    """The maximum per sensor and sliding window of event time.

    A window is closed, and a reading too late for it, once the newest event time seen is `watermark` past its
    end.

    Returns:
        sensor, start, end (epoch ms), maximum, count, latest (the newest `sent`, epoch ms, or null).
    """
    return (
        good.select("sensor", "temperature", "time", "sent")
        .withWatermark("time", watermark)
        .groupBy(F.window("time", window, slide), "sensor")
        .agg(
            F.max("temperature").alias("maximum"),
            F.count(F.lit(1)).alias("count"),
            F.max("sent").alias("latest"),
        )
        .select(
            "sensor",
            F.unix_millis("window.start").alias("start"),
            F.unix_millis("window.end").alias("end"),
            "maximum",
            "count",
            "latest",
        )
    )


def as_records(results: DataFrame, *, final: bool = False) -> DataFrame:
    """Results of `maxima` as Kafka records: key = sensor, value = JSON (null fields left out), headers.

    Final ones, of windows that are closed, have a header `emit` = `final`.
    """
    headers = [header(CONTENT_TYPE, F.lit("application/json"))]
    if final:
        headers.append(header(EMIT, F.lit("final")))
    return results.select(
        F.col("sensor").cast("binary").alias("key"),
        F.to_json(F.struct("sensor", "start", "end", "maximum", "count", "latest")).cast("binary").alias("value"),
        F.array(*headers).cast(KAFKA_HEADERS).alias("headers"),
    )


def rejected(checked: DataFrame, window_ms: int, slide_ms: int, watermark_ms: Column) -> DataFrame:
    """The records of `parsed` that no result counts: malformed, or dropped by Spark as late.

    Late: every window of the reading was closed. Its newest starts at the last multiple of `slide` that is not after
    the reading.

    Args:
        checked: with the source's columns.
        window_ms: its length.
        slide_ms: from one window's start to the next.
        watermark_ms: by which Spark judged the record, epoch ms.
    """
    at = F.unix_millis("time")  # not by `window`: that drops the records without a time
    closed = at - F.pmod(at, F.lit(slide_ms)) + window_ms <= watermark_ms
    return (
        checked.withColumn(ERROR, F.coalesce(F.col(ERROR), F.when(closed, LATE)))
        .where(F.col(ERROR).isNotNull())
        .select("key", "value", "headers", "topic", "partition", "offset", "timestamp", ERROR)
    )


def _non_empty(text: Column) -> Column:
    return F.when(text != "", text)
