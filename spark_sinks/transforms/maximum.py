"""The computation of `max-temperature`, from DataFrame to DataFrame. Native functions only, and none that can raise.

One malformed record must never stop a stream, so every cast of untrusted text is a `try_cast` behind a pattern, and
every number is range-checked.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (PySpark's usual name for it)
from pyspark.sql.types import DoubleType, StringType

from spark_sinks.read.decode import (
    AHEAD,
    BAD_TIME,
    BAD_TIMESTAMP,
    LARGEST,
    NUMBER,
    WHITE_SPACE,
    epoch,
    instant,
    is_instant,
    is_one,
    objects,
)
from spark_sinks.read.headers import ERROR
from spark_sinks.read.records import RAW, non_empty, text_of
from spark_sinks.spec.parts import Window
from spark_sinks.spec.values import Aggregate, Term
from spark_sinks.transforms.windows import newest_close, statistics, with_late

READING = {"temperature": DoubleType(), "time": StringType(), "sensor": StringType(), "sent": StringType()}
"""The fields of a reading that this job uses. Texts are validated by `parsed`, so that a bad one gets a reason."""

RESULTS = {
    "maximum": Aggregate("max(temperature)"), "count": Aggregate("count(*)"), "latest": Aggregate("max(sent)"),
}  # fmt: skip

NOT_READABLE = "the value is neither a number nor a JSON object in UTF-8"
NO_NUMBER = "temperature is missing or not a finite number"
NO_SENSOR = "no sensor: neither a record key in UTF-8 nor a field sensor"


def parsed(records: DataFrame, ahead: str = "1 minute") -> DataFrame:
    """Parse each record of the source into sensor, temperature, time, sent, and `error` (null for a good reading).

    A value is a JSON object with a number `temperature`, or a bare number. The sensor is the record's key,
    else the field `sensor`. The time is the field `time` (epoch milliseconds or ISO 8601, UTC without a zone),
    else Kafka's timestamp, the arrival; but never later than the arrival, so that one fast clock does not make the
    readings of every other sensor late. A time more than `ahead` after the arrival is an error.

    Args:
        records: the Kafka source's columns, which are kept; headers may be absent.
        ahead: the tolerated clock difference.
    """
    text = F.trim(text_of(F.col("value")), F.lit(WHITE_SPACE))
    is_number = F.col("text").rlike(NUMBER)
    reading = F.when(F.col("text").startswith("{"), objects(F.col("text"), READING))
    fields = F.get(F.col("objects"), F.lit(0))
    temperature = F.when(is_number, F.col("text").try_cast("double")).otherwise(fields["temperature"])
    time = F.col("own_time")
    sent = fields["sent"]
    own = [name for name in RAW if name in records.columns]
    return (
        records.select(
            *own,
            text.alias("text"),
            text_of(F.col("key")).alias("key_text"),
        )
        .withColumn("objects", reading)
        .select(
            *own,
            (is_number | is_one(F.col("text"), F.col("objects"))).alias("readable"),
            temperature.alias("temperature"),
            F.coalesce(non_empty(F.col("key_text")), non_empty(fields["sensor"])).alias("sensor"),
            fields["time"].alias("own_time"),
            epoch(sent).try_cast("bigint").alias("sent"),
        )
        .withColumn("epoch", epoch(time))
        .withColumn("time", F.when(time.isNull(), F.col("timestamp")).otherwise(instant(time, F.col("epoch"))))
        .select(
            *own,
            "sensor", "temperature", F.least("time", "timestamp").alias("time"), "sent",
            F.when(~F.coalesce("readable", F.lit(False)), NOT_READABLE)
            .when(F.col("temperature").isNull() | ~F.abs("temperature").between(0.0, LARGEST), NO_NUMBER)
            .when(F.col("sensor").isNull(), NO_SENSOR)
            .when(~is_instant(F.col("timestamp")), BAD_TIMESTAMP)
            .when(F.col("time").isNull(), BAD_TIME)
            .when(F.col("time") > F.col("timestamp") + F.expr(f"interval {ahead}"), AHEAD)
            .alias("error"),
        )
    )  # fmt: skip


def maxima(good: DataFrame, window: Window) -> DataFrame:
    """Return the maximum per sensor and window of the good readings from `parsed`; see `statistics`.

    Returns:
        sensor, start, end (epoch ms), maximum, count, latest (the newest `sent`, epoch ms, or null).
    """
    return statistics(good, [Term("sensor")], window, RESULTS)


def rejected(checked: DataFrame, window: Window, watermark_ms: Column) -> DataFrame:
    """Return the records from `parsed` that no result counts: malformed, or dropped by Spark as late.

    Args:
        checked: the result of `parsed`, with the source's columns.
        window: the job's window.
        watermark_ms: the watermark that Spark applied to the record, epoch ms.
    """
    return with_late(checked, newest_close(window), watermark_ms, window.watermark.ms).select(*RAW, ERROR)
