"""Validates records in `__trivium_sessions`, since any authorized Kafka client may have written them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.mqtt.state.records import (
    GATEWAY,
    INFLIGHT,
    NEVER,
    PUBACK,
    PUBCOMP,
    RELEASE,
    SESSION,
    InflightRecord,
    Offsets,
    PendingWill,
    SessionRecord,
    decode_gateway,
    decode_inflight,
    decode_session,
)
from mapping.record import Received, text_of
from protocols.mqtt.states import UNLIMITED
from protocols.mqtt.topics import is_valid_filter, is_valid_name

_QOS: Final = range(3)
_HANDLING: Final = range(3)  # Retain Handling
_LATEST_MS: Final = 1 << 53  # of a timestamp: the largest integer that is exact in JSON


def kind_and_name(record: Received, *, trusted: bool = False) -> tuple[str, str] | None:
    """Return a record's kind, and the client id or gateway name; None if the record is foreign or invalid.

    A tombstone is valid if its key is. `trusted`: this process has written the record.
    """
    key = text_of(record.key)
    if key is None:
        return None
    kind, slash, name = key.partition("/")
    kind += slash
    check = _CHECKS.get(kind)
    if check is None or not (trusted or record.value is None or check(record.value)):
        return None
    return kind, name


def _is_session(value: bytes) -> bool:
    record = decode_session(value)
    return record is not None and _is_possible(record)


def _is_possible(record: SessionRecord) -> bool:
    return (
        record.epoch >= 0
        and 0 <= record.expiry <= NEVER
        and (record.gone_at is None or 0 <= record.gone_at <= _LATEST_MS)
        and (record.will is None or _is_will(record.will))
        and all(
            is_valid_filter(subscription.options.topic_filter)
            and subscription.options.qos in _QOS
            and subscription.options.retain_handling in _HANDLING
            and subscription.identifier >= 0
            for subscription in record.subscriptions
        )
    )


def _is_will(pending: PendingWill) -> bool:
    will = pending.will
    return will.qos in _QOS and is_valid_name(will.topic) and 0 <= (pending.due or 0) <= _LATEST_MS


def _is_inflight(value: bytes) -> bool:
    record = decode_inflight(value)
    return record is not None and _is_possible_inflight(record)


def _is_possible_inflight(record: InflightRecord) -> bool:
    counted = (record.epoch, record.low_water_mark, *record.released, *record.open.values(), *record.uncertain.values())
    return (
        all(number >= 0 for number in counted)
        and all(1 <= packet_id <= UNLIMITED for packet_id in (*record.open, *record.uncertain))
        and _are_offsets(record.reached)
        and _are_offsets(record.scan_from)
        and all(is_valid_filter(pending.topic_filter) for pending in record.pending_retained)
        and all(
            1 <= inflight.packet_id <= UNLIMITED
            and PUBACK <= inflight.stage <= PUBCOMP
            and inflight.partition >= 0
            and inflight.offset >= 0
            and (not inflight.name or is_valid_name(inflight.name))
            for inflight in record.messages
        )
    )


def _are_offsets(offsets: Offsets) -> bool:
    return all(
        partition >= 0 and offset >= 0 for partitions in offsets.values() for partition, offset in partitions.items()
    )


_CHECKS: Final[dict[str, Callable[[bytes], bool]]] = {
    SESSION: _is_session,
    INFLIGHT: _is_inflight,
    GATEWAY: lambda value: decode_gateway(value) is not None,
    RELEASE: lambda value: False,  # only tombstones are valid
}
