"""Whose watched topics the metadata lack: they are asked for, and not any more once nobody reads."""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka import TopicPartition
from aiokafka.cluster import ClusterMetadata

from gateway.kafka.read.presence import Presence
from gateway.kafka.read.watched_topics import Partition, Topic


async def test_metadata_that_come_during_the_stop_ask_for_nothing(readers: Any) -> None:
    asked: list[Any] = []

    def spawn(work: Any) -> asyncio.Task[Any]:
        asked.append(readers.spawn(work))
        return asked[-1]

    topic = Topic("gone", b"")
    read = {TopicPartition("gone", 0): Partition(topic, 0)}
    presence = Presence(readers.lookup, spawn, {"gone": topic}, read, lambda: None, *(lambda _: None,) * 3)
    presence.compare(ClusterMetadata())  # it lacks the topic
    assert len(asked) == 1
    await presence.stop()
    presence.compare(ClusterMetadata())
    presence.doubt()
    assert len(asked) == 1
