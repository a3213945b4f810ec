"""Administration of consumer groups without being a member: their committed offsets, listing and deletion."""

from __future__ import annotations

import logging
from typing import Final

import aiokafka.errors as kafka_errors
from aiokafka.protocol.admin import DeleteGroupsRequest
from aiokafka.structs import OffsetAndMetadata

from gateway.kafka.cluster.admin_connection import AdminConnection, admin_request

log = logging.getLogger(__name__)

DEAD: Final = "Dead"  # the state of a group that does not exist


class GroupAdmin(AdminConnection):
    """Every request raises Refused: DENIED, or BUSY when Kafka does not answer."""

    @admin_request
    async def topics(self, group: str) -> frozenset[str]:
        """Return the topics in which a group has committed offsets; empty when the group does not exist."""
        client = await self.open()
        return frozenset(partition.topic for partition in await client.list_consumer_group_offsets(group))

    @admin_request
    async def positions(self, group: str, topic: str) -> dict[int, OffsetAndMetadata]:
        """Return a group's committed offsets in a topic, by partition."""
        client = await self.open()
        stored = await client.list_consumer_group_offsets(group)
        return {tp.partition: offset for tp, offset in stored.items() if tp.topic == topic}

    @admin_request
    async def delete(self, group: str, topic: str) -> bool:
        """Delete a group that has committed offsets in `topic` and in no other topic.

        Returns:
            False when the group is kept: it has members, or reads other topics too.
        """
        client = await self.open()
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
        log.info("deleted group %s", group)
        return True

    @admin_request
    async def exists(self, group: str) -> bool:
        """Whether a group exists: it has members, or committed offsets that have not expired."""
        client = await self.open()
        (response,) = await client.describe_consumer_groups([group])
        code, _, state, *_ = response.groups[0]
        if code:
            raise kafka_errors.for_code(code)(group)
        return bool(state != DEAD)

    @admin_request
    async def names(self) -> frozenset[str]:
        """Return the names of all groups."""
        client = await self.open()
        return frozenset(name for name, *_ in await client.list_consumer_groups())
