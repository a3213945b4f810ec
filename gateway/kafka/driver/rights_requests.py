"""Requests that aiokafka lacks: our authorized operations on topics and the cluster, and the controller's clock."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Final

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)

QUORUM_TOPIC: Final = "__cluster_metadata"
_TAGS: Final = ("tags", TaggedFields)
_REPLICAS: Final = CompactArray(
    ("replica_id", Int32),
    ("log_end_offset", Int64),
    ("last_fetch_timestamp", Int64),
    ("last_caught_up_timestamp", Int64),
    _TAGS,
)


class _RightsAnswer(Response):  # type: ignore[misc]  # aiokafka carries no types
    API_KEY = 3
    API_VERSION = 8
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            Array(("node_id", Int32), ("host", String("utf-8")), ("port", Int32), ("rack", String("utf-8"))),
        ),
        ("cluster_id", String("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            Array(
                ("error_code", Int16),
                ("topic", String("utf-8")),
                ("is_internal", Boolean),
                (
                    "partitions",
                    Array(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", Array(Int32)),
                        ("isr", Array(Int32)),
                        ("offline", Array(Int32)),
                    ),
                ),
                ("operations", Int32),
            ),
        ),
        ("cluster_operations", Int32),
    )


class _RightsRequest(RequestStruct):  # type: ignore[misc]
    API_KEY: ClassVar[int] = 3
    API_VERSION: ClassVar[int] = 8
    RESPONSE_TYPE = _RightsAnswer
    SCHEMA = Schema(
        ("topics", Array(String("utf-8"))),
        ("allow_auto_topic_creation", Boolean),
        ("cluster_operations", Boolean),
        ("topic_operations", Boolean),
    )


class Rights(Request[_RightsRequest]):  # type: ignore[misc]
    """Metadata of topics with our authorized operations (KIP-430); known to brokers since Kafka 2.3."""

    API_KEY = 3

    def __init__(self, topics: Collection[str]) -> None:
        """Request these topics, without creating any of them."""
        self._topics = list(topics)

    def build(self, request_struct_class: type[_RightsRequest]) -> _RightsRequest:
        """See `Request`."""
        return request_struct_class(self._topics, False, True, True)


class _QuorumAnswer(Response):  # type: ignore[misc]
    API_KEY = 55
    API_VERSION = 1
    FLEXIBLE_VERSION = True
    SCHEMA = Schema(
        ("error_code", Int16),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("leader_id", Int32),
                        ("leader_epoch", Int32),
                        ("high_watermark", Int64),
                        ("voters", _REPLICAS),
                        ("observers", _REPLICAS),
                        _TAGS,
                    ),
                ),
                _TAGS,
            ),
        ),
        _TAGS,
    )


class _QuorumRequest(RequestStruct):  # type: ignore[misc]
    API_KEY: ClassVar[int] = 55
    API_VERSION: ClassVar[int] = 1
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _QuorumAnswer
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")), ("partitions", CompactArray(("partition", Int32), _TAGS)), _TAGS
            ),
        ),
        _TAGS,
    )


class Quorum(Request[_QuorumRequest]):  # type: ignore[misc]
    """The state of the controller quorum (KIP-595); since Kafka 3.3 it has the leader's own time."""

    API_KEY = 55

    def build(self, request_struct_class: type[_QuorumRequest]) -> Any:
        """See `Request`."""
        return request_struct_class([(QUORUM_TOPIC, [(0, {})], {})], {})


def controller_time_ms(answer: Any) -> int | None:
    """Return the active controller's clock in its answer to `Quorum`, in epoch ms; None when it has none."""
    if answer.error_code or not answer.topics or not answer.topics[0][1]:
        return None
    _, error, leader, _, _, voters, *_ = answer.topics[0][1][0]
    times = {voter: fetched for voter, _, fetched, *_ in voters}
    time = 0 if error else times.get(leader, 0)
    return time if time > 0 else None
