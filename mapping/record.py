"""The common form of messages, a Kafka record, and the header names for properties that Kafka has no field for.

Every protocol maps to and from `Record`; no protocol knows another. The Spark jobs import the header names from here,
so this module imports nothing of ours.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

Header = tuple[str, bytes | None]
Headers = tuple[Header, ...]
"""Ordered pairs of name and value; order and duplicates are kept, as Kafka keeps them. None is Kafka's null."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record to publish."""

    topic: str  # the Kafka topic, a legal name (`is_topic_name`)
    key: bytes | None  # the record key; None is Kafka's null key (any partition)
    value: bytes | None  # None is a tombstone, which is different from the empty value b""
    headers: Headers = ()
    # CreateTime in milliseconds since the epoch; None: the publisher sets the time of arrival
    timestamp: int | None = None
    partition: int | None = None  # an explicit partition, or None for the partitioner's choice


class Received(msgspec.Struct, frozen=True, gc=False):
    """A record read from Kafka, with partition, offset and timestamp (ms since the epoch)."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: int
    partition: int
    offset: int


# Header names. Values are readable UTF-8.
CONTENT_TYPE: Final = "content-type"
CONTENT_ENCODING: Final = "content-encoding"
CORRELATION_ID: Final = "correlation-id"
REPLY_TO: Final = "reply-to"
MESSAGE_ID: Final = "message-id"
EXPIRY: Final = "expiry"  # epoch milliseconds, decimal
SUBJECT: Final = "subject"
TO: Final = "to"
USER_ID: Final = "user-id"
GROUP_ID: Final = "group-id"
GROUP_SEQUENCE: Final = "group-sequence"
REPLY_TO_GROUP_ID: Final = "reply-to-group-id"
CREATION_TIME: Final = "creation-time"
MQTT_TOPIC: Final = "mqtt.topic"
MQTT_QOS: Final = "mqtt.qos"
MQTT_RETAIN: Final = "mqtt.retain"
MQTT_FORMAT: Final = "mqtt.format"
MQTT_EXCHANGE: Final = "mqtt.exchange"  # nonce/packet id/sequence of a persistent session's QoS 2 message
GW_PROTOCOL: Final = "gw.protocol"  # mqtt5, mqtt311, amqp10, http
GW_OWNER: Final = "gw.owner"  # the gateway that wrote a record of its state
GW_CLIENT: Final = "gw.client"  # client id, container-id, principal
GW_REQUEST: Final = "gw.request"  # request/index, for an HTTP request with Idempotency-Key
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
AMQP_SECTIONS: Final = "amqp.sections"  # exact bytes, for a lossless AMQP round trip
AMQP_TYPES: Final = "amqp.types"
AMQP_BODY: Final = "amqp.body"
AMQP_DURABLE: Final = "amqp.durable"
AMQP_PRIORITY: Final = "amqp.priority"
# The origin and the cause of a dead letter. Every protocol shows them; only the gateway writes them.
DEAD_LETTER_PREFIX: Final = "dead-letter."
DEAD_LETTER_TOPIC: Final = "dead-letter.topic"
DEAD_LETTER_PARTITION: Final = "dead-letter.partition"
DEAD_LETTER_OFFSET: Final = "dead-letter.offset"
DEAD_LETTER_GROUP: Final = "dead-letter.group"
DEAD_LETTER_ATTEMPTS: Final = "dead-letter.attempts"
DEAD_LETTER_CONDITION: Final = "dead-letter.condition"
DEAD_LETTER_REASON: Final = "dead-letter.reason"
OWN_HEADERS: Final = 64
"""The most headers that the gateway adds to those of a client: `mapping.max_headers` is checked with these."""
USER_PREFIX: Final = "user."
"""A user's header with a reserved name is stored with this prefix and returned under its own name."""

RESERVED_HEADERS: Final = frozenset(
    {
        CONTENT_TYPE, CONTENT_ENCODING, CORRELATION_ID, REPLY_TO, MESSAGE_ID, EXPIRY, SUBJECT, TO, USER_ID,
        GROUP_ID, GROUP_SEQUENCE, REPLY_TO_GROUP_ID, CREATION_TIME,
        MQTT_TOPIC, MQTT_QOS, MQTT_RETAIN, MQTT_FORMAT, MQTT_EXCHANGE, GW_OWNER, GW_PROTOCOL, GW_CLIENT,
        AMQP_SECTIONS, AMQP_TYPES, AMQP_BODY, AMQP_DURABLE, AMQP_PRIORITY,
    }
)  # fmt: skip
"""Names that a user's own header may not have. Trace context is not reserved: it keeps its own name."""

TRUSTED_HEADERS: Final = frozenset({TO, USER_ID})
TRUSTED_PREFIXES: Final = ("mqtt.", "gw.", "amqp.", DEAD_LETTER_PREFIX)
"""Headers that readers trust as written by the gateway, or as set in a protocol's own field. The other reserved headers
are properties of a message, which a client that writes raw Kafka headers may set."""
RESERVED_PREFIXES: Final = (*TRUSTED_PREFIXES, USER_PREFIX)

INTERNAL_TOPIC_PREFIX: Final = "__"
LARGEST_TIMESTAMP: Final = 2**63 - 1
"""The latest timestamp of a record, in milliseconds since the epoch."""
LAST_MILLISECOND: Final = 253_402_300_799_999
"""Of the year 9999, the last one of RFC 3339. A later timestamp is one in microseconds or nanoseconds."""
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def text_of(raw: bytes | None) -> str | None:
    """Decode a key or a header's value; None if it is null or not UTF-8."""
    try:
        return None if raw is None else raw.decode()
    except UnicodeDecodeError:
        return None


def is_topic_name(name: str) -> bool:
    """Whether `name` is a Kafka topic name that clients may use: legal, and not internal (`__...`)."""
    return (
        _TOPIC_NAME.fullmatch(name) is not None
        and name not in (".", "..")
        and not name.startswith(INTERNAL_TOPIC_PREFIX)
    )


def stored_name(name: str) -> str:
    """Return the header name for a user's own header, in protocols that have fields for message properties."""
    if name in RESERVED_HEADERS or name.startswith(RESERVED_PREFIXES):
        return USER_PREFIX + name
    return name


def raw_name(name: str) -> str:
    """Return the header name for a user's own header, in protocols that write raw Kafka headers, such as HTTP."""
    if name in TRUSTED_HEADERS or name.startswith(TRUSTED_PREFIXES):
        return USER_PREFIX + name
    return name


def own_name(stored: str) -> str | None:
    """Return the user's name of a stored header, or None if the header is one of ours."""
    if stored.startswith(USER_PREFIX):
        return stored[len(USER_PREFIX) :]
    if stored.startswith(DEAD_LETTER_PREFIX):
        return stored
    if stored in RESERVED_HEADERS or stored.startswith(RESERVED_PREFIXES):
        return None
    return stored
