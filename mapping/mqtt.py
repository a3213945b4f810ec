"""MQTT and Kafka records: a PUBLISH becomes a `Record`, a `Received` becomes what a PUBLISH to a client needs.

The table is the design's "Record" (mapping, part 2). User properties keep their order and their duplicates
[MQTT-3.3.2-17, MQTT-3.3.2-18]; payload, content type, response topic and correlation data pass unaltered.
"""

from __future__ import annotations

import base64
from typing import Final

import msgspec

from mapping.record import (
    CONTENT_ENCODING,
    CONTENT_TYPE,
    CORRELATION_ID,
    EXPIRY,
    GROUP_ID,
    GW_CLIENT,
    GW_PROTOCOL,
    MESSAGE_ID,
    MQTT_FORMAT,
    MQTT_QOS,
    MQTT_RETAIN,
    MQTT_TOPIC,
    REPLY_TO,
    SUBJECT,
    TO,
    Header,
    Headers,
    Received,
    Record,
    own_name,
    stored_name,
)
from mapping.rules import Rules
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties

PROTOCOL_NAMES: Final = {Version.V5: b"mqtt5", Version.V311: b"mqtt311", Version.V31: b"mqtt31"}
SHOWN: Final = frozenset({MESSAGE_ID, SUBJECT, TO, CONTENT_ENCODING, GROUP_ID})
"""Headers of ours that MQTT has no property for; shown as user properties under their own names."""

BASE64: Final = "base64:"
"""Marks a user property whose header value is no UTF-8 text [MQTT-1.5.4-1]."""

_ROUTES_LIMIT: Final = 4096  # per connection; a publisher with more topics pays for the look-up again
_KNOWN_LIMIT: Final = 1024  # properties whose headers are remembered
_KNOWN_BYTES: Final = 64  # of those of one message
_LONGEST_EXPIRY: Final = 0xFFFFFFFF  # seconds: Message Expiry Interval is a four byte integer
_FIELD_LIMIT: Final = 65_535  # bytes of a string, and of binary data (sections 1.5.4 and 1.5.6)
_EXPIRY_DIGITS: Final = 15  # epoch milliseconds for the next 30,000 years
_DEFAULT_QOS: Final = 1  # of records that no MQTT client wrote: acknowledged by their writer, so by the reader


class _Route(msgspec.Struct, frozen=True, gc=False):
    """What all publishes of one connection to one topic at one QoS have in common."""

    topic: str
    key: bytes | None
    headers: Headers


class Inbound:
    """PUBLISH to `Record`, for one connection."""

    __slots__ = ("_client", "_protocol", "_routes", "_rules")

    def __init__(self, rules: Rules, version: Version, client_id: str) -> None:
        """`client_id` and `version` go into every record."""
        self._rules = rules
        self._protocol: Header = (GW_PROTOCOL, PROTOCOL_NAMES[version])
        self._client: Header = (GW_CLIENT, client_id.encode())
        self._routes: dict[tuple[str, int], _Route] = {}

    def to_record(  # noqa: PLR0917 - names cost on the hot path
        self, topic: str, payload: bytes, qos: int, retain: bool, properties: Properties | None, now_ms: int
    ) -> Record:
        """The record of a PUBLISH whose topic name is valid; `now_ms` is its arrival in epoch milliseconds.

        The record has no timestamp of its own: the publisher stamps the arrival.
        """
        route = self._routes.get((topic, qos))
        if route is None:
            route = self._route(topic, qos)
        headers = route.headers
        if retain:
            headers += ((MQTT_RETAIN, b"1"),)
        if properties is not None:
            known = _headers_of.get(id(properties))
            headers += known[1] if known is not None else _property_headers(properties, now_ms)
        return Record(route.topic, route.key, payload, headers)

    def _route(self, topic: str, qos: int) -> _Route:
        destination = self._rules.destination(topic)
        headers = ((MQTT_TOPIC, topic.encode()), (MQTT_QOS, b"%d" % qos), self._protocol, self._client)
        route = _Route(destination.topic, destination.key, headers)
        if len(self._routes) >= _ROUTES_LIMIT:
            self._routes.clear()
        self._routes[topic, qos] = route
        return route


_headers_of: dict[int, tuple[Properties, Headers]] = {}
"""By `id`, which is theirs as long as they are here: what short properties become, of all connections. Those that come
again and again are one object."""


def _property_headers(properties: Properties, now_ms: int) -> Headers:
    found: list[Header] = []
    size = 0  # of what may come again
    if properties.content_type is not None:
        found.append((CONTENT_TYPE, properties.content_type.encode()))
        size += len(properties.content_type)
    if properties.correlation_data is not None:
        found.append((CORRELATION_ID, properties.correlation_data))
        size = _KNOWN_BYTES
    if properties.response_topic is not None:
        found.append((REPLY_TO, properties.response_topic.encode()))
        size = _KNOWN_BYTES
    if properties.message_expiry_interval is not None:
        found.append((EXPIRY, b"%d" % (now_ms + 1000 * properties.message_expiry_interval)))
        size = _KNOWN_BYTES
    if properties.payload_format_indicator is not None:
        found.append((MQTT_FORMAT, b"%d" % properties.payload_format_indicator))
    for name, value in properties.user_properties:
        size += len(name) + len(value)
        found.append((stored_name(name), value.encode()))
    headers = tuple(found)
    if size < _KNOWN_BYTES:
        if len(_headers_of) >= _KNOWN_LIMIT:
            _headers_of.clear()
        _headers_of[id(properties)] = (properties, headers)
    return headers


class Delivery(msgspec.Struct, frozen=True):
    """A record as MQTT sees it, the same for every subscriber; computed once per record."""

    topic: str  # the MQTT topic name
    payload: bytes  # the application message; empty for a tombstone
    qos: int  # the QoS it was published with; subscribers get the lower of this and their own
    retain: bool  # the RETAIN flag it was published with
    client: str | None  # the MQTT client id that published it, for No Local; None when no MQTT client did
    expires: int | None  # epoch milliseconds after which it must not be delivered [MQTT-3.3.2-5]; None: never
    # without Message Expiry Interval and Subscription Identifiers, which are each subscriber's own; None when there are
    # none
    properties: Properties | None


def from_record(record: Received, rules: Rules) -> Delivery | None:
    """What to publish for a record; None when it has no MQTT topic name.

    A header whose name or value has more than 65,535 bytes as MQTT says it does not fit into a property and is left
    out; no MQTT client can have written it.
    """
    topic = rules.mqtt_topic(record.topic, record.key, record.headers)
    if topic is None:
        return None
    qos, retain, expires = _DEFAULT_QOS, False, None
    client: str | None = None
    protocol = b""
    known: dict[str, bytes] = {}
    user: list[tuple[str, str]] = []
    for name, value in record.headers:
        if value is not None and len(value) > _FIELD_LIMIT:
            continue
        plain = own_name(name)
        if plain is not None:
            pair = _text(plain), _value_text(value)
            if _fits(pair[0]) and _fits(pair[1]):
                user.append(pair)
        elif name in SHOWN:
            shown = _value_text(value)
            if _fits(shown):
                user.append((name, shown))
        elif name == GW_PROTOCOL:
            protocol = value or b""
        elif value is not None:
            known[name] = value
    if protocol.startswith(b"mqtt"):
        client = _decoded(known.get(GW_CLIENT))
    level = known.get(MQTT_QOS)
    if level in (b"0", b"1", b"2"):
        qos = int(level)
    retain = known.get(MQTT_RETAIN) == b"1"
    expiry = known.get(EXPIRY)
    if expiry is not None and expiry.isdigit() and len(expiry) <= _EXPIRY_DIGITS:
        expires = int(expiry)
    return Delivery(topic, record.value or b"", qos, retain, client, expires, _properties(known, user))


def _properties(known: dict[str, bytes], user: list[tuple[str, str]]) -> Properties | None:
    reply_to = _decoded(known.get(REPLY_TO))
    if reply_to is not None and (not reply_to or "#" in reply_to or "+" in reply_to):
        user.append((REPLY_TO, reply_to))  # a Response Topic has no wildcards [MQTT-3.3.2-14]
        reply_to = None
    format_ = known.get(MQTT_FORMAT)
    content_type = _decoded(known.get(CONTENT_TYPE))
    correlation = known.get(CORRELATION_ID)
    if reply_to is None and format_ is None and content_type is None and correlation is None and not user:
        return None
    return Properties(
        payload_format_indicator=int(format_) if format_ in (b"0", b"1") else None,
        content_type=content_type,
        response_topic=reply_to,
        correlation_data=correlation,
        user_properties=tuple(user),
    )


def for_subscriber(delivery: Delivery, identifiers: tuple[int, ...], now_ms: int) -> Properties | None:
    """The properties for one subscriber: what is left of the expiry [MQTT-3.3.2-6], and its identifiers.

    The caller has checked that the message has not expired.
    """
    properties = delivery.properties
    if delivery.expires is None and not identifiers:
        return properties
    left = None
    if delivery.expires is not None:
        left = min(_LONGEST_EXPIRY, max(1, -(-(delivery.expires - now_ms) // 1000)))
    return msgspec.structs.replace(
        properties if properties is not None else Properties(),
        message_expiry_interval=left,
        subscription_identifiers=identifiers,
    )


def _decoded(value: bytes | None) -> str | None:
    """A header as a UTF-8 string that MQTT allows [MQTT-1.5.4-2], or None."""
    if value is None:
        return None
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _fits(text: str) -> bool:
    """Whether a text fits into a string of MQTT; most need no look at their encoding."""
    return len(text) <= _FIELD_LIMIT // 4 or len(text.encode()) <= _FIELD_LIMIT


def _value_text(value: bytes | None) -> str:
    if not value:
        return ""
    text = _decoded(value)
    return text if text is not None else BASE64 + base64.b64encode(value).decode()


def _text(name: str) -> str:
    return name.replace("\0", "")
