"""Kafka for a job: topics as a stream, producers' settings, and the admin client for partitions and offsets."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Self, TypeVar

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamReader

from spark_sinks.spark.java import java_class
from spark_sinks.spark.progress import Offsets, offsets_sum

_LATER = "org.apache.kafka.common.errors.RetriableException"  # no answer yet
_DENIED = "org.apache.kafka.common.errors.AuthorizationException"
LARGEST_BATCH = 1_048_588
"""Kafka's default for the largest batch of a topic."""
MAX_REQUEST = "max.request.size"
_BUFFER = 32 << 20  # Kafka's default
_EARLIEST = -2  # as Spark's connector writes it
_Answer = TypeVar("_Answer")
_Reader = TypeVar("_Reader", DataFrameReader, DataStreamReader)


def committed(reader: _Reader, connection: Mapping[str, str]) -> _Reader:
    """Return a reader of Kafka's committed records, unless the connection (settings by Kafka name) says otherwise."""
    return reader.format("kafka").options(**kafka_settings({"isolation.level": "read_committed", **connection}))


def kafka_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return Kafka client settings as Spark's options."""
    return {f"kafka.{name}": value for name, value in settings.items()}


def producer_settings(connection: Mapping[str, str], limits: Mapping[str, int]) -> dict[str, str]:
    """Return Spark's options for a Kafka producer that waits for all replicas and is idempotent.

    Args:
        connection: Kafka client settings by their Kafka names.
        limits: by topic, the most bytes of a record that it must be able to send.
    """
    largest = max(limits.values())
    sizes = {MAX_REQUEST: str(largest), "buffer.memory": str(max(_BUFFER, 2 * largest))}
    return kafka_settings({**sizes, **connection, "acks": "all", "enable.idempotence": "true"})


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
    """Return the records of `topic`: key, value, topic, partition, offset, timestamp (Kafka's columns), and headers.

    Args:
        spark: the session.
        topic: the Kafka topic, or several separated by commas; they must exist.
        connection: Kafka client settings by their Kafka names, `bootstrap.servers` at least.
        starting_offsets: earliest or latest. Used at the first start only; afterwards the checkpoint decides.
            Earliest skips no record.
        max_offsets_per_trigger: the most records of one micro-batch, spread over the partitions by their lag.
            Limits memory and keeps partitions in step after an outage: a partition that is read far ahead would
            push the watermark past the others. Real-time mode does not support it and refuses the option.
        fail_on_data_loss: whether a checkpointed offset that the broker no longer has (retention, a re-created
            topic) ends the job. Otherwise the gap is skipped silently.
        headers: whether to read headers, which costs time even in a query that does not use them.
    """
    reader = (
        committed(spark.readStream, connection)
        .option("subscribe", topic)
        .option("includeHeaders", str(headers).lower())
        .option("startingOffsets", starting_offsets)
        .option("failOnDataLoss", str(fail_on_data_loss).lower())
    )
    if max_offsets_per_trigger is not None:
        reader = reader.option("maxOffsetsPerTrigger", str(max_offsets_per_trigger))
    return reader.load()


def kafka_range(spark: SparkSession, start: Offsets, end: Offsets, *, connection: Mapping[str, str]) -> DataFrame:
    """Return the records of an offset range, end exclusive; a partition without a start is read from its beginning."""
    begin = {
        topic: {partition: start.get(topic, {}).get(partition, _EARLIEST) for partition in partitions}
        for topic, partitions in end.items()
    }
    assigned = {topic: sorted(int(partition) for partition in partitions) for topic, partitions in end.items()}
    return (
        committed(spark.read, connection)
        .option("assign", json.dumps(assigned))  # not whole topics, which may have new partitions
        .option("includeHeaders", "true")
        .option("startingOffsets", json.dumps(begin))
        .option("endingOffsets", json.dumps(end))
        .option("failOnDataLoss", "false")
        .load()
    )


class Broker:
    """Kafka's admin client, through the Java client that the connector already contains.

    Args:
        spark: the session.
        connection: Kafka client settings by their Kafka names.
        answer_s: the longest time to wait for an answer.
    """

    def __init__(self, spark: SparkSession, connection: Mapping[str, str], answer_s: float) -> None:
        self._list = java_class(spark, "java.util.ArrayList")
        self._map = java_class(spark, "java.util.HashMap")
        self._place = java_class(spark, "org.apache.kafka.common.TopicPartition")
        self._offset = java_class(spark, "org.apache.kafka.clients.admin.OffsetSpec")
        self._resource = java_class(spark, "org.apache.kafka.common.config.ConfigResource")
        self._options = java_class(spark, "org.apache.kafka.clients.admin.ListOffsetsOptions")
        self._committed = java_class(spark, "org.apache.kafka.common.IsolationLevel").READ_COMMITTED
        properties = java_class(spark, "java.util.Properties")()
        for name in ("default.api.timeout.ms", "request.timeout.ms"):
            properties.put(name, str(round(answer_s * 1000)))  # a stop is noticed between two requests
        for name, value in connection.items():
            properties.put(name, value)
        self.ids: dict[str, str] = {}  # Kafka's id of each topic, as of the last answer
        self._admin = java_class(spark, "org.apache.kafka.clients.admin.AdminClient").create(properties)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._admin.close()

    def partitions(self, names: Collection[str]) -> dict[str, int] | None:
        """Return the number of partitions of each existing topic; None if Kafka does not answer in time."""
        return self._ask(lambda: self._partitions(names))

    def ends(self, topics: Collection[str], *, beginnings: bool = False) -> Offsets | None:
        """Return where committed records end (or begin) per partition; None if Kafka does not answer in time."""
        return self._ask(lambda: self._offsets(topics, beginnings=beginnings))

    def limits(self, topics: Collection[str]) -> dict[str, int] | None:
        """Return the most bytes of a batch of each topic; None if Kafka does not answer in time.

        It is Kafka's default for a topic that does not exist, or whose configuration may not be read.
        """
        return self._ask(lambda: self._limits(topics))

    def record_bytes(self, topics: Collection[str]) -> float | None:
        """Return the mean size of a record in the log of these topics, as stored there.

        None if there is no record, the directories of the log may not be asked for, or Kafka does not answer in time.
        """
        return self._ask(lambda: self._record_bytes(topics))

    def _record_bytes(self, topics: Collection[str]) -> float | None:
        ends, begins = (self._offsets(topics, beginnings=beginnings) for beginnings in (False, True))
        brokers = self._list()
        for node in self._admin.describeCluster().nodes().get().toArray():
            brokers.add(node.id())
        try:
            directories = self._admin.describeLogDirs(brokers).allDescriptions().get()
        except Py4JJavaError as error:
            if _caused_by(error, _DENIED):
                return None
            raise
        sizes: dict[tuple[str, str], int] = {}
        for of_broker in directories.values():
            for directory in of_broker.values():
                replicas = directory.replicaInfos()
                for topic, partitions in ends.items():
                    for partition in partitions:
                        replica = replicas.get(self._place(topic, int(partition)))
                        if replica is not None:
                            sizes[topic, partition] = max(replica.size(), sizes.get((topic, partition), 0))
        records = offsets_sum(ends) - offsets_sum(begins)
        return sum(sizes.values()) / records if records > 0 else None

    def _limits(self, topics: Collection[str]) -> dict[str, int]:
        known = self._partitions(topics)
        resources = {name: self._resource(self._resource.Type.TOPIC, name) for name in known}
        asked = self._list()
        for resource in resources.values():
            asked.add(resource)
        limits = dict.fromkeys(topics, LARGEST_BATCH)
        try:
            configs = self._admin.describeConfigs(asked).all().get()
        except Py4JJavaError as error:
            if _caused_by(error, _DENIED):
                return limits
            raise
        return limits | {
            name: int(configs.get(resource).get("max.message.bytes").value()) for name, resource in resources.items()
        }

    def _partitions(self, names: Collection[str]) -> dict[str, int]:
        known = self._admin.listTopics().names().get()  # stays in Java: there may be thousands of topics
        asked, wanted = self._list(), [name for name in names if known.contains(name)]
        for name in wanted:
            asked.add(name)
        described = self._admin.describeTopics(asked).allTopicNames().get()
        self.ids |= {name: described.get(name).topicId().toString() for name in wanted}
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
        answers = self._admin.listOffsets(asked, self._options(self._committed)).all().get()
        offsets: Offsets = {}
        for topic, partition, place in places:
            offsets.setdefault(topic, {})[str(partition)] = answers.get(place).offset()
        return offsets

    def _ask(self, question: Callable[[], _Answer]) -> _Answer | None:
        try:
            return question()
        except Py4JJavaError as error:
            if _caused_by(error, _LATER):
                return None
            raise


def _caused_by(error: Py4JJavaError, name: str) -> bool:
    cause = error.java_exception.getCause()
    return cause is not None and is_instance_of(SparkContext._gateway, cause, name)
