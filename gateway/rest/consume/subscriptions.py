"""The operations for a consumer's subscriptions, assignments and positions."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from aiohttp import web
from aiokafka import TopicPartition

from gateway.kafka.contracts import Refused
from gateway.rest.consume.instances import Consumers, Instance
from gateway.rest.server.answers import control_answer, no_content
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.security.authorization import Grant
from mapping.tenants import Names
from protocols.rest.consuming import (
    EXCLUSIVE,
    Partition,
    TopicPattern,
    decode_offsets,
    decode_partitions,
    decode_subscription,
)
from protocols.rest.errors import Fault, RestError, not_found
from protocols.rest.responses import encode

log = structlog.get_logger(__name__)


class Subscriptions(OperationSet):
    """The operations that set what a consumer reads and from where. Missing topics are created if the policy allows."""

    def __init__(self, consumers: Consumers, services: RestServices) -> None:
        self._consumers = consumers
        self._publisher = services.publisher
        self._topics = services.topics
        self._spawn = services.spawn
        self._following = False  # whether `_topics_changed` is registered with `Topics`
        services.access_list.watch(lambda _: self._topics_changed())
        self.operations = {
            "subscribe": self.subscribe,
            "listSubscriptions": self.list_subscriptions,
            "unsubscribe": self.unsubscribe,
            "assign": self.assign,
            "seek": self.seek,
            "seekToBeginning": self.seek_to_beginning,
            "seekToEnd": self.seek_to_end,
        }

    async def subscribe(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../subscription`; answered when the group has assigned its partitions, or a little later."""
        instance = self._consumers.find(call.grant, group, name)
        wanted = decode_subscription(await call.body())
        member = instance.member
        if member.is_manual:
            raise RestError(409, EXCLUSIVE, fault=Fault.EXCLUSIVE)
        if wanted.topic_pattern is not None:
            if member.is_subscribed and instance.pattern is None:
                raise RestError(409, EXCLUSIVE, fault=Fault.EXCLUSIVE)
            await self._subscribe_pattern(instance, TopicPattern(wanted.topic_pattern))
            return no_content()
        topics = tuple(dict.fromkeys(map(call.grant.names.topic, wanted.topics or ())))
        if topics and instance.pattern is not None:
            raise RestError(409, EXCLUSIVE, fault=Fault.EXCLUSIVE)
        if not topics:
            instance.pattern = None
            member.unsubscribe()
            return no_content()
        for topic in topics:
            await self._check_readable(call.grant, topic)
        if topics != member.topics:
            await member.subscribe(topics)
        return no_content()

    async def _subscribe_pattern(self, instance: Instance, pattern: TopicPattern) -> None:
        """Subscribe to the topics that match now; the subscription follows topics that are created and deleted."""
        if not self._following:
            self._following = True
            self._topics.watch(self._topics_changed)
        try:
            await self._topics.refresh()
        except Refused:
            log.info("topics not refreshed; the pattern uses the known ones", pattern=pattern.text)
        instance.pattern = pattern
        await instance.member.subscribe(self._matching(instance, pattern))

    def _matching(self, instance: Instance, pattern: TopicPattern) -> tuple[str, ...]:
        names, readable = instance.grant.names, instance.grant.subscribe.whole_topic
        there = sorted(filter(names.has, self._topics.names))
        return tuple(topic for topic in there if pattern.matches(names.own(topic)) and readable(topic))

    def _topics_changed(
        self, appeared: frozenset[str] = frozenset(), disappeared: frozenset[str] = frozenset()
    ) -> None:
        for instance in self._consumers.with_patterns():
            assert instance.pattern is not None
            topics = self._matching(instance, instance.pattern)
            if topics != instance.member.topics:
                self._spawn(self._follow(instance, topics))

    async def _follow(self, instance: Instance, topics: tuple[str, ...]) -> None:
        if instance.closed or instance.pattern is None:
            return
        try:
            await instance.member.subscribe(topics)
        except Refused as refused:
            log.info("subscription to a pattern not updated", group=instance.group, reason=refused.reason)

    async def list_subscriptions(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`GET .../subscription`."""
        member, own = self._consumers.find(call.grant, group, name).member, call.grant.names.own
        partitions: dict[str, list[int]] = {}
        for partition in member.assignment():
            partitions.setdefault(own(partition.topic), []).append(partition.partition)
        return control_answer(
            encode(
                {
                    "topics": sorted(map(own, member.topics)) or list(partitions),
                    "partitions": [{topic: numbers} for topic, numbers in partitions.items()],
                }
            )
        )

    async def unsubscribe(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`DELETE .../subscription`: ends subscriptions and assignments."""
        instance = self._consumers.find(call.grant, group, name)
        instance.pattern = None
        instance.member.unsubscribe()
        return no_content()

    async def assign(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../assignments`."""
        instance = self._consumers.find(call.grant, group, name)
        wanted = decode_partitions(await call.body())
        member = instance.member
        if member.is_subscribed:
            raise RestError(409, EXCLUSIVE, fault=Fault.EXCLUSIVE)
        if not wanted:
            member.unsubscribe()
            return no_content()
        names = call.grant.names
        for entry in wanted:
            if entry.partition >= await self._check_readable(call.grant, names.topic(entry.topic)):
                raise not_found(f"Topic {entry.topic} has no partition {entry.partition}", Fault.PARTITION)
        await member.assign(_partitions(wanted, names))
        return no_content()

    async def seek(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../positions`."""
        instance = self._consumers.find(call.grant, group, name)
        wanted = decode_offsets(await call.body())
        topic = call.grant.names.topic
        instance.member.seek({TopicPartition(topic(entry.topic), entry.partition): entry.offset for entry in wanted})
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
        await instance.member.seek_to_edge(_partitions(wanted, call.grant.names), end=end)
        return no_content()

    async def stop(self) -> None:
        """Stop following topics."""
        if self._following:
            self._topics.unwatch(self._topics_changed)

    async def _check_readable(self, grant: Grant, topic: str) -> int:
        """Return the topic's partition count; RestError 403, or Refused if the topic does not exist."""
        if not grant.subscribe.whole_topic(topic):
            raise forbidden(f"subscribe to {topic}")
        return (await self._publisher.topic(topic, principal=grant.identity.name)).partitions


def _partitions(entries: Sequence[Partition], names: Names) -> list[TopicPartition]:
    return [TopicPartition(names.topic(entry.topic), entry.partition) for entry in entries]
