"""After a crash: which exchanges of QoS 2 messages are in the log, by the header that their records carry.

What a dead gateway's flight records do not account for is read from the log once (`gateway.kafka.read.log_scan`).
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
"""Session nonce -> packet identifier and sequence of each exchange."""

_HIGHEST_ID: Final = 65_535
_DIGITS: Final = 18  # of a sequence


async def find_exchanges(
    kafka: ConsumerOptions, lookup: Lookup, spawn: Spawn, ranges: Mapping[TopicPartition, int]
) -> Found:
    """Read each partition from an offset to its end as of this call, as `scan_log` does, and collect the exchanges.

    Args:
        kafka: see `ConsumerOptions`.
        lookup: knows which topics there are.
        spawn: starts background work.
        ranges: partition -> the offset of the first record that matters.
    """
    found: Found = {}

    def collect(record: Received) -> None:
        for name, value in record.headers:
            if name == MQTT_EXCHANGE:
                exchange = parse(value)
                if exchange is not None:
                    nonce, packet_id, sequence = exchange
                    found.setdefault(nonce, set()).add((packet_id, sequence))

    await scan_log(kafka, lookup, spawn, ranges, collect)
    return found


def parse(value: bytes | None) -> tuple[str, int, int] | None:
    """Nonce, packet identifier and sequence of a header `nonce/packet id/sequence`; None when it is none."""
    parts = (value or b"").split(b"/")
    if len(parts) != 3:
        return None
    nonce, packet_id, sequence = parts
    if not (nonce and nonce.isascii() and packet_id.isdigit() and sequence.isdigit()):
        return None
    if len(sequence) > _DIGITS or len(packet_id) > _DIGITS or not 0 < int(packet_id) <= _HIGHEST_ID:
        return None
    return nonce.decode(), int(packet_id), int(sequence)
