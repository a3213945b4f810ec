"""Creates, deletes, reads and writes topics, and waits until Kafka has applied each change."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import InvalidReplicationFactorError, TopicAlreadyExistsError, for_code

from gateway.kafka.driver import wire
from tests.support.waiting import wait_until


async def create_topic(admin: AIOKafkaAdminClient, partitions: int = 3, **configs: str) -> str:
    """Create a topic with a unique name and wait until it can be used; `configs` have `_` for each dot."""
    name = f"t-{uuid.uuid4().hex[:12]}"
    topic_configs = {key.replace("_", "."): value for key, value in configs.items()}
    await _make(admin, NewTopic(name, partitions, 1, topic_configs=topic_configs))
    await until_led(admin, name)
    return name


async def _make(admin: AIOKafkaAdminClient, topic: NewTopic) -> None:
    """Create a topic, and raise the error in Kafka's answer, which aiokafka ignores.

    A broker whose heartbeat was late is fenced for a moment and cannot take a replica; then try again.
    """
    codes: list[int] = []

    async def is_placed() -> bool:
        ((_, code, *_),) = (await admin.create_topics([topic])).topic_errors
        codes.append(code)
        return bool(code != InvalidReplicationFactorError.errno)

    await wait_until(is_placed)
    if codes[-1]:
        raise for_code(codes[-1])(topic.name)


async def until_led(admin: AIOKafkaAdminClient, name: str) -> None:
    """Wait until the broker knows a new topic and the leaders of its partitions."""

    async def is_led() -> bool:
        (topic,) = await admin.describe_topics([name])
        return topic["error_code"] == 0 and all(partition["leader"] >= 0 for partition in topic["partitions"])

    await wait_until(is_led)


async def remake(admin: AIOKafkaAdminClient, topic: str, partitions: int) -> None:
    """Delete a topic and create it again; the broker knows the new one at the end."""
    former = await _identity(admin, topic)
    await admin.delete_topics([topic])
    while True:
        try:
            await _make(admin, NewTopic(topic, partitions, 1))
        except TopicAlreadyExistsError:
            await until_gone(admin, topic)
        else:
            break

    async def is_recreated() -> bool:
        return await _identity(admin, topic) not in {former, b""}

    await wait_until(is_recreated)  # a slow broker answers with the former topic's leaders, and takes records for it
    await until_led(admin, topic)


async def _identity(admin: AIOKafkaAdminClient, topic: str) -> bytes:
    """Return a topic's id by a broker's metadata; b"" when it has no such topic."""
    node = admin._client.get_random_node()
    found = (await admin._client.send(node, wire.metadata_request([topic]))).topics.get(topic)
    return b"" if found is None or found.error else bytes(found.id)


async def until_gone(admin: AIOKafkaAdminClient, topic: str) -> None:
    """Wait until a deleted topic is no longer listed."""
    async with asyncio.timeout(60):
        while topic in await admin.list_topics():
            pass


async def read_all(bootstrap: str, topic: str, **options: Any) -> list[Any]:
    """Every record of a topic, partition by partition; `options` of the consumer."""
    # Not `seek_to_beginning`: a pending reset to the end may take effect after it.
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", **options)
    await consumer.start()
    try:
        async with asyncio.timeout(60):
            while not (numbers := consumer.partitions_for_topic(topic)):
                await consumer._client.force_metadata_update()
            partitions = [TopicPartition(topic, number) for number in sorted(numbers)]
            consumer.assign(partitions)
            ends = await consumer.end_offsets(partitions)
            found = []
            while any([await consumer.position(part) < end for part, end in ends.items()]):
                for records in (await consumer.getmany(timeout_ms=500)).values():
                    found += records
            return found
    finally:
        await consumer.stop()


async def read_committed(bootstrap: str, topic: str, count: int) -> list[Any]:
    """Wait for `count` committed records and return all; Kafka answers a commit before readers see it."""
    found: list[Any] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found = await read_all(bootstrap, topic, isolation_level="read_committed")
    return found


async def produce(bootstrap: str, topic: str, values: list[bytes], **fields: Any) -> None:
    """Write records with the same key, headers and partition (`fields`)."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    try:
        for value in values:
            await producer.send(topic, value, **fields)
    finally:
        await producer.stop()
