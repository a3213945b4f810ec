"""Recovery after a crash: finds inbound QoS 2 messages that are stored in Kafka but are in no in-flight record.

A header of their records identifies them. The part of the log that a dead gateway's in-flight records do not cover is
read once (`gateway.kafka.read.log_scan`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

import msgspec
from aiokafka import TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.kafka_consumer import ConsumerOptions
from gateway.kafka.read.log_scan import scan_log
from gateway.mqtt.session.qos2 import InboundQos2
from gateway.mqtt.state.records import InflightRecord, Offsets
from gateway.runtime.spawn import Spawn
from mapping.outcomes import Outcome
from mapping.record import MQTT_EXCHANGE, Received
from protocols.mqtt.states import UNLIMITED

RETRY_S: Final = 0.5

Found = dict[str, set[tuple[int, int]]]
"""Session id -> packet identifier and sequence of each message that is stored."""

_EXCHANGE: Final = re.compile(rb"([^/\x80-\xff]+)/(\d{1,18})/(\d{1,18})")


class CrashRecovery:
    """Finds inbound QoS 2 messages in the log."""

    def __init__(
        self,
        find: Callable[[Mapping[TopicPartition, int]], Awaitable[Found]],  # as `find_qos2_messages`
        partitions: Callable[[str], Awaitable[tuple[TopicPartition, ...]]],  # of a topic; may raise Refused
    ) -> None:
        self._find = find
        self._partitions_of = partitions

    async def recover(self, records: Mapping[str, InflightRecord]) -> dict[str, InflightRecord]:
        """Complete the in-flight records, by client id, of sessions whose gateway died; each has `scan_from`.

        Returns:
            The same records, with all stored messages in `open` and an empty `scan_from`.
        """
        messages = await self._find(await self._ranges(record.scan_from for record in records.values()))
        return {
            client_id: complete(record, messages.get(record.session_id, set())) for client_id, record in records.items()
        }

    async def confirm(self, inbound_qos2: InboundQos2) -> None:
        """Resolve a session's uncertain messages: Kafka did not answer in time, but may have stored them."""
        messages = await self._find(await self._ranges([inbound_qos2.scan_from]))
        inbound_qos2.confirm(messages.get(inbound_qos2.session_id, set()))

    async def _ranges(self, scans: Iterable[Offsets]) -> dict[TopicPartition, int]:
        """Return the lowest offset for each partition; partitions newer than the record are read from the beginning."""
        ranges: dict[TopicPartition, int] = {}
        for scan_from in scans:
            for topic, offsets in scan_from.items():
                for partition in await self._partitions(topic):
                    offset = offsets.get(partition.partition, 0)
                    ranges[partition] = min(offset, ranges.get(partition, offset))
        return ranges

    async def _partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """Return a topic's partitions, retrying until Kafka answers; none if the topic was deleted."""
        while True:
            try:
                return await self._partitions_of(topic)
            except Refused as refused:
                if refused.outcome is not Outcome.BUSY:
                    return ()
            await asyncio.sleep(RETRY_S)


def complete(record: InflightRecord, messages: Iterable[tuple[int, int]]) -> InflightRecord:
    """Return an in-flight record that covers all stored messages.

    `messages` has packet identifier and sequence of every QoS 2 message of the session in the log.
    """
    messages = set(messages)
    still_open = {**record.open, **dict(messages & record.uncertain.items())}
    low_water_mark = max((record.low_water_mark, *(sequence + 1 for sequence in record.released)))
    released = set(record.released)
    for packet_id, sequence in sorted(messages, key=lambda pair: pair[1]):
        low_water_mark = max(low_water_mark, sequence + 1)
        if sequence >= record.low_water_mark and sequence not in released:
            still_open[packet_id] = sequence
    return msgspec.structs.replace(
        record, low_water_mark=low_water_mark, open=still_open, released=(), scan_from={}, uncertain={}
    )


async def find_qos2_messages(
    kafka: ConsumerOptions, lookup: Lookup, spawn: Spawn, ranges: Mapping[TopicPartition, int]
) -> Found:
    """Read each partition up to its current end and collect the QoS 2 messages; see `scan_log`.

    `ranges` maps partitions to start offsets.
    """
    messages: Found = {}

    def collect(record: Received) -> None:
        for name, value in record.headers:
            if name == MQTT_EXCHANGE:
                message = parse(value)
                if message is not None:
                    session_id, packet_id, sequence = message
                    messages.setdefault(session_id, set()).add((packet_id, sequence))

    await scan_log(kafka, lookup, spawn, ranges, collect)
    return messages


def parse(value: bytes | None) -> tuple[str, int, int] | None:
    """Parse a header `session_id/packet id/sequence`; return None if it is invalid."""
    match = _EXCHANGE.fullmatch(value or b"")
    if match is None or not 0 < int(match[2]) <= UNLIMITED:
        return None
    return match[1].decode(), int(match[2]), int(match[3])
