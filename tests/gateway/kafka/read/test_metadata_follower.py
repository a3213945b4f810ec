"""Metadata that lack a watched topic trigger a request, but not after the stop."""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka import TopicPartition
from aiokafka.cluster import ClusterMetadata

from gateway.kafka.cluster.topic_info import TopicIdentity
from gateway.kafka.read.metadata_follower import MetadataFollower
from gateway.kafka.read.watched_topics import WatchedPartition, WatchedTopic


async def test_metadata_during_the_stop_trigger_no_request(readers: Any) -> None:
    asked: list[Any] = []

    def spawn(work: Any) -> asyncio.Task[Any]:
        asked.append(readers.spawn(work))
        return asked[-1]

    topic = WatchedTopic("gone", TopicIdentity(b""))
    read = {TopicPartition("gone", 0): WatchedPartition(topic, 0)}
    follower = MetadataFollower(readers.lookup, spawn, {"gone": topic}, read, lambda: None, *(lambda _: None,) * 3)
    follower.check_consumer_metadata(ClusterMetadata())  # it lacks the topic
    assert len(asked) == 1
    await follower.stop()
    follower.check_consumer_metadata(ClusterMetadata())
    follower.suspect_deletion()
    assert len(asked) == 1
