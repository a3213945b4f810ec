"""Where a job's records come from: one Kafka topic as a stream, and what the broker says about topics."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Self, TypeVar

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from spark_sinks.java import java_class
from spark_sinks.progress import Offsets

_COMMITTED = ("kafka.isolation.level", "read_committed")  # unless the connection says otherwise
_LATER = "org.apache.kafka.common.errors.RetriableException"  # no answer, or none yet
_EARLIEST = -2  # as Spark's connector writes it
_Answer = TypeVar("_Answer")


def kafka_stream(
    spark: SparkSession,
    topic: str,
    *,
    connection: Mapping[str, str],
    starting_offsets: str = "earliest",
    max_offsets_per_trigger: int | None = None,
    fail_on_data_loss: bool = True,
    headers: bool = True,
) -> DataFrame:
    """The records of `topic`: key, value, topic, partition, offset, timestamp (Kafka's own columns), and headers.

    Args:
        spark: the session.
        topic: the Kafka topic; it must exist.
        connection: Kafka client settings by their Kafka names, `bootstrap.servers` at least.
        starting_offsets: earliest or latest; counts at the first start only, afterwards the checkpoint does.
            Earliest leaves nothing out.
        max_offsets_per_trigger: the most records of one micro-batch, spread over the partitions by their lag.
            Bounds memory and keeps partitions abreast after an outage: a partition read far ahead would push
            the watermark past the others. Real-time mode has no such limit and refuses the option.
        fail_on_data_loss: a checkpointed offset that the broker no longer has (retention, a topic made anew)
            ends the job instead of being skipped in silence.
        headers: whether there is a column of them; it costs, also a query that does not look at it.
    """
    reader = (
        spark.readStream.format("kafka")
        .option(*_COMMITTED)
        .options(**{f"kafka.{name}": value for name, value in connection.items()})
        .option("subscribe", topic)
        .option("includeHeaders", str(headers).lower())
        .option("startingOffsets", starting_offsets)
        .option("failOnDataLoss", str(fail_on_data_loss).lower())
    )
    if max_offsets_per_trigger is not None:
        reader = reader.option("maxOffsetsPerTrigger", str(max_offsets_per_trigger))
    return reader.load()


def kafka_range(spark: SparkSession, start: Offsets, end: Offsets, *, connection: Mapping[str, str]) -> DataFrame:
    """The records between two places of some topics, end exclusive; a partition without a start from its beginning."""
    begin = {
        topic: {partition: start.get(topic, {}).get(partition, _EARLIEST) for partition in partitions}
        for topic, partitions in end.items()
    }
    assigned = {topic: sorted(int(partition) for partition in partitions) for topic, partitions in end.items()}
    return (
        spark.read.format("kafka")
        .option(*_COMMITTED)
        .options(**{f"kafka.{name}": value for name, value in connection.items()})
        .option("assign", json.dumps(assigned))  # not the whole topics: it may have got partitions since
        .option("includeHeaders", "true")
        .option("startingOffsets", json.dumps(begin))
        .option("endingOffsets", json.dumps(end))
        .option("failOnDataLoss", "false")
        .load()
    )


class Broker:
    """What Kafka says of topics, by the Java client that the connector brings along; a job needs no second one.

    Args:
        spark: the session.
        connection: Kafka client settings by their Kafka names.
        answer_s: how long an answer may take.
    """

    def __init__(self, spark: SparkSession, connection: Mapping[str, str], answer_s: float) -> None:
        self._list = java_class(spark, "java.util.ArrayList")
        self._map = java_class(spark, "java.util.HashMap")
        self._place = java_class(spark, "org.apache.kafka.common.TopicPartition")
        self._offset = java_class(spark, "org.apache.kafka.clients.admin.OffsetSpec")
        self._options = java_class(spark, "org.apache.kafka.clients.admin.ListOffsetsOptions")
        self._committed = java_class(spark, "org.apache.kafka.common.IsolationLevel").READ_COMMITTED
        properties = java_class(spark, "java.util.Properties")()
        for name in ("default.api.timeout.ms", "request.timeout.ms"):
            properties.put(name, str(round(answer_s * 1000)))  # a stop is noticed between two questions
        for name, value in connection.items():
            properties.put(name, value)
        self._admin = java_class(spark, "org.apache.kafka.clients.admin.AdminClient").create(properties)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._admin.close()

    def partitions(self, names: Collection[str]) -> dict[str, int] | None:
        """The number of partitions of each of `names` that exists; None when Kafka does not answer in time."""
        return self._ask(lambda: self._partitions(names))

    def ends(self, topics: Collection[str], *, beginnings: bool = False) -> Offsets | None:
        """Where committed records end (or begin) in each partition; None when Kafka does not answer in time."""
        return self._ask(lambda: self._offsets(topics, beginnings=beginnings))

    def _partitions(self, names: Collection[str]) -> dict[str, int]:
        known = self._admin.listTopics().names().get()  # stays in Java: a cluster may have many thousands
        asked, wanted = self._list(), [name for name in names if known.contains(name)]
        for name in wanted:
            asked.add(name)
        described = self._admin.describeTopics(asked).allTopicNames().get()
        return {name: described.get(name).partitions().size() for name in wanted}

    def _offsets(self, topics: Collection[str], *, beginnings: bool) -> Offsets:
        spec = self._offset.earliest() if beginnings else self._offset.latest()
        asked = self._map()
        places = [
            (topic, partition, self._place(topic, partition))
            for topic, partitions in self._partitions(topics).items()
            for partition in range(partitions)
        ]
        for _, _, place in places:
            asked.put(place, spec)
        told = self._admin.listOffsets(asked, self._options(self._committed)).all().get()
        offsets: Offsets = {}
        for topic, partition, place in places:
            offsets.setdefault(topic, {})[str(partition)] = told.get(place).offset()
        return offsets

    def _ask(self, question: Callable[[], _Answer]) -> _Answer | None:
        try:
            return question()
        except Py4JJavaError as error:
            cause = error.java_exception.getCause()
            if cause is not None and is_instance_of(SparkContext._gateway, cause, _LATER):
                return None
            raise
