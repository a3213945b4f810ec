"""Where a job's results go: Kafka, at least once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

MICRO_BATCH = "micro-batch"
REAL_TIME = "real-time"


def kafka_sink(
    records: DataFrame,
    topic: str,
    *,
    name: str,
    connection: Mapping[str, str],
    checkpoint: Path | str,
    trigger: str = MICRO_BATCH,
    interval: str | None = None,
    output_mode: str = "update",
) -> StreamingQuery:
    """Start a query that writes `records` (key, value, headers) to `topic`.

    At least once: a batch that was written but not yet checkpointed when the job died is written again with
    the same keys and the same content, because the checkpoint fixes what a batch reads. A record of `maximum`
    is the newest state of its sensor and window, so a reader that keeps the last record per (key, start) sees
    no difference; a dead letter carries its origin's topic, partition and offset, which identify it.

    Args:
        records: columns key and value (binary), headers (array of key and value).
        topic: the Kafka topic; must exist.
        name: the query's name in progress lines.
        connection: Kafka client settings by their Kafka names.
        checkpoint: directory of this query alone.
        trigger: MICRO_BATCH or REAL_TIME. Real time holds a slot for every task of every stage.
        interval: of micro-batches ("0 seconds": one after the other), or of real-time checkpoints.
        output_mode: update for windows, append for stateless queries.
    """
    writer = (
        records.writeStream.queryName(name)
        .format("kafka")
        .options(**{f"kafka.{key}": value for key, value in connection.items()})
        .option("kafka.acks", "all")
        .option("kafka.enable.idempotence", "true")
        .option("topic", topic)
        .option("checkpointLocation", str(checkpoint))
        .outputMode(output_mode)
    )
    if trigger == REAL_TIME:
        # The stub of `trigger` has no overload for real time yet.
        return writer.trigger(realTime=interval or "5 minutes").start()  # type: ignore[call-overload, no-any-return]
    if trigger == MICRO_BATCH:
        return writer.trigger(processingTime=interval or "0 seconds").start()
    raise ValueError(f"trigger must be {MICRO_BATCH} or {REAL_TIME}, got {trigger!r}")
