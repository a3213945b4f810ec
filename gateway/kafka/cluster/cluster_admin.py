"""Administration of groups and topics, over a connection that belongs to no producer and no consumer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import aiokafka.errors as kafka_errors
import msgspec
import structlog
from aiokafka import TopicPartition
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.protocol.admin import AlterConfigsResponse_v0, DeleteGroupsRequest
from aiokafka.protocol.types import Array, Boolean, Int8, Schema, String
from aiokafka.structs import OffsetAndMetadata

from gateway.kafka.cluster.error_verdicts import DENIALS
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.admin_client import AdminClient
from gateway.kafka.driver.kafka_consumer import ConsumerOptions
from gateway.kafka.driver.lifecycle import OnDemand
from gateway.kafka.driver.wire import FixedRequest
from gateway.runtime.spawn import Spawn
from mapping.outcomes import Outcome

log = structlog.get_logger(__name__)

TIMEOUT_S = 10.0
RETRY_S: Final = 0.1
DEAD: Final = "Dead"  # the state of a group that does not exist
T = TypeVar("T")
P = ParamSpec("P")

_MOVING: Final = (
    kafka_errors.GroupCoordinatorNotAvailableError,
    kafka_errors.GroupLoadInProgressError,
    kafka_errors.NotCoordinatorForGroupError,
)
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


class _IncrementalAlterConfigs(FixedRequest):
    """Changes single entries (KIP-339). aiokafka has only AlterConfigs, which resets every entry that is not named."""

    API_KEY = 44
    API_VERSION = 0
    RESPONSE_TYPE = AlterConfigsResponse_v0
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


def _request(
    ask: Callable[Concatenate[ClusterAdmin, AdminClient, P], Awaitable[T]],
) -> Callable[Concatenate[ClusterAdmin, P], Coroutine[Any, Any, T]]:
    """Decorate a request with the client, a time limit and the translation of its errors.

    It is repeated while a group has no coordinator: the first request for one makes Kafka create `__consumer_offsets`.
    """

    @functools.wraps(ask)
    async def asked(admin: ClusterAdmin, /, *arguments: P.args, **options: P.kwargs) -> T:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    try:
                        return await ask(admin, await admin._client.get(), *arguments, **options)
                    except _MOVING:
                        await asyncio.sleep(RETRY_S)
        except DENIALS as error:
            raise Refused(Outcome.DENIED, f"{error!r}") from error
        except (TimeoutError, kafka_errors.KafkaError) as error:
            raise Refused(Outcome.BUSY, f"Kafka does not answer: {error!r}") from error

    return asked


class ClusterAdmin:
    """Administration. Every method may raise Refused: DENIED by Kafka's ACLs, or BUSY when Kafka does not answer."""

    def __init__(self, kafka: ConsumerOptions, spawn: Spawn) -> None:
        """Connect with the first request; `spawn` starts background tasks."""
        options = {name: value for name, value in kafka.items() if name != "client_rack"}  # only for consumers
        self._client: OnDemand[AdminClient] = OnDemand(
            lambda: AdminClient(**options), lambda client: client.start(), spawn
        )

    async def stop(self) -> None:
        """Close the connection."""
        await self._client.stop()

    @_request
    async def cluster(self, client: AdminClient) -> dict[str, Any]:
        """Return Kafka's description of its cluster: `cluster_id`, `controller_id`, `brokers`."""
        described: dict[str, Any] = await client.describe_cluster()
        return described

    @_request
    async def groups(self, client: AdminClient) -> list[str]:
        """Return the names of all groups, sorted."""
        return sorted(name for name, *_ in await client.list_consumer_groups())

    @_request
    async def group(self, client: AdminClient, name: str) -> GroupView:
        """Describe a group. The state of an unknown group is `DEAD`, unlike that of one with commits and no members."""
        (response,) = await client.describe_consumer_groups([name])
        code, _, state, protocol_type, protocol, members, *_ = response.groups[0]
        _check(code, f"group {name}")
        return GroupView(state, protocol_type, protocol, tuple(_member(*member[:5]) for member in members))

    @_request
    async def committed(self, client: AdminClient, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return a group's committed offsets; none when the group does not exist."""
        offsets = await client.list_consumer_group_offsets(group)
        return {partition: offset for partition, offset in offsets.items() if offset.offset >= 0}

    @_request
    async def delete_group(self, client: AdminClient, group: str, topic: str) -> bool:
        """Delete a group that has committed offsets in `topic` and in no other topic.

        Returns:
            False when the group is kept: it has members, or reads other topics too.
        """
        coordinator = await client.find_coordinator(group)
        offsets = await client.list_consumer_group_offsets(group, coordinator)
        if {partition.topic for partition in offsets} - {topic}:
            return False
        response = await client.request(DeleteGroupsRequest([group]), coordinator)
        ((_, code),) = response.results
        kind = kafka_errors.for_code(code)
        if kind is kafka_errors.NonEmptyGroup:
            return False
        if code and kind is not kafka_errors.GroupIdNotFound:
            raise kind(group)
        log.info("a group was deleted", group=group)
        return True

    @_request
    async def topic(self, client: AdminClient, name: str) -> dict[str, Any]:
        """Return aiokafka's description of a topic, with its replicas: `error_code`, `partitions`."""
        (described,) = await client.describe_topics([name])
        return dict(described)

    @_request
    async def configs(self, client: AdminClient, topic: str) -> list[ConfigEntry]:
        """Return a topic's configuration, sorted by name. Raises Refused (UNKNOWN_TOPIC) if there is no such topic."""
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

    @_request
    async def alter(self, client: AdminClient, topic: str, changes: Mapping[str, str | None]) -> None:
        """Change a topic's configuration, all entries or none; None resets an entry to the default.

        Raises:
            Refused: UNFIT (unknown entry or illegal value), UNKNOWN_TOPIC, DENIED, BUSY.
        """
        entries = [(name, _DELETE if value is None else _SET, value) for name, value in changes.items()]
        resources = [(int(ConfigResourceType.TOPIC), topic, entries)]
        response = await client.request(_IncrementalAlterConfigs(resources, False))
        ((code, message, _, _),) = response.resources
        _check(code, message or f"topic {topic}")

    @_request
    async def delete_topic(self, client: AdminClient, topic: str) -> None:
        """Delete a topic with its records. Raises Refused (UNKNOWN_TOPIC) when there is no such topic."""
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
