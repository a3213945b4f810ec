"""Where a job's records come from: one Kafka topic as a stream, and what the broker says about topics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

_COMMITTED = ("kafka.isolation.level", "read_committed")  # unless the connection says otherwise
_NO_ANSWER = "org.apache.kafka.common.errors.TimeoutException"


def kafka_stream(
    spark: SparkSession,
    topic: str,
    *,
    connection: Mapping[str, str],
    starting_offsets: str = "earliest",
    max_offsets_per_trigger: int | None = None,
    fail_on_data_loss: bool = True,
) -> DataFrame:
    """The records of `topic`: key, value, headers, topic, partition, offset, timestamp (Kafka's own columns).

    Args:
        spark: the session.
        topic: the Kafka topic; it must exist (`topics_of`).
        connection: Kafka client settings by their Kafka names, `bootstrap.servers` at least.
        starting_offsets: earliest or latest; counts at the first start only, afterwards the checkpoint does.
            Earliest leaves nothing out.
        max_offsets_per_trigger: the most records of one micro-batch, spread over the partitions by their lag.
            Bounds memory and keeps partitions abreast after an outage: a partition read far ahead would push
            the watermark past the others. Real-time mode has no such limit and refuses the option.
        fail_on_data_loss: a checkpointed offset that the broker no longer has (retention, a topic made anew)
            ends the job instead of being skipped in silence.
    """
    reader = (
        spark.readStream.format("kafka")
        .option(*_COMMITTED)
        .options(**{f"kafka.{name}": value for name, value in connection.items()})
        .option("subscribe", topic)
        .option("includeHeaders", "true")
        .option("startingOffsets", starting_offsets)
        .option("failOnDataLoss", str(fail_on_data_loss).lower())
    )
    if max_offsets_per_trigger is not None:
        reader = reader.option("maxOffsetsPerTrigger", str(max_offsets_per_trigger))
    return reader.load()


def kafka_range(spark: SparkSession, topic: str, start: str, end: str, *, connection: Mapping[str, str]) -> DataFrame:
    """The records of `topic` between two offset maps (JSON, as a query's progress gives them), end exclusive."""
    return (
        spark.read.format("kafka")
        .option(*_COMMITTED)
        .options(**{f"kafka.{name}": value for name, value in connection.items()})
        .option("subscribe", topic)
        .option("includeHeaders", "true")
        .option("startingOffsets", start)
        .option("endingOffsets", end)
        .option("failOnDataLoss", "false")
        .load()
    )


def topics_of(
    spark: SparkSession, names: Collection[str], connection: Mapping[str, str], answer_s: float
) -> dict[str, int] | None:
    """The number of partitions of each of `names` that exists; None when Kafka does not answer within `answer_s`.

    Asked through the Java client that the connector brings along, so a job needs no second Kafka client.
    """
    jvm: Any = spark._jvm
    properties = jvm.java.util.Properties()
    for name in ("default.api.timeout.ms", "request.timeout.ms"):
        properties.put(name, str(round(answer_s * 1000)))  # a stop is noticed between two questions
    for name, value in connection.items():
        properties.put(name, value)
    admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(properties)
    try:
        known = set(admin.listTopics().names().get())
        wanted = jvm.java.util.ArrayList()
        for name in names:
            if name in known:
                wanted.add(name)
        described = admin.describeTopics(wanted).allTopicNames().get()
        return {name: described[name].partitions().size() for name in wanted}
    except Py4JJavaError as error:
        cause = error.java_exception.getCause()
        if cause is not None and cause.getClass().getName() == _NO_ANSWER:
            return None
        raise
    finally:
        admin.close()
