"""After a crash: which QoS 2 messages of clients are in the log, by the header that their records carry.

What a dead gateway's in-flight records do not account for is read from the log once (`gateway.kafka.read.log_scan`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiokafka import TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.driver.kafka_consumer import ConsumerOptions
from gateway.kafka.read.log_scan import scan_log
from gateway.spawn import Spawn
from mapping.record import MQTT_EXCHANGE, Received

Found = dict[str, set[tuple[int, int]]]
"""Session id -> packet identifier and sequence of each message."""

_HIGHEST_ID: Final = 65_535
_DIGITS: Final = 18  # of a sequence


async def find_qos2_messages(
    kafka: ConsumerOptions, lookup: Lookup, spawn: Spawn, ranges: Mapping[TopicPartition, int]
) -> Found:
    """Read each partition from an offset to its end as of this call, and collect the QoS 2 messages; see `scan_log`.

    `ranges` has by partition the offset of the first record that matters.
    """
    found: Found = {}

    def collect(record: Received) -> None:
        for name, value in record.headers:
            if name == MQTT_EXCHANGE:
                message = parse(value)
                if message is not None:
                    session_id, packet_id, sequence = message
                    found.setdefault(session_id, set()).add((packet_id, sequence))

    await scan_log(kafka, lookup, spawn, ranges, collect)
    return found


def parse(value: bytes | None) -> tuple[str, int, int] | None:
    """Session id, packet identifier and sequence of a header `session_id/packet id/sequence`; None when it is none."""
    parts = (value or b"").split(b"/")
    if len(parts) != 3:
        return None
    session_id, packet_id, sequence = parts
    if not (session_id and session_id.isascii() and packet_id.isdigit() and sequence.isdigit()):
        return None
    if len(sequence) > _DIGITS or len(packet_id) > _DIGITS or not 0 < int(packet_id) <= _HIGHEST_ID:
        return None
    return session_id.decode(), int(packet_id), int(sequence)
