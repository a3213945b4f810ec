"""Fills a topic with readings in batches, because ten million single sends would take minutes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer

BATCH_BYTES: Final = 1 << 19
# Headers similar to the gateway's.
HEADERS: Final = [("content-type", b"application/json"), ("mqtt-topic", b"sensors/a"), ("mqtt-qos", b"1")]


class Reading(NamedTuple):
    """One reading of a sensor."""

    sensor: int
    number: int
    at: int  # epoch ms


async def fill(bootstrap: str, topic: str, partitions: int, readings: Iterable[Reading]) -> int:
    """Write readings, each sensor to one partition, with some headers; return their number."""
    count = 0
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, max_batch_size=BATCH_BYTES, acks=1) as producer:
        batches = [producer.create_batch() for _ in range(partitions)]
        for sensor, number, at in readings:
            count += 1
            partition = sensor % partitions
            value = b'{"temperature": %.1f, "time": %d, "sent": %d}' % (number % 61 / 2, at, at + 3)
            key = b"s%d" % sensor
            while batches[partition].append(key=key, value=value, timestamp=at, headers=HEADERS) is None:
                await producer.send_batch(batches[partition], topic, partition=partition)
                batches[partition] = producer.create_batch()
        for partition, batch in enumerate(batches):
            if batch.record_count():
                await producer.send_batch(batch, topic, partition=partition)
        await producer.flush()
    return count


def in_turn(readings: int, sensors: int, step_ms: float) -> Iterator[Reading]:
    """Yield readings of the sensors in turn, `step_ms` apart, the last one now."""
    begin = int(time.time() * 1000) - int(readings * step_ms)
    return (Reading(number % sensors, number, begin + int(number * step_ms)) for number in range(readings))
