"""The operations of administrators: consumer groups and their lag, configuration and deletion of topics.

They need the right `admin`, as does creating a topic. A client sees only those parts of a group that are about topics
that it administers. A rule for the group itself shows the client the whole group or nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from aiokafka import TopicPartition

from gateway.kafka.cluster.cluster_admin import DEAD
from gateway.rest.server.answers import control_answer, no_content
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.security.rights.authorization import Grant
from gateway.security.rights.permissions import Operation
from mapping.record import is_topic_name
from protocols.rest.admin import decode_changes
from protocols.rest.errors import not_found
from protocols.rest.responses import encode

_EVERYTHING = "#"


class Administration(OperationSet):
    """The operations."""

    def __init__(self, services: RestServices) -> None:
        self._admin = services.groups.admin
        self._lookup = services.lookup
        self._topics = services.topics
        self.operations = {
            "listGroups": self.list_groups,
            "getGroup": self.get_group,
            "getGroupLag": self.get_lag,
            "getTopicConfigs": self.get_configs,
            "alterTopicConfigs": self.alter_configs,
            "deleteTopic": self.delete_topic,
        }

    async def list_groups(self, call: Call) -> web.StreamResponse:
        """`GET /groups`."""
        if not call.grant.admin.whole(_EVERYTHING):
            raise forbidden("list the groups of all topics")
        grant = call.grant
        own = [grant.names.own(name) for name in await self._admin.groups() if grant.group("admin", name) is not False]
        return control_answer(encode(own))

    async def get_group(self, call: Call, group: str) -> web.StreamResponse:
        """`GET /groups/{groupid}`."""
        visible, own = _visible(call.grant, group), call.grant.names.own
        view = await self._admin.group(group)
        members = [
            {
                "member_id": member.member_id,
                "client_id": member.client_id,
                "host": member.host,
                "partitions": [
                    {"topic": own(partition.topic), "partition": partition.partition}
                    for partition in sorted(member.partitions)
                    if visible(partition.topic)
                ],
            }
            for member in view.members
        ]
        if not _sees_everything(call.grant, group):
            members = [member for member in members if member["partitions"]]
        if not members:
            await self._committed(call.grant, group, known=view.state != DEAD)
        shown = {
            "group": own(group),
            "state": view.state,
            "protocol_type": view.protocol_type,
            "protocol": view.protocol,
            "members": members,
        }
        return control_answer(encode(shown))

    async def get_lag(self, call: Call, group: str) -> web.StreamResponse:
        """`GET /groups/{groupid}/lag`."""
        committed, own = await self._committed(call.grant, group), call.grant.names.own
        ends = await self._lookup.ends(committed.keys(), existing=True)
        lags = {partition: max(0, end - committed[partition]) for partition, end in sorted(ends.items())}
        partitions = [
            {
                "topic": own(partition.topic),
                "partition": partition.partition,
                "committed_offset": committed[partition],
                "end_offset": ends[partition],
                "lag": lag,
            }
            for partition, lag in lags.items()
        ]
        return control_answer(encode({"group": own(group), "lag": sum(lags.values()), "partitions": partitions}))

    async def get_configs(self, call: Call, topic: str) -> web.StreamResponse:
        """`GET /admin/topics/{topicname}/configs`."""
        self._check(call.grant, "inspect", topic, "inspect the configuration of")
        return control_answer(encode(await self._admin.configs(topic)))

    async def alter_configs(self, call: Call, topic: str) -> web.StreamResponse:
        """`PATCH /admin/topics/{topicname}/configs`."""
        self._check(call.grant, "configure", topic, "configure")
        changes = decode_changes(await call.body())
        if changes:
            await self._admin.alter(topic, changes)
            call.audit_change("configure topic", topic)
        else:
            await self._admin.configs(topic)  # 404 if the topic does not exist
        return no_content()

    async def delete_topic(self, call: Call, topic: str) -> web.StreamResponse:
        """`DELETE /admin/topics/{topicname}`."""
        self._check(call.grant, "delete", topic, "delete")
        await self._admin.delete_topic(topic)
        call.audit_change("delete topic", topic)
        await self._topics.refresh()
        return no_content()

    @staticmethod
    def _check(grant: Grant, operation: Operation, topic: str, what: str) -> None:
        if not is_topic_name(topic):
            if topic.startswith("__"):
                raise forbidden(f"{what} an internal topic")
            raise not_found(f"Topic {topic[:64]} does not exist")
        if not grant.may_administer(operation, topic):
            raise forbidden(f"{what} {topic}")

    async def _committed(self, grant: Grant, group: str, *, known: bool = False) -> dict[TopicPartition, int]:
        """Return a group's committed offsets in topics that the client administers.

        With `known` the group exists even if it has committed nothing.

        Raises:
            RestError: 403 if the client administers no topic of the group; also if the group does not exist, unless the
                client administers everything. 404 if the group has no commits and no members.
        """
        visible = _visible(grant, group)
        committed = {
            partition: offset.offset
            for partition, offset in (await self._admin.committed(group)).items()
            if visible(partition.topic)
        }
        if not committed and not _sees_everything(grant, group):
            raise forbidden("inspect this group")
        if not committed and not known and (await self._admin.group(group)).state == DEAD:
            raise not_found(f"Group {group[:64]} does not exist")
        return committed


def _visible(grant: Grant, group: str) -> Callable[[str], bool]:
    """Return a predicate for the topics of a group that a client may see; RestError 403 if a rule forbids the group."""
    said = grant.group("admin", group)
    if said is False:
        raise forbidden("inspect this group")
    return lambda topic: (
        grant.names.has(topic) and (said is True or (is_topic_name(topic) and grant.admin.whole_topic(topic)))
    )


def _sees_everything(grant: Grant, group: str) -> bool:
    return grant.group("admin", group) is True or grant.admin.whole(_EVERYTHING)
