"""Which records of a request are in the log already: read when an attempt to store them ended without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka import TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.read.log_scan import scan_log
from gateway.spawn import Spawn
from mapping.record import GW_REQUEST, Received, Record
from protocols.rest.errors import busy
from protocols.rest.responses import Stored

SCAN_S: Final = 15.0  # the longest time; then the client may ask again


async def find_records(
    kafka: Mapping[str, Any],
    lookup: Lookup,
    spawn: Spawn,
    records: Sequence[Record],
    *,
    scan: Mapping[int, int],
    name: str,
) -> dict[int, Stored]:
    """Read the request's topic from `scan` to its end as it is now.

    Any client of Kafka can write a header that names the request. So a record counts only where it is the very record
    that the request has at that index: then nothing is lost, whoever wrote it. The records have `name` and their index
    in their header `gw.request`.

    Returns:
        By its index in the request, the partition and offset of each record that is stored.

    Raises:
        RestError: 503, it took too long.
    """
    found: dict[int, Stored] = {}
    prefix = name.encode() + b"/"

    def collect(record: Received) -> None:
        for header, value in record.headers:
            if header == GW_REQUEST and value is not None and value.startswith(prefix):
                index = _index(value[len(prefix) :], len(records))
                if index is not None and _is_same(record, records[index]):
                    found.setdefault(index, Stored(record.partition, record.offset))

    topic = records[0].topic
    try:
        async with asyncio.timeout(SCAN_S):
            ranges = {TopicPartition(topic, number): start for number, start in scan.items()}
            await scan_log(kafka, lookup, spawn, ranges, collect)
    except TimeoutError as error:
        raise busy("What was stored before could not be read; try again") from error
    return found


def _index(text: bytes, count: int) -> int | None:
    """The index in a request of `count` records, as `KeyedRequests` writes it; None when it is none."""
    if not text.isdigit() or len(text) > len(str(count)):
        return None
    index = int(text)
    return index if index < count else None


def _is_same(stored: Received, record: Record) -> bool:
    return (
        stored.key == record.key
        and stored.value == record.value
        and (record.partition is None or record.partition == stored.partition)
    )
