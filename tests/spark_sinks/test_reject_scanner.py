"""The watermark that applied to a record, from the batches in the checkpoint."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from spark_sinks.run.reject_scanner import watermark_of
from spark_sinks.spark.checkpoint import PlannedBatch

BATCHES = [
    PlannedBatch(7, {"a": {"0": 0}}, {"a": {"0": 10, "1": 5}, "b": {"0": 3}}, 1_000),
    PlannedBatch(8, {"a": {"0": 10, "1": 5}, "b": {"0": 3}}, {"a": {"0": 10, "1": 9}, "b": {"0": 3}}, 1_000),
    PlannedBatch(9, {"a": {"0": 10, "1": 9}, "b": {"0": 3}}, {"a": {"0": 20, "1": 9}, "b": {"0": 8}}, 2_000),
    PlannedBatch(10, {"a": {"0": 20, "1": 9}, "b": {"0": 8}}, {"a": {"0": 21, "1": 30}, "b": {"0": 9}}, 3_000),
]


@pytest.mark.parametrize("batches", [BATCHES[:2], BATCHES[:3], BATCHES])
def test_each_record_has_its_batchs_watermark(spark: SparkSession, batches: list[PlannedBatch]) -> None:
    wanted = {
        (topic, int(partition), offset): batch.watermark_ms
        for batch in batches
        for topic, partitions in batch.end.items()
        for partition, end in partitions.items()
        for offset in range(batch.start.get(topic, {}).get(partition, 0), end)
    }
    rows = ", ".join(f"('{topic}', {partition}, {offset}L)" for topic, partition, offset in wanted)
    records = spark.sql(f"SELECT * FROM VALUES {rows} AS records(topic, partition, offset)")
    found = records.withColumn("watermark", watermark_of(batches)).collect()
    assert {(row.topic, row.partition, row.offset): row.watermark for row in found} == wanted
