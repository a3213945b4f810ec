"""Which records of a request are in the log already: asked when an attempt to store them ended without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from gateway.kafka.driver.kafka_consumer import CHUNK, close_consumer, log_consumer, start_consumer
from gateway.spawn import Spawn
from mapping.record import GW_REQUEST
from protocols.rest.errors import busy
from protocols.rest.responses import Stored

SCAN_S: Final = 15.0  # the longest time; then the client may ask again


async def find_records(
    kafka: Mapping[str, Any], spawn: Spawn, topic: str, scan: Mapping[int, int], name: str
) -> dict[int, Stored]:
    """Read a topic from `scan` to its end as it is now.

    Args:
        kafka: connection arguments of a consumer.
        spawn: starts background work.
        topic: of the request.
        scan: by partition, where to begin.
        name: of the request; its records have it in their header `gw.request`.

    Returns:
        By its place in the request, where each record is that is there.

    Raises:
        RestError: 503, it took too long.
    """
    found: dict[int, Stored] = {}
    consumer = log_consumer(kafka, wait_ms=10, isolation="read_uncommitted")
    try:
        async with asyncio.timeout(SCAN_S):
            await start_consumer(consumer, spawn)
            try:
                left = await _begin(consumer, {TopicPartition(topic, number): start for number, start in scan.items()})
                while left:
                    await _read(consumer, left, name.encode() + b"/", found)
            finally:
                await close_consumer(consumer)
    except (TimeoutError, KafkaError) as error:
        raise busy("What was stored before could not be read; try again") from error
    return found


async def _begin(consumer: AIOKafkaConsumer, starts: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Seek; the ends of the partitions that there is something to read of."""
    beginnings = await consumer.beginning_offsets(list(starts))
    ends = await consumer.end_offsets(list(starts))
    starts = {place: max(start, beginnings[place]) for place, start in starts.items()}
    left = {place: ends[place] for place, start in starts.items() if start < ends[place]}
    consumer.assign(list(left))
    for place in left:
        consumer.seek(place, starts[place])
    return left


async def _read(
    consumer: AIOKafkaConsumer, left: dict[TopicPartition, int], prefix: bytes, found: dict[int, Stored]
) -> None:
    try:
        batches = await consumer.getmany(timeout_ms=200, max_records=CHUNK)
    except OffsetOutOfRangeError as error:  # retention has overtaken us
        for place, position in (await consumer.beginning_offsets(list(error.args[0]))).items():
            consumer.seek(place, position)
        return
    for place, records in batches.items():
        for record in records:
            for header, value in record.headers:
                if header == GW_REQUEST and value is not None and value.startswith(prefix):
                    found[int(value[len(prefix) :])] = Stored(place.partition, record.offset)
    for place, end in tuple(left.items()):
        if await consumer.position(place) >= end:
            del left[place]
            consumer.pause(place)
    await asyncio.sleep(0)
