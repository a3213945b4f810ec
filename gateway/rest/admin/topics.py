"""Shows topics to HTTP clients: names, configuration, partitions, offsets. Internal topics are hidden."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from aiokafka import TopicPartition

from gateway.kafka.contracts import Refused
from gateway.rest.server.answers import control_answer
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.security.rights.authorization import Grant
from mapping.outcomes import Outcome
from mapping.record import is_topic_name
from protocols.rest.admin import decode_topic
from protocols.rest.errors import Fault, RestError, not_found
from protocols.rest.responses import encode


class TopicOperations(OperationSet):
    """The operations that show topics, and the one that creates them."""

    def __init__(self, services: RestServices) -> None:
        self._topics = services.topics
        self._lookup = services.lookup
        self._admin = services.groups.admin
        self.operations = {
            "listTopics": self.list_topics,
            "getTopic": self.get_topic,
            "listPartitions": self.list_partitions,
            "getPartition": self.get_partition,
            "getOffsets": self.get_offsets,
            "createTopic": self.create_topic,
        }

    async def list_topics(self, call: Call) -> web.StreamResponse:
        """`GET /topics`: the topics that this client may read or write."""
        return control_answer(encode(list(map(call.grant.names.own, await self._readable(call.grant)))))

    async def get_topic(self, call: Call, topic: str) -> web.StreamResponse:
        """`GET /topics/{topicname}`."""
        partitions = await self.partitions(call.grant, topic)
        configs = await self._configs(topic)
        name = call.grant.names.own(topic)
        return control_answer(encode({"name": name, "configs": configs, "partitions": partitions}))

    async def list_partitions(self, call: Call, topic: str) -> web.StreamResponse:
        """`GET /topics/{topicname}/partitions`."""
        return control_answer(encode(await self.partitions(call.grant, topic)))

    async def get_partition(self, call: Call, topic: str, partition: int) -> web.StreamResponse:
        """`GET /topics/{topicname}/partitions/{partitionid}`."""
        return control_answer(encode(await self._partition(call.grant, topic, partition)))

    async def get_offsets(self, call: Call, topic: str, partition: int) -> web.StreamResponse:
        """`GET /topics/{topicname}/partitions/{partitionid}/offsets`."""
        await self._partition(call.grant, topic, partition)  # 404 if it does not exist
        where = TopicPartition(topic, partition)
        first = await self._lookup.beginnings([where])
        end = await self._lookup.ends([where])
        return control_answer(encode({"beginning_offset": first[where], "end_offset": end[where]}))

    async def create_topic(self, call: Call) -> web.StreamResponse:
        """`POST /admin/topics`."""
        wanted = decode_topic(await call.body())
        whole = call.grant.names.topic(wanted.name)
        if not call.grant.may_administer("create", whole):
            raise forbidden(f"create {wanted.name}")
        if not await self._topics.create(whole, wanted.partitions, wanted.replication, call.grant.identity.name):
            raise RestError(409, f"Topic {wanted.name} exists already")
        call.audit_change("create topic", wanted.name)
        return control_answer(b"{}", 201)

    async def overview(self, grant: Grant) -> list[tuple[str, int, int]]:
        """Return name, partition count and replication factor of the topics that a client may read or write, sorted.

        Raises:
            Refused: Kafka does not answer.
        """
        names = await self._readable(grant)
        if not names:
            return []
        queries = self._topics.queries
        described = await queries.wait_for(queries.describe(names))
        return sorted(
            (name, len(topic.leaders), topic.copies)
            for name, topic in described.items()
            if not isinstance(topic, Refused) and topic.leaders
        )

    async def cluster(self) -> dict[str, Any]:
        """Return Kafka's description of the cluster."""
        return await self._admin.cluster()

    async def _readable(self, grant: Grant) -> list[str]:
        """Return the existing topics that the client may read or write, sorted. Asks Kafka."""
        await self._topics.refresh()
        return grant.visible_topics(sorted(self._topics.names))

    async def _partition(self, grant: Grant, topic: str, partition: int) -> dict[str, Any]:
        for view in await self.partitions(grant, topic):
            if view["partition"] == partition:
                return view
        raise not_found(f"Topic {topic} has no partition {partition}", Fault.PARTITION)

    async def partitions(self, grant: Grant, topic: str) -> list[dict[str, Any]]:
        """Return a topic's partitions in order, as the contract shows them.

        Raises:
            Refused: Kafka does not answer.
            RestError: 403, or 404 if the topic does not exist.
        """
        if not grant.visible_topics([topic]):
            raise forbidden(f"inspect {topic}")
        if not is_topic_name(topic):
            raise not_found(f"Topic {topic[:64]} not found", Fault.TOPIC)
        if topic not in self._topics.names:  # asking the broker for an unknown topic could create it
            await self._topics.refresh()
            if topic not in self._topics.names:
                raise not_found(f"Topic {topic} not found", Fault.TOPIC)
        described = await self._admin.topic(topic)
        if described["error_code"] or not described["partitions"]:
            raise not_found(f"Topic {topic} not found", Fault.TOPIC)
        return [_view(partition) for partition in sorted(described["partitions"], key=lambda one: one["partition"])]

    async def _configs(self, topic: str) -> dict[str, str | None]:
        """Return a topic's configuration; empty if Kafka does not allow it."""
        try:
            return {entry.name: entry.value for entry in await self._admin.configs(topic)}
        except Refused as refused:
            if refused.outcome is Outcome.BUSY:
                raise
            return {}


def _view(partition: dict[str, Any]) -> dict[str, Any]:
    leader, in_sync = partition["leader"], partition["isr"]
    return {
        "partition": partition["partition"],
        "leader": leader,
        "replicas": [
            {"broker": broker, "leader": broker == leader, "in_sync": broker in in_sync}
            for broker in partition["replicas"]
        ],
    }
