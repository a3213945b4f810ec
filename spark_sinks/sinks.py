"""A job's Kafka sink: at least once."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from spark_sinks.sources import kafka_settings
from spark_sinks.triggers import Trigger


def kafka_sink(
    records: DataFrame,
    topic: str | None,
    *,
    name: str,
    connection: Mapping[str, str],
    checkpoint: str,
    trigger: Trigger,
    output_mode: str = "update",
) -> StreamingQuery:
    """Start a query that writes `records` (key, value, headers) to `topic`.

    At least once: a batch that was written but not checkpointed when the job died is written again. A repeated
    micro-batch has the same content, because the checkpoint fixes its offset range. Real time fixes the range only at
    the batch's end, so counts already written start again from the last checkpoint: for up to one interval a reader
    sees windows go back and then forward again.

    Args:
        records: columns key and value (binary), headers (array of key and value).
        topic: the Kafka topic, which must exist. None means that a column `topic` names each record's topic.
        name: the query's name in progress lines.
        connection: Kafka client settings by their Kafka names.
        checkpoint: the query's own directory (or URL).
        trigger: when it reads. Real time holds a slot for every task of every stage.
        output_mode: update writes a window each time it changes; append writes it once, when it is closed. Stateless
            queries use append.
    """
    writer = (
        records.writeStream.queryName(name)
        .format("kafka")
        .options(**kafka_options(connection))
        .option("checkpointLocation", checkpoint)
        .outputMode(output_mode)
    )
    if topic is not None:
        writer = writer.option("topic", topic)
    return trigger.start(writer)


def write_once(records: DataFrame, topic: str, connection: Mapping[str, str]) -> None:
    """Write a static DataFrame of key, value and headers to `topic`."""
    records.write.format("kafka").options(**kafka_options(connection)).option("topic", topic).save()


def kafka_options(connection: Mapping[str, str]) -> dict[str, str]:
    """Return Spark's options for a Kafka producer that waits for all replicas and is idempotent."""
    return kafka_settings({**connection, "acks": "all", "enable.idempotence": "true"})
