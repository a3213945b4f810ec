"""Connections to all brokers and the metadata of all topics: aiokafka's client, with metadata read by `wire`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataResponse_v1

from gateway.kafka.driver import wire


class Brokers(AIOKafkaClient):  # type: ignore[misc]  # aiokafka carries no types
    """Follows all topics. `add_topic` and `set_topics` are not used."""

    def __init__(self, updated: Callable[[Brokers], None], **settings: Any) -> None:
        """`updated` is called after each metadata update; `settings` are those of `AIOKafkaClient`."""
        super().__init__(**settings)
        self.topics: Mapping[str, wire.Topic] = {}  # that exist, as of the last update; empty before the first
        self._updated = updated

    def partitions_for_topic(self, topic: str) -> range | None:
        """Return the numbers of a topic's partitions, or None when there is no such topic."""
        metadata = self.topics.get(topic)
        return None if metadata is None else range(len(metadata.leaders))

    def leader(self, topic: str, partition: int) -> int | None:
        """Return the node that leads a partition; None when it does not exist or has no leader now."""
        metadata = self.topics.get(topic)
        if metadata is None or partition >= len(metadata.leaders) or metadata.leaders[partition] == wire.NO_LEADER:
            return None
        return metadata.leaders[partition]

    async def close(self) -> None:
        """Close the connections. An update that callers wait for ends with False."""
        await super().close()
        end_update(self)

    async def _metadata_update(self, cluster_metadata: ClusterMetadata, topics: object) -> bool:
        """Ask the brokers in turn until one answers. aiokafka calls this periodically and when an update is forced."""
        nodes = [broker.nodeId for broker in cluster_metadata.brokers()]
        random.shuffle(nodes)
        for node in nodes:
            connection = await self._get_conn(node)
            if connection is None:
                continue
            try:
                answer = await connection.send(wire.metadata_request(None))
            except (KafkaError, TimeoutError):
                continue
            if not answer.brokers:
                break
            # aiokafka itself only needs the brokers' addresses.
            cluster_metadata.update_metadata(MetadataResponse_v1(answer.brokers, answer.controller, []))
            self.topics = {name: topic for name, topic in answer.topics.items() if not topic.error}
            self._updated(self)
            return True
        cluster_metadata.failed_update(None)
        return False


def end_update(client: AIOKafkaClient) -> None:
    """Let the metadata update of a closed client end with False: the task that would end it was cancelled."""
    update = client._md_update_fut
    if update is not None and not update.done():
        update.set_result(False)
