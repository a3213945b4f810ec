"""Maps PUBLISH packets to Kafka records.

User properties keep their order and duplicates [MQTT-3.3.2-17, MQTT-3.3.2-18]; payload, content type, response topic
and correlation data are not changed. The table is the design's "Record" (mapping, part 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from mapping.record import (
    CONTENT_TYPE,
    CORRELATION_ID,
    EXPIRY,
    GW_CLIENT,
    GW_PROTOCOL,
    MQTT_FORMAT,
    MQTT_QOS,
    MQTT_RETAIN,
    MQTT_TOPIC,
    REPLY_TO,
    Header,
    Headers,
    Record,
    stored_name,
)
from mapping.rules import Rules
from protocols.mqtt.packets import Publish, Version
from protocols.mqtt.properties import Properties

PROTOCOL_NAMES: Final = {Version.V5: b"mqtt5", Version.V311: b"mqtt311", Version.V31: b"mqtt31"}

_ROUTES_LIMIT: Final = 1024 * 1024  # characters of the topics admitted per connection, with `_ROUTE` for each
_ROUTE: Final = 256  # so there are at most 4096 of them; above the limit all are forgotten
_QOS_HEADERS: Final = tuple((MQTT_QOS, b"%d" % qos) for qos in range(3))


class Route(msgspec.Struct, frozen=True, gc=False):
    """The parts of a record that all publishes of one connection to one topic share."""

    topic: str  # Kafka topic
    key: bytes | None
    headers: tuple[Headers, ...]  # by QoS


_NO_ROUTES: Final[dict[str, Route]] = {}  # shared by connections that never published; never written to


class Inbound:
    """Maps the PUBLISH packets of one connection to records."""

    __slots__ = ("_admitted", "_candidate", "_client", "_mount", "_protocol", "_routes_size", "_rules")

    def __init__(self, rules: Rules, version: Version, client_id: str, mount: str = "") -> None:
        """`client_id` and `version` are put into every record; `mount` prefixes all topics (`mapping.tenants`)."""
        self._rules = rules
        self._mount = mount
        self._protocol: Header = (GW_PROTOCOL, PROTOCOL_NAMES[version])
        self._client: Header = (GW_CLIENT, rules.own_name(client_id).encode())
        self._admitted = _NO_ROUTES
        self._routes_size = 0
        self._candidate: Route | None = None  # of the last topic that was not admitted

    def to_record(  # noqa: PLR0917 - keywords cost time on the hot path
        self, topic: str, payload: bytes, qos: int, retain: bool, properties: Properties | None, now_ms: int
    ) -> Record:
        """Map a PUBLISH with a valid topic name; `now_ms` is its arrival in epoch milliseconds.

        The record has no timestamp; the publisher sets it.
        """
        route = self._admitted.get(topic)
        if route is None:
            route = self._candidate = self._route(topic)
        headers = route.headers[qos]
        if retain:
            headers += ((MQTT_RETAIN, b"1"),)
        if properties is not None:
            headers += _property_headers(properties, now_ms)
        return Record(route.topic, route.key, payload, headers)

    def admit(self, topic: str) -> None:
        """Let `to_records` map publishes to this topic, which `to_record` must have mapped last."""
        if topic not in self._admitted:
            assert self._candidate is not None
            self._routes_size += len(topic) + _ROUTE
            if self._admitted is _NO_ROUTES or self._routes_size > _ROUTES_LIMIT:
                self._admitted, self._routes_size = {}, len(topic) + _ROUTE
            self._admitted[topic] = self._candidate

    def forget_admitted(self) -> None:
        """Withdraw the admission of all topics."""
        self._admitted = _NO_ROUTES

    def to_records(self, events: Sequence[Any], start: int, now_ms: int) -> tuple[list[Record], list[int]]:
        """Map the run of consecutive PUBLISHes at `start` to records, with their packet identifiers.

        They have the same QoS, 0 or 1, no RETAIN flag, no payload format indicator 1, and admitted topics. The run ends
        before the first other event.
        """
        records: list[Record] = []
        packet_ids: list[int] = []
        admitted, run_qos = self._admitted, -1
        for position in range(start, len(events)):  # a slice would take longer the later the run starts
            event = events[position]
            if type(event) is not Publish:
                break
            route, qos, properties = admitted.get(event.topic), event.qos, event.properties
            if run_qos < 0:
                run_qos = qos
            if route is None or qos != run_qos or qos > 1 or event.retain:
                break
            headers = route.headers[qos]
            if properties is not None:
                if properties.payload_format_indicator:
                    break
                headers += _property_headers(properties, now_ms)
            records.append(Record(route.topic, route.key, event.payload, headers))
            packet_ids.append(event.packet_id)
        return records, packet_ids

    def _route(self, topic: str) -> Route:
        whole = self._mount + topic
        destination = self._rules.destination(whole)
        name = (MQTT_TOPIC, self._rules.own_name(whole).encode())
        headers = tuple((name, qos, self._protocol, self._client) for qos in _QOS_HEADERS)
        return Route(destination.topic, destination.key, headers)


def _property_headers(properties: Properties, now_ms: int) -> Headers:
    """Return the headers for a PUBLISH's properties; the expiry counts from `now_ms`."""
    headers: list[Header] = []
    if properties.content_type is not None:
        headers.append((CONTENT_TYPE, properties.content_type.encode()))
    if properties.correlation_data is not None:
        headers.append((CORRELATION_ID, properties.correlation_data))
    if properties.response_topic is not None:
        headers.append((REPLY_TO, properties.response_topic.encode()))
    if properties.message_expiry_interval is not None:
        headers.append((EXPIRY, b"%d" % (now_ms + 1000 * properties.message_expiry_interval)))
    if properties.payload_format_indicator is not None:
        headers.append((MQTT_FORMAT, b"%d" % properties.payload_format_indicator))
    for name, value in properties.user_properties:
        headers.append((stored_name(name), value.encode()))
    return tuple(headers)
