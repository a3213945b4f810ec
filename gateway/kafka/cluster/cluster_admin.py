"""Administration: list and describe groups, their committed offsets, topics' configuration, deletion of topics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import aiokafka.errors as kafka_errors
import msgspec
from aiokafka import TopicPartition
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Int8, Int16, Int32, Schema, String

from gateway.kafka.cluster.admin_connection import AdminConnection, admin_request
from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome

_TOPIC_SOURCE: Final = 1  # DescribeConfigs' config_source: set for this topic
_SET: Final = 0  # IncrementalAlterConfigs' config_operation
_DELETE: Final = 1
_UNFIT: Final = (
    kafka_errors.InvalidConfigurationError,
    kafka_errors.InvalidRequestError,
    kafka_errors.PolicyViolationError,
)


class GroupMember(msgspec.Struct, frozen=True):
    """A group member and its assigned partitions."""

    member_id: str
    client_id: str
    host: str
    partitions: tuple[TopicPartition, ...]


class GroupView(msgspec.Struct, frozen=True):
    """A group as its coordinator describes it."""

    state: str
    protocol_type: str
    protocol: str
    members: tuple[GroupMember, ...]


class ConfigEntry(msgspec.Struct, frozen=True):
    """An entry of a topic's configuration; `value` is None when it is secret."""

    name: str
    value: str | None
    is_default: bool
    read_only: bool
    sensitive: bool


class _IncrementalAlterConfigsResponse(Response):  # type: ignore[misc]  # aiokafka has no types
    API_KEY = 44
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "responses",
            Array(
                ("error_code", Int16),
                ("error_message", String("utf-8")),
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
            ),
        ),
    )


class _IncrementalAlterConfigsStruct(RequestStruct):  # type: ignore[misc]
    API_KEY: ClassVar[int] = 44
    API_VERSION: ClassVar[int] = 0
    RESPONSE_TYPE = _IncrementalAlterConfigsResponse
    SCHEMA = Schema(
        (
            "resources",
            Array(
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
                (
                    "configs",
                    Array(("name", String("utf-8")), ("config_operation", Int8), ("value", String("utf-8"))),
                ),
            ),
        ),
        ("validate_only", Boolean),
    )


class IncrementalAlterConfigs(Request[_IncrementalAlterConfigsStruct]):  # type: ignore[misc]
    """Changes single entries (KIP-339). aiokafka has only AlterConfigs, which resets every entry that is not named."""

    API_KEY = 44

    def __init__(self, topic: str, changes: Mapping[str, str | None]) -> None:
        """`changes` has new values by name; None resets to the default."""
        self._topic = topic
        self._entries = [(name, _DELETE if value is None else _SET, value) for name, value in changes.items()]

    def build(self, request_struct_class: type[_IncrementalAlterConfigsStruct]) -> _IncrementalAlterConfigsStruct:
        """See `Request`."""
        return request_struct_class([(int(ConfigResourceType.TOPIC), self._topic, self._entries)], False)


class ClusterAdmin(AdminConnection):
    """Administration. Every method may raise Refused: DENIED by Kafka's ACLs, or BUSY when Kafka does not answer."""

    @admin_request
    async def groups(self) -> list[str]:
        """Return the names of all groups, sorted."""
        client = await self.open()
        return sorted(name for name, _ in await client.list_consumer_groups())

    @admin_request
    async def group(self, name: str) -> GroupView:
        """Describe a group. The state of an unknown group is `DEAD`."""
        client = await self.open()
        (response,) = await client.describe_consumer_groups([name])
        code, _, state, protocol_type, protocol, members, *_ = response.groups[0]
        _check(code, f"group {name}")
        return GroupView(state, protocol_type, protocol, tuple(_member(*member[:5]) for member in members))

    @admin_request
    async def committed(self, group: str) -> dict[TopicPartition, int]:
        """Return a group's committed offsets."""
        client = await self.open()
        found = await client.list_consumer_group_offsets(group)
        return {partition: place.offset for partition, place in found.items() if place.offset >= 0}

    @admin_request
    async def configs(self, topic: str) -> list[ConfigEntry]:
        """Return a topic's configuration, sorted by name. Raises Refused (UNKNOWN_TOPIC) if there is no such topic."""
        client = await self.open()
        (response,) = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        ((code, _, _, _, entries),) = response.resources
        _check(code, f"topic {topic}")
        return sorted(
            (
                ConfigEntry(name, value, source != _TOPIC_SOURCE, read_only, sensitive)
                for name, value, read_only, source, sensitive, *_ in entries
            ),
            key=lambda entry: entry.name,
        )

    @admin_request
    async def alter(self, topic: str, changes: Mapping[str, str | None]) -> None:
        """Change a topic's configuration, all entries or none; None resets an entry to the default.

        Raises:
            Refused: UNFIT (unknown entry or illegal value), UNKNOWN_TOPIC, DENIED, BUSY.
        """
        client = await self.open()
        response = await client.request(IncrementalAlterConfigs(topic, changes))
        ((code, message, _, _),) = response.responses
        _check(code, message or f"topic {topic}")

    @admin_request
    async def delete_topic(self, topic: str) -> None:
        """Delete a topic with its records. Raises Refused (UNKNOWN_TOPIC) when there is no such topic."""
        client = await self.open()
        response = await client.delete_topics([topic])
        ((_, code),) = response.topic_error_codes
        _check(code, f"topic {topic}")


def _member(member_id: str, client_id: str, host: str, _metadata: bytes, assignment: bytes) -> GroupMember:
    partitions: Any = ()
    if assignment:
        try:
            partitions = ConsumerProtocolMemberAssignment.decode(assignment).partitions()
        except (ValueError, TypeError):  # TypeError: a null array
            partitions = ()  # another group protocol than "consumer", such as Kafka Connect's
    return GroupMember(member_id, client_id, host, tuple(partitions))


def _check(code: int, subject: str) -> None:
    """Raise the exception for a broker's error code; do nothing for 0."""
    if not code:
        return
    kind = kafka_errors.for_code(code)
    if kind is kafka_errors.UnknownTopicOrPartitionError:
        raise Refused(Outcome.UNKNOWN_TOPIC, f"{subject} does not exist")
    if kind in _UNFIT:
        raise Refused(Outcome.UNFIT, subject)
    raise kind(subject)
