"""Create topics with the cluster's default replication factor, for which aiokafka's request is too old."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.admin import CreateTopicsRequest, CreateTopicsRequest_v3, CreateTopicsResponse_v3

from gateway.kafka.driver.wire import FixedRequest

BROKERS_DEFAULT: Final = -1
"""A replication factor that stands for the broker's `default.replication.factor` (KIP-464)."""


class _CreateTopicsRequest4(FixedRequest):
    """Like version 3, but a replication factor may be `BROKERS_DEFAULT`."""

    API_KEY = 19
    API_VERSION = 4
    RESPONSE_TYPE = CreateTopicsResponse_v3
    SCHEMA = CreateTopicsRequest_v3.SCHEMA

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> Any:
        try:
            return super().prepare(versions)
        except IncompatibleBrokerVersion:
            raise IncompatibleBrokerVersion(
                "brokers before Kafka 2.4 need an explicit replication factor (kafka.topic_replication)"
            ) from None


def create_topics_request(topics: list[tuple[str, int, int, list[tuple[str, str]]]], timeout_ms: int) -> Any:
    """Return a request for topics, each with a name, a number of partitions, a replication factor and its settings."""
    wanted: list[Any] = [(name, partitions, copies, [], configs) for name, partitions, copies, configs in topics]
    if any(copies == BROKERS_DEFAULT for _, _, copies, _ in topics):
        return _CreateTopicsRequest4(wanted, timeout_ms, False)
    return CreateTopicsRequest(wanted, timeout_ms, False)
