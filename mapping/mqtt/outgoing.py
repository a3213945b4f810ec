"""Maps Kafka records to the contents of PUBLISH packets.

User properties keep their order and duplicates [MQTT-3.3.2-17, MQTT-3.3.2-18]; payload, content type, response topic
and correlation data are not changed. The table is the design's "Record" (mapping, part 2).
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
    REPLY_TO,
    SUBJECT,
    TO,
    Received,
    own_name,
)
from mapping.rules import Rules
from protocols.mqtt.properties import Properties

SHOWN: Final = frozenset({MESSAGE_ID, SUBJECT, TO, CONTENT_ENCODING, GROUP_ID})
"""The gateway's headers without a corresponding MQTT property; sent as user properties under their own names."""

BASE64: Final = "base64:"
"""Prefix of a user property whose header value is not UTF-8 text [MQTT-1.5.4-1]."""

_LONGEST_EXPIRY: Final = 0xFFFFFFFF  # seconds: Message Expiry Interval is a four byte integer
_FIELD_LIMIT: Final = 65_535  # maximum size of strings and binary data (sections 1.5.4 and 1.5.6)
_EXPIRY_DIGITS: Final = 15  # epoch milliseconds for the next 30,000 years
_DEFAULT_QOS: Final = 1  # of records not from MQTT clients; like their writers, readers acknowledge them


class MqttDelivery(msgspec.Struct, frozen=True):
    """The MQTT form of a record, shared by all subscribers; computed once per record."""

    topic: str  # the MQTT topic name, tenant prefix included (`mapping.tenants`)
    payload: bytes  # empty for a tombstone
    qos: int  # QoS of the publisher; subscribers get the lower of this and their own
    retain: bool  # RETAIN flag of the publisher
    client: str | None  # client id of the publishing MQTT client, for No Local; None for other publishers
    expires: int | None  # epoch milliseconds after which it must not be delivered [MQTT-3.3.2-5]; None: never
    # without Message Expiry Interval and Subscription Identifiers, which differ between subscribers; None without any
    properties: Properties | None


def from_record(record: Received, rules: Rules) -> MqttDelivery | None:
    """Map a record to its MQTT form; return None if it has no MQTT topic name.

    A header whose name or value exceeds 65,535 bytes in MQTT does not fit into a property and is omitted; no MQTT
    client can have written it.
    """
    topic = rules.mqtt_topic(record.topic, record.key, record.headers)
    if topic is None:
        return None
    client: str | None = None
    protocol = b""
    known: dict[str, bytes] = {}
    user: list[tuple[str, str]] = []
    for name, value in record.headers:
        if value is not None and len(value) > _FIELD_LIMIT:
            continue
        plain = own_name(name)
        if plain is not None:
            pair = plain.replace("\0", ""), _value_text(value)
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
        if client is not None:
            client = rules.whole_client(client, topic)
    level = known.get(MQTT_QOS)
    qos = int(level) if level in (b"0", b"1", b"2") else _DEFAULT_QOS
    retain, expires = known.get(MQTT_RETAIN) == b"1", expiry_of(known.get(EXPIRY))
    return MqttDelivery(topic, record.value or b"", qos, retain, client, expires, _properties(known, user))


def expiry_of(value: bytes | None) -> int | None:
    """Return the epoch milliseconds in an expiry header; None if there is none, or it is invalid."""
    return int(value) if value is not None and value.isdigit() and len(value) <= _EXPIRY_DIGITS else None


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


def for_subscriber(delivery: MqttDelivery, identifiers: tuple[int, ...], now_ms: int) -> Properties | None:
    """Return the properties for one subscriber, with the remaining expiry [MQTT-3.3.2-6] and its identifiers.

    The caller checks that the message has not expired.
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
    """Decode a header to a string that MQTT allows [MQTT-1.5.4-2]; return None if that is not possible."""
    if value is None:
        return None
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _fits(text: str) -> bool:
    """Whether a text fits into an MQTT string; most texts are short enough without encoding them."""
    return len(text) <= _FIELD_LIMIT // 4 or len(text.encode()) <= _FIELD_LIMIT


def _value_text(value: bytes | None) -> str:
    if not value:
        return ""
    text = _decoded(value)
    return text if text is not None else BASE64 + base64.b64encode(value).decode()
