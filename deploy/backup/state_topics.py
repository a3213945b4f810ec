"""Save and restore the gateways' state in Kafka (sessions, retained messages, ...): see docs/operations.md.

python state_topics.py save trivium.toml FILE       # gateways may run
python state_topics.py restore trivium.toml FILE    # no gateway may run; the topics must exist and be empty
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from gateway.kafka.driver.client_settings import client_settings
from gateway.settings.config import load

PREFIX: Final = "__trivium_"
GATEWAYS: Final = b"gateway/"
"""Prefix of the keys of running gateways' own records."""


async def save(settings: dict[str, Any], prefix: str = PREFIX) -> list[str]:
    """Return one line for the last record of each key in the topics with this prefix, in order of offsets."""
    last: dict[tuple[str, int, bytes | None], Any] = {}
    partitions = [one for one in await there(settings) if one.topic.startswith(prefix)]
    consumer = AIOKafkaConsumer(**settings, auto_offset_reset="earliest", isolation_level="read_committed")
    await consumer.start()
    try:
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        while any([await consumer.position(one) < ends[one] for one in partitions]):
            for records in (await consumer.getmany(timeout_ms=500)).values():
                for record in records:
                    key = (record.topic, record.partition, record.key)
                    last.pop(key, None)
                    if record.value is not None and not (record.key or b"").startswith(GATEWAYS):
                        last[key] = record
    finally:
        await consumer.stop()
    return [line(record) for record in last.values()]


def line(record: Any) -> str:
    """Format a record as a line of the file."""
    headers = [[name, text(value)] for name, value in record.headers]
    return json.dumps([record.topic, record.partition, record.timestamp, text(record.key), text(record.value), headers])


async def restore(settings: dict[str, Any], lines: list[str]) -> None:
    """Write the records to their partitions; raises SystemExit if a topic is missing or not empty."""
    rows = [json.loads(one) for one in lines]
    partitions = await there(settings)
    for topic, partition in sorted({(row[0], row[1]) for row in rows}, reverse=True):
        if not any(one.topic == topic for one in partitions):
            raise SystemExit(f"{topic} does not exist: let a gateway create it, then stop the gateway")
        if TopicPartition(topic, partition) not in partitions:
            raise SystemExit(f"{topic} has no partition {partition}: it had more")
    for name in {row[0] for row in rows}:
        if await save(settings, name):
            raise SystemExit(f"{name} is not empty")
    async with AIOKafkaProducer(**settings, acks="all", enable_idempotence=True) as producer:
        sent = []
        for topic, partition, timestamp, key, value, headers in rows:
            decoded = [(name, content(header)) for name, header in headers]
            sent.append(
                await producer.send(
                    topic, content(value), content(key), partition=partition, timestamp_ms=timestamp, headers=decoded
                )
            )
        await asyncio.gather(*sent)


async def there(settings: dict[str, Any]) -> list[TopicPartition]:
    """Return all partitions of all topics."""
    admin = AIOKafkaAdminClient(**settings)
    await admin.start()
    try:
        topics = await admin.describe_topics()
    finally:
        await admin.close()
    return [TopicPartition(one["topic"], part["partition"]) for one in topics for part in one["partitions"]]


def text(content: bytes | None) -> str | None:
    """Encode bytes for JSON."""
    return None if content is None else base64.b64encode(content).decode("ascii")


def content(text: str | None) -> bytes | None:
    """Decode what `text` encoded."""
    return None if text is None else base64.b64decode(text)


def main(command: str, config: str, file: str) -> None:
    """Save or restore, with the Kafka login of this configuration."""
    path, kafka = Path(file), load(Path(config)).kafka

    async def work() -> None:
        settings = client_settings(kafka, "backup")
        if command == "save":
            lines.extend(await save(settings))
        else:
            await restore(settings, lines)

    lines = path.read_text(encoding="utf-8").splitlines() if command == "restore" else []
    asyncio.run(work())
    if command == "save":
        path.write_text("".join(f"{one}\n" for one in lines), encoding="utf-8")
    sys.stdout.write(f"{command}: {len(lines)} records\n")


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in {"save", "restore"}:
        sys.exit(__doc__)
    main(*sys.argv[1:])
