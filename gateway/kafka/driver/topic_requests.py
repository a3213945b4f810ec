"""Create topics with the cluster's default replication factor, for which aiokafka's request is too old."""

from __future__ import annotations

from typing import Any, Final

from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.admin import (
    CreateTopicsRequest_v1,
    CreateTopicsRequest_v2,
    CreateTopicsRequest_v3,
    CreateTopicsResponse_v3,
)
from aiokafka.protocol.api import Request, RequestStruct

BROKERS_DEFAULT: Final = -1
"""A replication factor that stands for the broker's `default.replication.factor` (KIP-464)."""
_KNOWS_DEFAULTS: Final = 4


class _CreateTopicsRequest4(RequestStruct):  # type: ignore[misc]  # aiokafka carries no types
    """Like version 3, but a replication factor may be `BROKERS_DEFAULT`."""

    API_KEY = 19
    API_VERSION = _KNOWS_DEFAULTS
    RESPONSE_TYPE = CreateTopicsResponse_v3
    SCHEMA = CreateTopicsRequest_v3.SCHEMA


class CreateTopics(
    Request[CreateTopicsRequest_v1 | CreateTopicsRequest_v2 | CreateTopicsRequest_v3 | _CreateTopicsRequest4]  # type: ignore[misc]
):
    """CreateTopics in the newest version that is needed here; brokers since Kafka 2.4 know it."""

    API_KEY = 19

    def __init__(self, topics: list[tuple[str, int, int, list[tuple[str, str]]]], timeout_ms: int) -> None:
        """Each of `topics` has a name, a number of partitions, a replication factor and its configuration."""
        self._topics: list[tuple[Any, ...]] = [
            (name, partitions, copies, [], configs) for name, partitions, copies, configs in topics
        ]
        self._timeout_ms = timeout_ms

    def build(self, request_struct_class: type[RequestStruct]) -> Any:
        """See `Request`. Raises IncompatibleBrokerVersion if the broker cannot choose the replication factor."""
        chosen = all(copies != BROKERS_DEFAULT for _, _, copies, _, _ in self._topics)
        if request_struct_class.API_VERSION < _KNOWS_DEFAULTS and not chosen:
            raise IncompatibleBrokerVersion(
                "brokers before Kafka 2.4 need an explicit replication factor (kafka.topic_replication)"
            )
        return request_struct_class(self._topics, self._timeout_ms, False)
