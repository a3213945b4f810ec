"""Where a job's results go: Kafka, at least once."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

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

    At least once: a batch that was written but not yet checkpointed when the job died is written again. A
    micro-batch then has the same content, because the checkpoint fixes what it reads. Real time fixes that only
    at its end, so counts that were already written begin again from the last checkpoint's: for up to an interval
    a reader sees windows go back and come forward again.

    Args:
        records: columns key and value (binary), headers (array of key and value).
        topic: the Kafka topic, which must exist; None: each record has its own in a column `topic`.
        name: the query's name in progress lines.
        connection: Kafka client settings by their Kafka names.
        checkpoint: directory (or URL) of this query alone.
        trigger: when it reads. Real time holds a slot for every task of every stage.
        output_mode: update: a window again with every change; append: once, when it is closed, and the mode of
            stateless queries.
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
    """Spark's options of a Kafka producer, that waits for every replica and repeats nothing of its own."""
    own = {"kafka.acks": "all", "kafka.enable.idempotence": "true"}
    return {**{f"kafka.{name}": value for name, value in connection.items()}, **own}
