"""Validates records in `__trivium_sessions`, since any authorized Kafka client may have written them.

Decoding checks types and ranges (`gateway.mqtt.state.records`), this module the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.mqtt.state.records import (
    GATEWAY,
    INFLIGHT,
    RELEASE,
    SESSION,
    GatewayRecord,
    InflightRecord,
    SessionRecord,
    decode,
)
from mapping.record import Received, text_of
from protocols.mqtt.topics import is_valid_filter, is_valid_name

_QOS: Final = range(3)
_HANDLING: Final = range(3)  # Retain Handling


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
    record = decode(SessionRecord, value)
    return (
        record is not None
        and (record.will is None or (record.will.will.qos in _QOS and is_valid_name(record.will.will.topic)))
        and all(
            is_valid_filter(subscription.options.topic_filter)
            and subscription.options.qos in _QOS
            and subscription.options.retain_handling in _HANDLING
            for subscription in record.subscriptions
        )
    )


def _is_inflight(value: bytes) -> bool:
    record = decode(InflightRecord, value)
    return (
        record is not None
        and all(is_valid_filter(pending.topic_filter) for pending in record.pending_retained)
        and all(not inflight.name or is_valid_name(inflight.name) for inflight in record.messages)
    )


_CHECKS: Final[dict[str, Callable[[bytes], bool]]] = {
    SESSION: _is_session,
    INFLIGHT: _is_inflight,
    GATEWAY: lambda value: decode(GatewayRecord, value) is not None,
    RELEASE: lambda value: False,  # only tombstones are valid
}
