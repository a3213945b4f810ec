"""A user-defined job: readings in Fahrenheit.

Start it with: trivium spark run examples/spark/fahrenheit.py
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (PySpark's usual name for it)

from spark_sinks.spec.jobs import Transform
from spark_sinks.spec.parts import Column, ResultSink, Run, Source

JOB = Transform(
    name="fahrenheit",
    source=Source(topics=("sensors",), columns={"temperature": Column(type="double")}, dead_letters="sensors-dlq"),
    sink=ResultSink(kafka="fahrenheit"),
    run=Run(checkpoint=".trivium/spark/fahrenheit"),
)


def transform(readings: DataFrame) -> DataFrame:
    """Turn good readings into records with columns `key` and `value`, and optionally `headers`."""
    fahrenheit = (F.col("temperature") * 1.8 + 32).alias("fahrenheit")
    result = F.struct("key", fahrenheit, F.unix_millis("time").alias("time"))
    return readings.select("key", F.to_json(result).alias("value"))
