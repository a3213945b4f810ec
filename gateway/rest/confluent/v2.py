"""The dialect of Confluent's REST proxy version 2 and of Karapace, with its own operations and error codes.

Consumers, subscriptions and topics are those of the Strimzi dialect. This module has the differences, with tables in
`protocols.rest.confluent`: error codes, a consumer's settings, the meaning of a committed offset, and the operations
that Strimzi's bridge does not have.
"""

from __future__ import annotations

from functools import partial

from aiohttp import web
from aiokafka import TopicPartition

from gateway.kafka.groups.refusals import NotAssignedError
from gateway.rest.parts import RestParts
from gateway.rest.produce.tickets import check_place, raise_common_failure, store
from gateway.rest.server.answers import control_answer, error_answer, no_content
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_login import forbidden
from mapping.confluent import without_headers
from mapping.rest.incoming import to_records
from mapping.tenants import Names
from protocols.rest.confluent import (
    NO_REGISTRY,
    SCHEMA_TYPES,
    decode_commit,
    decode_consumer,
    decode_positions,
    epoch_ms,
    message,
    number,
    poll_query,
    produce_results,
)
from protocols.rest.consuming import PollLimits, decode_partitions
from protocols.rest.errors import Fault, RestError
from protocols.rest.media import CONTROL_TYPE, FORMATS, body_type
from protocols.rest.responses import ErrorBody, encode
from protocols.rest.routes import PREFIX


class ConfluentV2(OperationSet):
    """The operations below `/v2`; with `http.dialect` also at their own paths without that prefix."""

    def __init__(self, rest: RestParts) -> None:
        self._config = rest.services.config
        self._publisher = rest.services.publisher
        self._lookup = rest.services.lookup
        self._overload = rest.overload
        self._consumers = rest.consumers
        self._subscriptions = rest.subscriptions
        self._topics = rest.topics
        self.operations = {
            "v2ListTopics": rest.topics.list_topics,
            "v2GetTopic": rest.topics.get_topic,
            "v2ListPartitions": rest.topics.list_partitions,
            "v2GetPartition": rest.topics.get_partition,
            "v2GetOffsets": rest.topics.get_offsets,
            "v2ListBrokers": self.list_brokers,
            "v2Send": self.send,
            "v2SendToPartition": self.send,
            "v2CreateConsumer": self.create,
            "v2DeleteConsumer": rest.consumers.delete,
            "v2Subscribe": rest.subscriptions.subscribe,
            "v2ListSubscriptions": self.list_subscriptions,
            "v2Unsubscribe": rest.subscriptions.unsubscribe,
            "v2Assign": rest.subscriptions.assign,
            "v2ListAssignments": self.list_assignments,
            "v2Poll": self.poll,
            "v2Committed": self.committed,
            "v2Commit": self.commit,
            "v2Seek": self.seek,
            "v2SeekToBeginning": partial(rest.subscriptions.seek_to_edge, end=False),
            "v2SeekToEnd": partial(rest.subscriptions.seek_to_edge, end=True),
        }

    def refuse(self, error: RestError) -> web.Response:
        """Return the answer to a refused request, with an error code of five digits."""
        return refusal_answer(error, CONTROL_TYPE)

    # Producing

    async def send(self, call: Call, topic: str, partition: int | None = None) -> web.StreamResponse:
        """`POST /v2/topics/{topicname}`, and `POST /v2/topics/{topicname}/partitions/{partitionid}`."""
        grant, fields = call.grant, call.request.headers
        media = body_type(fields.get("Content-Type"), (*FORMATS, *SCHEMA_TYPES))
        if media in SCHEMA_TYPES:
            raise RestError(422, NO_REGISTRY, fault=Fault.SCHEMA, close=True)
        if not grant.publish.some(topic):
            raise forbidden(f"publish to {topic}")
        embedded = FORMATS[media]
        with call.enter(self._overload, topic) as slot:
            await check_place(self._publisher, topic, partition, grant.identity.name)
            body = await call.body()
            records = to_records(
                body,
                embedded,
                topic=topic,
                partition=partition,
                limit=self._config.max_records,
                principal=grant.identity.name,
                trace=call.begin_publish(topic),
            )
            slot.count_records(len(records), len(body))
            if not records:
                return control_answer(encode(produce_results(())))
            storing = store(self._publisher, grant, records)
            del records, body  # for the same reason as in `store`
            ticket = await storing
        raise_common_failure(ticket)
        return control_answer(encode(produce_results(ticket.results)))

    # Consumers

    async def create(self, call: Call, group: str) -> web.StreamResponse:
        """`POST /v2/consumers/{groupid}`."""
        try:
            wanted = decode_consumer(await call.body())
        except RestError as error:
            if not error.validation_errors:
                raise
            raise RestError(
                422,
                f"Invalid consumer configuration: {error.validation_errors[0]}",
                validation_errors=error.validation_errors,
                fault=Fault.CONSUMER_CONFIG,
            ) from error
        under = f"/{PREFIX}" if call.request.raw_path.startswith(f"/{PREFIX}/") else ""
        created = await self._consumers.add(call, group, wanted.create, under)
        self._consumers.find(call.grant, group, created.instance_id).wait_ms = wanted.wait_ms
        return control_answer(encode(created))

    async def list_subscriptions(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`GET .../subscription`."""
        member = self._consumers.find(call.grant, group, name).member
        return control_answer(encode({"topics": sorted(map(call.grant.names.own, member.topics))}))

    async def list_assignments(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`GET .../assignments`."""
        member = self._consumers.find(call.grant, group, name).member
        items = [_partition_item(entry, call.grant.names) for entry in member.assignment()]
        return control_answer(encode({"partitions": items}))

    async def poll(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`GET .../records`."""
        instance = self._consumers.find(call.grant, group, name)
        default = PollLimits(instance.wait_ms, self._config.poll_max_bytes)
        return await self._consumers.read(call, instance, poll_query(call.query), default, without_headers)

    async def commit(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../offsets`: the body has the offset of the last consumed record; Kafka gets the next offset."""
        await self._consumers.commit_offsets(call, group, name, decode_commit)
        return control_answer(b"{}")

    async def committed(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`GET .../offsets`, with the partitions in the body."""
        member, names = self._consumers.find(call.grant, group, name).member, call.grant.names
        body = await call.body()
        wanted = member.assignment()
        if body:
            wanted = [TopicPartition(names.topic(entry.topic), entry.partition) for entry in decode_partitions(body)]
        for topic in {entry.topic for entry in wanted}:
            if not call.grant.subscribe.some(topic):
                raise forbidden(f"inspect {topic}")
        positions = await member.committed(wanted)
        offsets = [
            {**_partition_item(entry, names), "offset": positions[entry].offset, "metadata": positions[entry].metadata}
            for entry in dict.fromkeys(wanted)
            if entry in positions
        ]
        return control_answer(encode({"offsets": offsets}))

    async def seek(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../positions`: seeks to offsets, or to the first records that are not older than a timestamp."""
        member, topic = self._consumers.find(call.grant, group, name).member, call.grant.names.topic
        wanted = decode_positions(await call.body())
        offsets = {TopicPartition(topic(entry.topic), entry.partition): entry.offset for entry in wanted.offsets}
        times = {
            TopicPartition(topic(entry.topic), entry.partition): epoch_ms(entry.timestamp)
            for entry in wanted.timestamps
        }
        foreign = times.keys() - set(member.assignment())
        if foreign:
            raise NotAssignedError(foreign)
        if times:
            offsets |= await self._lookup.ends(times.keys())  # for partitions without such a record
        for timestamp in set(times.values()):
            offsets |= await self._lookup.since([entry for entry in times if times[entry] == timestamp], timestamp)
        member.seek(offsets)
        return no_content()

    async def list_brokers(self, call: Call) -> web.StreamResponse:
        """`GET /v2/brokers`."""
        cluster = await self._topics.cluster()
        return control_answer(encode({"brokers": sorted(broker["node_id"] for broker in cluster["brokers"])}))


def refusal_answer(error: RestError, media: str) -> web.Response:
    """Make an error answer with Confluent's status and error code."""
    status, code = number(error)
    return error_answer(error, encode(ErrorBody(code, message(error), error.validation_errors)), status, media)


def _partition_item(partition: TopicPartition, names: Names) -> dict[str, object]:
    return {"topic": names.own(partition.topic), "partition": partition.partition}
