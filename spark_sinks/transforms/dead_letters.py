"""Dead letters: the unchanged record with the reason and its origin in headers."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.read.headers import ERROR, ORIGIN_OFFSET, ORIGIN_PARTITION, ORIGIN_TIMESTAMP, ORIGIN_TOPIC
from spark_sinks.read.records import RAW
from spark_sinks.transforms.record_size import KAFKA_HEADERS, header, shortened

LATE: Final = "late: every window of the reading was closed"
LATE_BY_OTHERS: Final = "late: newer readings closed every window of the reading, which was in time at its arrival"


def dead_letters(records: DataFrame, limit: int) -> DataFrame:
    """Convert source records with a column `error` to Kafka records of at most `limit` bytes."""
    return records.select(letter(F.struct(*RAW), F.col("error"), limit).alias("letter")).select("letter.*")


def letter(record: Column, error: Column, limit: int) -> Column:
    """Convert a record (a struct of the source's columns) to a Kafka record with the reason and origin as headers.

    One of more than `limit` bytes, which may be due to these headers alone, is cut: see `shortened`.
    """
    added = F.array(
        header(ERROR, error),
        header(ORIGIN_TOPIC, record["topic"]),
        header(ORIGIN_PARTITION, record["partition"]),
        header(ORIGIN_OFFSET, record["offset"]),
        header(ORIGIN_TIMESTAMP, F.unix_millis(record["timestamp"])),
    ).cast(KAFKA_HEADERS)
    return shortened(record, added, limit)
