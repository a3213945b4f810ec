"""The operations for a consumer's subscriptions, assignments and positions."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial

import structlog
from aiohttp import web
from aiokafka import TopicPartition

from gateway.kafka.contracts import Refused
from gateway.rest.consume.instance import Instance
from gateway.rest.consume.instances import Consumers
from gateway.rest.server.answers import control_answer, no_content
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.security.rights.authorization import Grant
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


class ConsumerSubscriptions(OperationSet):
    """The operations that set what a consumer reads and from where. Missing topics are created if the policy allows."""

    def __init__(self, consumers: Consumers, services: RestServices) -> None:
        self._consumers = consumers
        self._publisher = services.publisher
        self._topics = services.topics
        self._spawn = services.spawn
        services.topics.watch(self._topics_changed)
        services.access_list.watch(self._rights_changed)
        self.operations = {
            "subscribe": self.subscribe,
            "listSubscriptions": self.list_subscriptions,
            "unsubscribe": self.unsubscribe,
            "assign": self.assign,
            "seek": self.seek,
            "seekToBeginning": partial(self.seek_to_edge, end=False),
            "seekToEnd": partial(self.seek_to_edge, end=True),
        }

    async def subscribe(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../subscription`; answered when the group has assigned its partitions, or a little later."""
        instance = self._consumers.find(call.grant, group, name)
        wanted = decode_subscription(await call.body())
        member = instance.member
        by_pattern = wanted.topic_pattern is not None
        topics = tuple(dict.fromkeys(map(call.grant.names.topic, wanted.topics or ())))
        _check_other(instance, topics, by_pattern=by_pattern)
        pattern = None if wanted.topic_pattern is None else TopicPattern(wanted.topic_pattern)
        if pattern is None and not topics:
            instance.pattern = None
            member.unsubscribe()
            return no_content()
        instance.check_group()
        if pattern is not None:
            await self._refresh(pattern)
        for topic in topics:
            await self._check_readable(call.grant, topic)
        _check_other(instance, topics, by_pattern=by_pattern)  # again: another request may have been faster
        if pattern is not None:
            instance.pattern = pattern
            await member.subscribe(self._matching(instance, pattern))
        elif topics != member.topics:
            await member.subscribe(topics)
        return no_content()

    async def _refresh(self, pattern: TopicPattern) -> None:
        """Look for new topics that match; later ones are followed as they are created and deleted."""
        try:
            await self._topics.refresh()
        except Refused:
            log.info("topics not refreshed; the pattern uses the known ones", pattern=pattern.text)

    def _matching(self, instance: Instance, pattern: TopicPattern) -> tuple[str, ...]:
        names, readable = instance.grant.names, instance.grant.subscribe.whole_topic
        there = sorted(filter(names.has, self._topics.names))
        return tuple(topic for topic in there if pattern.matches(names.own(topic)) and readable(topic))

    def _rights_changed(self, _changed: AbstractSet[Grant]) -> None:
        """Let topics and groups go that their clients may no longer read: a group's other members get the records."""
        for instance in self._consumers.clients():
            if instance.is_refused:
                self._consumers.close(instance)
        self._topics_changed(frozenset(), frozenset())

    def _topics_changed(self, appeared: frozenset[str], disappeared: frozenset[str]) -> None:
        for instance in self._consumers.clients():
            if instance.pattern is not None:
                self._spawn(self._follow(instance))

    async def _follow(self, instance: Instance) -> None:
        """Subscribe to the topics that match the pattern now, if they have changed."""
        if instance.closed or instance.pattern is None:
            return
        topics = self._matching(instance, instance.pattern)
        if topics == instance.member.topics:
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
        _check_unsubscribed(instance)
        if not wanted:
            member.unsubscribe()
            return no_content()
        instance.check_group()
        names = call.grant.names
        for entry in wanted:
            if entry.partition >= await self._check_readable(call.grant, names.topic(entry.topic)):
                raise not_found(f"Topic {entry.topic} has no partition {entry.partition}", Fault.PARTITION)
        _check_unsubscribed(instance)  # again: another request may have been faster
        await member.assign(_partitions(wanted, names))
        return no_content()

    async def seek(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../positions`."""
        instance = self._consumers.find(call.grant, group, name)
        wanted = decode_offsets(await call.body())
        topic = call.grant.names.topic
        instance.member.seek({TopicPartition(topic(entry.topic), entry.partition): entry.offset for entry in wanted})
        return no_content()

    async def seek_to_edge(self, call: Call, group: str, name: str, *, end: bool) -> web.StreamResponse:
        """`POST .../positions/beginning` and `POST .../positions/end`."""
        instance = self._consumers.find(call.grant, group, name)
        wanted = decode_partitions(await call.body())
        await instance.member.seek_to_edge(_partitions(wanted, call.grant.names), end=end)
        return no_content()

    async def stop(self) -> None:
        """Stop following topics."""
        self._topics.unwatch(self._topics_changed)

    async def _check_readable(self, grant: Grant, topic: str) -> int:
        """Return the topic's partition count; RestError 403, or Refused if the topic does not exist."""
        if not grant.subscribe.whole_topic(topic):
            raise forbidden(f"subscribe to {topic}")
        return (await self._publisher.topic(topic, principal=grant.identity.name)).partitions


def _check_other(instance: Instance, topics: Sequence[str], *, by_pattern: bool) -> None:
    """Raise RestError 409 if a consumer has partitions or the other kind of subscription."""
    member = instance.member
    by_name = member.is_subscribed and instance.pattern is None
    if member.is_manual or (by_pattern and by_name) or (topics and instance.pattern is not None):
        raise RestError(409, EXCLUSIVE, fault=Fault.EXCLUSIVE)


def _check_unsubscribed(instance: Instance) -> None:
    """Raise RestError 409 if a consumer has a subscription."""
    if instance.member.is_subscribed:
        raise RestError(409, EXCLUSIVE, fault=Fault.EXCLUSIVE)


def _partitions(entries: Sequence[Partition], names: Names) -> list[TopicPartition]:
    return [TopicPartition(names.topic(entry.topic), entry.partition) for entry in entries]
