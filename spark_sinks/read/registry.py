"""Reads a job's device registry: a compacted topic, read again for every batch, or a file, read once at the start."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.read.decode import WHITE_SPACE, json_columns
from spark_sinks.read.records import text_of
from spark_sinks.read.sources import committed
from spark_sinks.spec.parts import Registry


def read(spark: SparkSession, registry: Registry, connection: Mapping[str, str]) -> DataFrame:
    """Return the registry: `_key` and the declared columns, null where missing.

    Raises:
        ValueError: the file cannot be read, or an entry has no key.
    """
    if registry.topic is not None:
        # The topic's end is looked up whenever Spark plans the query: for each micro-batch, and at each real-time
        # checkpoint.
        topic = (
            committed(spark.read, connection)
            .option("subscribe", registry.topic)
            .option("startingOffsets", "earliest")
            .option("endingOffsets", "latest")
            .load()
        )
        rows = (
            topic.select(text_of(F.col("key")).alias("_key"), "value", "offset")
            .where(F.col("_key").isNotNull())
            .groupBy("_key")
            .agg(F.max_by("value", "offset").alias("value"))
            .where(F.col("value").isNotNull())  # else the newest record deletes the key
            .withColumn("_text", F.trim(text_of(F.col("value")), F.lit(WHITE_SPACE)))
        )
        return rows.select("_key", *json_columns(F.col("_text"), registry.columns))
    assert registry.file is not None  # `Registry._fits`
    # Of several entries with one key the last is used, as in a topic.
    known = {str(row["key"]): json.dumps(row) for row in _rows_of(Path(registry.file), registry)}
    rows = spark.createDataFrame([*known.items()], "_key string, _text string")
    return rows.select("_key", *json_columns(F.col("_text"), registry.columns))


def _rows_of(file: Path, registry: Registry) -> list[dict[str, Any]]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            if file.suffix == ".csv":
                rows: list[Any] = [_typed(row, registry) for row in csv.DictReader(lines)]
            else:
                rows = [json.loads(line) for line in lines if line.strip()]
    except OSError as error:
        raise ValueError(f"registry.file: {file}: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise ValueError(f"registry.file: {file}: {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not row.get("key"):
            raise ValueError(f"registry.file: {file}: entry {number} has no key")
    return rows


def _typed(row: dict[str, Any], registry: Registry) -> dict[str, Any]:
    """Convert the numbers and booleans of a CSV row as if it were JSON."""
    kinds = {column.field or name: column.type for name, column in registry.columns.items()}
    return {
        name: text if kinds.get(name, "string") == "string" else json.loads(text or "null")
        for name, text in row.items()
    }
