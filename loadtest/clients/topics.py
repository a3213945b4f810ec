"""Creates and fills topics for a run with Kafka's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

LED_S: Final = 20.0
_POLL_S: Final = 0.02


async def create_topic(
    bootstrap: str, name: str, partitions: int = 3, *, replicas: int = 1, configs: Mapping[str, str] | None = None
) -> None:
    """Create a topic with Kafka's `configs`; returns when every partition has a leader."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, partitions, replicas, topic_configs=dict(configs or {}))])
        async with asyncio.timeout(LED_S):
            while not await _is_led(admin, name):  # noqa: ASYNC110 - Kafka does not notify
                await asyncio.sleep(_POLL_S)
    finally:
        await admin.close()


async def store(bootstrap: str, topic: str, partitions: int, values: Sequence[bytes]) -> None:
    """Store records without keys in a topic, in turn in each of its partitions, in large batches."""
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, max_batch_size=65536
    ) as producer:
        for partition in range(partitions):
            waiting = []
            batch = producer.create_batch()
            for value in values[partition::partitions]:
                if batch.append(key=None, value=value, timestamp=None) is None:
                    waiting.append(await producer.send_batch(batch, topic, partition=partition))
                    batch = producer.create_batch()
                    batch.append(key=None, value=value, timestamp=None)
            waiting.append(await producer.send_batch(batch, topic, partition=partition))
            await asyncio.gather(*waiting)


async def _is_led(admin: AIOKafkaAdminClient, name: str) -> bool:
    (topic,) = await admin.describe_topics([name])
    return topic["error_code"] == 0 and all(partition["leader"] >= 0 for partition in topic["partitions"])
