"""The one pivot of the gateway: a Kafka record, and the header names that carry what Kafka has no field for.

Every protocol maps to and from `Record`; no protocol knows another. Spark jobs read the same header names from
here, so this module is the contract with them and imports nothing of ours.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

Header = tuple[str, bytes | None]
Headers = tuple[Header, ...]
"""Ordered pairs of name and value; order and duplicates are kept, as Kafka keeps them. None is Kafka's null."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record on its way to Kafka."""

    topic: str  # the Kafka topic, a legal name (`is_topic_name`)
    key: bytes | None  # the record key; None is Kafka's null key (any partition)
    value: bytes | None  # the value; None is a tombstone, b"" an empty value. They are different things
    headers: Headers = ()  # see `Headers`
    # CreateTime in milliseconds since the epoch; None lets the publisher stamp the arrival
    timestamp: int | None = None
    partition: int | None = None  # an explicit partition, or None for the partitioner's choice


class Received(msgspec.Struct, frozen=True, gc=False):
    """A record that came from Kafka: partition, offset and timestamp (ms since the epoch) are known."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: int
    partition: int
    offset: int


# Header names (design: the mapping's table of records). Values are readable UTF-8.
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
MQTT_EXCHANGE: Final = "mqtt.exchange"  # nonce/packet id/sequence of a kept session's QoS 2 message
GW_PROTOCOL: Final = "gw.protocol"  # mqtt5, mqtt311, amqp10, http
GW_OWNER: Final = "gw.owner"  # the gateway that wrote a record of its state
GW_CLIENT: Final = "gw.client"  # client id, container-id, principal
GW_REQUEST: Final = "gw.request"  # request/place in it, of an HTTP request with Idempotency-Key
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
AMQP_SECTIONS: Final = "amqp.sections"  # exact bytes, for a lossless AMQP round trip
AMQP_TYPES: Final = "amqp.types"
AMQP_BODY: Final = "amqp.body"
AMQP_DURABLE: Final = "amqp.durable"
AMQP_PRIORITY: Final = "amqp.priority"
# Where a dead letter comes from and why it is one. Every protocol shows them; only the gateway writes them.
DEAD_LETTER_PREFIX: Final = "dead-letter."
DEAD_LETTER_TOPIC: Final = "dead-letter.topic"
DEAD_LETTER_PARTITION: Final = "dead-letter.partition"
DEAD_LETTER_OFFSET: Final = "dead-letter.offset"
DEAD_LETTER_GROUP: Final = "dead-letter.group"
DEAD_LETTER_ATTEMPTS: Final = "dead-letter.attempts"
DEAD_LETTER_CONDITION: Final = "dead-letter.condition"
DEAD_LETTER_REASON: Final = "dead-letter.reason"
USER_PREFIX: Final = "user."
"""A user's header with a reserved name is stored under this prefix and given back under its own name."""

RESERVED_HEADERS: Final = frozenset(
    {
        CONTENT_TYPE, CONTENT_ENCODING, CORRELATION_ID, REPLY_TO, MESSAGE_ID, EXPIRY, SUBJECT, TO, USER_ID,
        GROUP_ID, GROUP_SEQUENCE, REPLY_TO_GROUP_ID, CREATION_TIME,
        MQTT_TOPIC, MQTT_QOS, MQTT_RETAIN, MQTT_FORMAT, MQTT_EXCHANGE, GW_OWNER, GW_PROTOCOL, GW_CLIENT,
        AMQP_SECTIONS, AMQP_TYPES, AMQP_BODY, AMQP_DURABLE, AMQP_PRIORITY,
    }
)  # fmt: skip
"""Names that a user's own header may not take. Trace context is not reserved: it keeps its own name."""

VOUCHED_HEADERS: Final = frozenset({TO, USER_ID})
VOUCHED_PREFIXES: Final = ("mqtt.", "gw.", "amqp.", DEAD_LETTER_PREFIX)
"""What readers take for the gateway's word, or for what a client has said in its protocol's own field for it. The other
reserved headers are properties of a message, which a client that writes Kafka's raw headers may set."""
RESERVED_PREFIXES: Final = (*VOUCHED_PREFIXES, USER_PREFIX)

INTERNAL_TOPIC_PREFIX: Final = "__"
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def text_of(raw: bytes | None) -> str | None:
    """A key or a header's value as text; None when there is none, or it is no UTF-8."""
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
    """The header name under which a user's own header `name` is stored, where message properties have fields."""
    if name in RESERVED_HEADERS or name.startswith(RESERVED_PREFIXES):
        return USER_PREFIX + name
    return name


def raw_name(name: str) -> str:
    """The same for a client that writes Kafka's headers as they are, as HTTP's do."""
    if name in VOUCHED_HEADERS or name.startswith(VOUCHED_PREFIXES):
        return USER_PREFIX + name
    return name


def own_name(stored: str) -> str | None:
    """The user's name of a stored header, or None when the header is one of ours."""
    if stored.startswith(USER_PREFIX):
        return stored[len(USER_PREFIX) :]
    if stored.startswith(DEAD_LETTER_PREFIX):
        return stored
    if stored in RESERVED_HEADERS or stored.startswith(RESERVED_PREFIXES):
        return None
    return stored
