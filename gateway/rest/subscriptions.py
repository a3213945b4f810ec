"""What a consumer reads: subscriptions, assignments, positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import web
from aiokafka import TopicPartition

from gateway.kafka.member import NotAssignedError
from gateway.kafka.publisher import Publisher
from gateway.rest.access import forbidden
from gateway.rest.answers import control_answer, no_content
from gateway.rest.call import Call, Handler, Module
from gateway.rest.consumers import Consumers
from gateway.security.authorization import Grant
from protocols.rest.consuming import Partition, decode_offsets, decode_partitions, decode_subscription
from protocols.rest.errors import RestError, not_found
from protocols.rest.responses import encode

EXCLUSIVE = "Subscriptions to topics, partitions, and patterns are mutually exclusive."


class Subscriptions(Module):
    """The operations under a consumer instance that choose what it reads and from where."""

    def __init__(self, consumers: Consumers, publisher: Publisher) -> None:
        """`publisher` looks topics up, and creates them where the policy allows."""
        self._consumers = consumers
        self._publisher = publisher

    def operations(self) -> Mapping[str, Handler]:
        """See `Module`."""
        return {
            "subscribe": self.subscribe,
            "listSubscriptions": self.list_subscriptions,
            "unsubscribe": self.unsubscribe,
            "assign": self.assign,
            "seek": self.seek,
            "seekToBeginning": self.seek_to_beginning,
            "seekToEnd": self.seek_to_end,
        }

    async def subscribe(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../subscription`; answered when the group has given out its partitions, or a little later."""
        instance = self._consumers.find(call.grant, group, name)
        topics = decode_subscription(await call.body())
        member = instance.member
        if member.is_manual:
            raise RestError(409, EXCLUSIVE)
        if not topics:
            member.unsubscribe()
            return no_content()
        for topic in topics:
            await self._check_readable(call.grant, topic)
        if tuple(topics) != member.topics:
            await member.subscribe(topics)
        return no_content()

    async def list_subscriptions(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`GET .../subscription`."""
        member = self._consumers.find(call.grant, group, name).member
        partitions: dict[str, list[int]] = {}
        for partition in member.assignment():
            partitions.setdefault(partition.topic, []).append(partition.partition)
        return control_answer(
            encode(
                {
                    "topics": sorted(member.topics) or list(partitions),
                    "partitions": [{topic: numbers} for topic, numbers in partitions.items()],
                }
            )
        )

    async def unsubscribe(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`DELETE .../subscription`: subscriptions and assignments alike."""
        self._consumers.find(call.grant, group, name).member.unsubscribe()
        return no_content()

    async def assign(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../assignments`."""
        instance = self._consumers.find(call.grant, group, name)
        wanted = decode_partitions(await call.body())
        member = instance.member
        if member.topics:
            raise RestError(409, EXCLUSIVE)
        if not wanted:
            member.unsubscribe()
            return no_content()
        for entry in wanted:
            if entry.partition >= await self._check_readable(call.grant, entry.topic):
                raise not_found(f"Topic {entry.topic} has no partition {entry.partition}")
        await member.assign(_partitions(wanted))
        return no_content()

    async def seek(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../positions`."""
        instance = self._consumers.find(call.grant, group, name)
        wanted = decode_offsets(await call.body())
        try:
            instance.member.seek({TopicPartition(entry.topic, entry.partition): entry.offset for entry in wanted})
        except NotAssignedError as error:
            raise not_found(str(error)) from error
        return no_content()

    async def seek_to_beginning(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../positions/beginning`."""
        return await self._seek_to_edge(call, group, name, end=False)

    async def seek_to_end(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../positions/end`."""
        return await self._seek_to_edge(call, group, name, end=True)

    async def _seek_to_edge(self, call: Call, group: str, name: str, *, end: bool) -> web.StreamResponse:
        instance = self._consumers.find(call.grant, group, name)
        wanted = decode_partitions(await call.body())
        try:
            await instance.member.seek_to_edge(_partitions(wanted), end=end)
        except NotAssignedError as error:
            raise not_found(str(error)) from error
        return no_content()

    async def _check_readable(self, grant: Grant, topic: str) -> int:
        """The topic's partitions; RestError 403, or Refused for one that is not there."""
        if not grant.subscribe.whole_topic(topic):
            raise forbidden(f"subscribe to {topic}")
        return (await self._publisher.topic(topic)).partitions


def _partitions(entries: Sequence[Partition]) -> list[TopicPartition]:
    return [TopicPartition(entry.topic, entry.partition) for entry in entries]
