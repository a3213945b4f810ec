"""Maps runs of consecutive PUBLISHes to records.

This is the reference, and the fallback without the C extension: `mapping.mqtt.incoming` uses `_native.c`, which does
the same, when it is built (ADR 0070).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mapping.record import (
    CONTENT_TYPE,
    CORRELATION_ID,
    EXPIRY,
    MQTT_FORMAT,
    REPLY_TO,
    Header,
    Headers,
    Record,
    stored_name,
)
from protocols.mqtt import packets
from protocols.mqtt.properties import Properties


class Route(msgspec.Struct, frozen=True, gc=False):
    """The parts of a record that all publishes of one connection to one topic share."""

    topic: str  # Kafka topic
    key: bytes | None
    headers: tuple[Headers, ...]  # by QoS


def map_run(
    events: Sequence[Any], start: int, routes: Mapping[str, Route], now_ms: int, /
) -> tuple[list[Record], list[int]]:
    """Map the run of similar PUBLISHes at `start`; `now_ms` is their arrival.

    They have the same QoS, 0 or 1, no RETAIN flag, no payload format indicator 1, and a route for their topic.

    Returns:
        The records and the packet identifiers.
    """
    records: list[Record] = []
    packet_ids: list[int] = []
    qos = -1
    for event in itertools.islice(events, start, None):
        if type(event) is not packets.Publish:
            break
        if qos < 0:
            qos = event.qos
        route = routes.get(event.topic)
        properties = event.properties
        if (
            route is None
            or event.qos != qos
            or qos > 1
            or event.retain
            or (properties is not None and properties.payload_format_indicator)
        ):
            break
        headers = route.headers[qos]
        if properties is not None:
            headers += property_headers(properties, now_ms)
        records.append(Record(route.topic, route.key, event.payload, headers))
        packet_ids.append(event.packet_id)
    return records, packet_ids


def property_headers(properties: Properties, now_ms: int) -> Headers:
    """Return the headers for a PUBLISH's properties; the expiry counts from `now_ms`."""
    found: list[Header] = []
    if properties.content_type is not None:
        found.append((CONTENT_TYPE, properties.content_type.encode()))
    if properties.correlation_data is not None:
        found.append((CORRELATION_ID, properties.correlation_data))
    if properties.response_topic is not None:
        found.append((REPLY_TO, properties.response_topic.encode()))
    if properties.message_expiry_interval is not None:
        found.append((EXPIRY, b"%d" % (now_ms + 1000 * properties.message_expiry_interval)))
    if properties.payload_format_indicator is not None:
        found.append((MQTT_FORMAT, b"%d" % properties.payload_format_indicator))
    for name, value in properties.user_properties:
        found.append((stored_name(name), value.encode()))
    return tuple(found)
