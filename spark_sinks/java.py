"""Classes of the driver's Java, found at once."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession


def java_class(spark: SparkSession, name: str) -> Any:
    """A class by its whole name, to be kept by whoever uses it again.

    Asked for part by part (`jvm.org.apache...`) Java looks for each part as a class of each package that Spark has
    imported, in each of four hundred jars: a fifth of the processor's time of a job with short batches went there.
    """
    return getattr(spark._jvm, name)
