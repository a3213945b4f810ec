"""One driver per checkpoint: a lease that Kafka holds, by a transactional id, on whichever host the driver runs.

Starting a producer with a transactional id fences an earlier one with the same id (ADR 0103).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from spark_sinks.spark.java import java_class
from spark_sinks.spark.progress import Offsets

PREFIX: Final = "trivium-spark-"
"""Of the transactional ids, and of the consumer groups, by the id of the checkpoint's query."""
RENEW_S: Final = 1.0
TAKE_OVER_S: Final = 3.0
"""How long a new holder waits for a driver that has not given up its lease: it notices within `RENEW_S` and stops."""
_ANSWER_MS: Final = 10_000
_TRANSACTION_MS: Final = 60_000
_TRIES: Final = 6
_CLIENTS: Final = "org.apache.kafka.clients"
_ERRORS: Final = "org.apache.kafka.common.errors"
_FENCED: Final = (f"{_ERRORS}.ProducerFencedException", f"{_ERRORS}.InvalidProducerEpochException")
_DENIED: Final = (f"{_ERRORS}.TransactionalIdAuthorizationException", f"{_ERRORS}.GroupAuthorizationException")
_LATER: Final = f"{_ERRORS}.RetriableException"


class LeaseError(RuntimeError):
    """Another driver has taken over the checkpoint, or Kafka does not allow the lease."""


class Lease:
    """The lease of a query's checkpoint, renewed in a thread.

    A renewal is a transaction that commits the query's position for a group of the same name. It needs no topic, Kafka
    refuses it to a fenced producer, and Kafka's own tools show the query's lag by it.

    Args:
        spark: the session.
        connection: Kafka client settings by their Kafka names.
        query: the id of the checkpoint's query.
        topic: a topic of the query.
        lost: called in the thread, once, with the error that ended the lease.

    Attributes:
        position: the offsets before which the query has read everything; may be set at any time.
    """

    def __init__(
        self,
        spark: SparkSession,
        connection: Mapping[str, str],
        query: str,
        topic: str,
        lost: Callable[[BaseException], None],
    ) -> None:
        self.name = f"{PREFIX}{query}"
        self.position: Offsets = {}
        self._topic = topic
        self._stored: Offsets = {}
        self._lost = lost
        self._ended = threading.Event()
        properties = java_class(spark, "java.util.Properties")()
        serializer = "org.apache.kafka.common.serialization.ByteArraySerializer"
        for name, value in {
            **connection,
            "acks": "all",
            "enable.idempotence": "true",
            "transactional.id": self.name,
            "transaction.timeout.ms": str(_TRANSACTION_MS),
            "max.block.ms": str(_ANSWER_MS),
            "key.serializer": serializer,
            "value.serializer": serializer,
        }.items():
            properties.put(name, value)
        self._producer = java_class(spark, f"{_CLIENTS}.producer.KafkaProducer")(properties)
        self._group = java_class(spark, f"{_CLIENTS}.consumer.ConsumerGroupMetadata")(self.name)
        self._map = java_class(spark, "java.util.HashMap")
        self._place = java_class(spark, "org.apache.kafka.common.TopicPartition")
        self._offset = java_class(spark, f"{_CLIENTS}.consumer.OffsetAndMetadata")
        self._at_once = java_class(spark, "java.time.Duration").ZERO
        self._thread = threading.Thread(target=self._renew, name=f"lease {self.name}", daemon=True)

    def begin(self) -> None:
        """Fence every earlier holder, and renew from now on; LeaseError if Kafka does not allow it."""
        self._try(self._producer.initTransactions, _TRIES)
        self._commit(_TRIES)
        self._thread.start()

    def end(self) -> None:
        """Stop renewing."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(RENEW_S)
        self._producer.close(self._at_once)  # ends a call that waits for Kafka
        if self._thread.ident is not None:
            self._thread.join()

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._commit()
            except Exception as error:  # raised by the thread that runs the query
                if not self._ended.is_set():
                    self._lost(error)
                return

    def _commit(self, tries: int | None = None) -> None:
        position = self.position
        moved = {} if position is self._stored else position
        offsets = self._map()
        for topic, partitions in (moved or {self._topic: {"0": position.get(self._topic, {}).get("0", 0)}}).items():
            for partition, offset in partitions.items():
                offsets.put(self._place(topic, int(partition)), self._offset(offset))
        self._producer.beginTransaction()
        self._try(lambda: self._producer.sendOffsetsToTransaction(offsets, self._group), tries)
        self._try(self._producer.commitTransaction, tries)
        self._stored = position

    def _try(self, call: Callable[[], Any], tries: int | None = None) -> None:
        """Repeat a call while Kafka does not answer; without Kafka the query writes nothing either."""
        for attempt in itertools.count(1):
            try:
                call()
            except Py4JJavaError as error:
                if self._is(error, _FENCED):
                    raise LeaseError(
                        f"another driver has taken over the checkpoint ({self.name}): one job, one checkpoint"
                    ) from None
                if self._is(error, _DENIED):
                    raise LeaseError(
                        f"Kafka does not allow the lease of the checkpoint: Write on the transactional id {self.name} "
                        "and Read on the group of this name are needed"
                    ) from None
                if self._ended.is_set() or attempt == tries or not self._is(error, (_LATER,)):
                    raise
            else:
                return

    @staticmethod
    def _is(error: Py4JJavaError, kinds: tuple[str, ...]) -> bool:
        cause = error.java_exception
        while cause is not None:
            if any(is_instance_of(SparkContext._gateway, cause, kind) for kind in kinds):
                return True
            cause = cause.getCause()
        return False
