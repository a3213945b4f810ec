"""After a crash: which QoS 2 messages of a session are in Kafka, though no in-flight record says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, Protocol, TypeVar

import msgspec
from aiokafka import TopicPartition

from gateway.kafka.contracts import Refused
from gateway.mqtt.session.qos2 import InboundQos2
from gateway.mqtt.state.records import InflightRecord, Places
from mapping.outcomes import Outcome

RETRY_S: Final = 0.5
LOOKING_S: Final = 7.0  # for a CONNECT
T = TypeVar("T")

Found = Mapping[str, set[tuple[int, int]]]
"""Session id -> packet identifier and sequence of each message that is stored."""
Find = Callable[[Mapping[TopicPartition, int]], Awaitable[Found]]
"""Reads partitions from an offset to their end; see `gateway.mqtt.registry.qos2_scan.find_qos2_messages`."""


class Partitions(Protocol):
    """Who knows a topic's partitions: `gateway.kafka.driver.kafka_consumer.Lookup`."""

    async def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """The partitions; Refused when there is no such topic."""
        ...


class CrashRecovery:
    """Finds the QoS 2 messages of clients in the log."""

    def __init__(self, find: Find, lookup: Partitions) -> None:
        self._find = find
        self._lookup = lookup

    async def recover(self, records: Mapping[str, InflightRecord]) -> dict[str, InflightRecord]:
        """Complete the in-flight records of sessions whose gateway died, per client id, each with `scan_from`.

        Returns:
            The same, with all that is stored in `open`, and nothing left to look for.
        """
        found = await self._find(await self._ranges(record.scan_from for record in records.values()))
        return {
            client_id: complete(record, found.get(record.session_id, set())) for client_id, record in records.items()
        }

    async def confirm(self, inbound_qos2: InboundQos2) -> None:
        """Settle what is uncertain in a session: Kafka did not answer in time, and may have stored it after all."""
        found = await self._find(await self._ranges([inbound_qos2.scan_from]))
        inbound_qos2.confirm(found.get(inbound_qos2.session_id, set()))

    async def _ranges(self, scans: Iterable[Places]) -> dict[TopicPartition, int]:
        """The lowest offset of each partition; one that is younger than the record is read from its beginning."""
        ranges: dict[TopicPartition, int] = {}
        for scan_from in scans:
            for topic, places in scan_from.items():
                for partition in await self._partitions(topic):
                    offset = places.get(partition.partition, 0)
                    ranges[partition] = min(offset, ranges.get(partition, offset))
        return ranges

    async def _partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """A topic's partitions, asked for until Kafka answers; none when it is gone, and what was stored in it."""
        while True:
            try:
                return await self._lookup.partitions(topic)
            except Refused as refused:
                if refused.outcome is not Outcome.BUSY:
                    return ()
            await asyncio.sleep(RETRY_S)


def complete(record: InflightRecord, found: Iterable[tuple[int, int]]) -> InflightRecord:
    """An in-flight record that accounts for everything.

    `found` has packet identifier and sequence of every QoS 2 message of the session that is in the log.
    """
    found = set(found)
    still_open = {**record.open, **dict(found & record.uncertain.items())}
    low_water_mark = max((record.low_water_mark, *(sequence + 1 for sequence in record.released)))
    released = set(record.released)
    for packet_id, sequence in sorted(found, key=lambda pair: pair[1]):
        low_water_mark = max(low_water_mark, sequence + 1)
        if sequence >= record.low_water_mark and sequence not in released:
            still_open[packet_id] = sequence
    return msgspec.structs.replace(
        record, low_water_mark=low_water_mark, open=still_open, released=(), scan_from={}, uncertain={}
    )


async def in_time(looking: Awaitable[T]) -> T:
    """Look into the log while a client waits; Refused when that takes too long, so that it tries again."""
    try:
        async with asyncio.timeout(LOOKING_S):
            return await looking
    except TimeoutError:
        raise Refused(Outcome.BUSY, "Kafka does not answer") from None
