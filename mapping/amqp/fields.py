"""Converting the sections of an AMQP message, except the body, to headers of a record."""

from __future__ import annotations

import functools
from typing import Final

import msgspec

from mapping.amqp.outgoing import COORDINATE_NAMES
from mapping.amqp.values import STRING_TYPE, UNREADABLE_TYPE, header_name, id_text, property_text
from mapping.outcomes import Outcome
from mapping.record import (
    AMQP_DURABLE,
    AMQP_PRIORITY,
    AMQP_TYPES,
    CONTENT_ENCODING,
    CONTENT_TYPE,
    CORRELATION_ID,
    CREATION_TIME,
    EXPIRY,
    GROUP_ID,
    GROUP_SEQUENCE,
    MESSAGE_ID,
    REPLY_TO,
    REPLY_TO_GROUP_ID,
    SUBJECT,
    TO,
    USER_ID,
    Header,
    Headers,
)
from protocols.amqp.primitives import MAP_CODES, TYPES, DecodeError, Pairs, Timestamp, Types, compound, decode

DEFAULT_PRIORITY: Final = 4  # part 3.2.1, and JMS 3.4.10
KEY_ANNOTATIONS: Final = ("x-opt-bridge.key", "x-opt-partition-key")
PARTITION_ANNOTATION: Final = "x-opt-bridge.partition"
DELAY_ANNOTATIONS: Final = ("x-opt-delivery-time", "x-opt-delivery-delay")


class Unmappable(Exception):  # noqa: N818 - it carries an outcome for the client, not an error in this code
    """The message cannot become a record. `outcome` decides the answer, `reason` is one line for the client."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class AmqpDestination(msgspec.Struct, frozen=True):
    """Where the messages of one link are stored, and the fields that all its records share."""

    topic: str  # the Kafka topic
    address_bytes: bytes  # the link's address as the client wrote it, in UTF-8
    partition: int | None  # from the address, or None
    key: bytes | None  # for messages without a key of their own
    user: str  # the authenticated name; a message's user-id must equal it
    headers: Headers  # `gw.protocol` and `gw.client`
    partitions: int = 1 << 31  # an explicit partition must be below it; whether it exists is known in Kafka


def header_fields(value: bytes) -> tuple[Headers, int | None]:
    """Decode a header section's list to (record headers, ttl in ms). Raises DecodeError."""
    fields, _ = decode(value, 0, len(value))
    if type(fields) is not list:
        raise DecodeError("a header that is no list")
    durable, priority, ttl = [*fields, None, None, None][:3]
    if priority is None:
        priority = DEFAULT_PRIORITY
    if not isinstance(durable, bool | None) or type(priority) is not int or not isinstance(ttl, int | None):
        raise DecodeError("a header with invalid fields")
    headers: list[Header] = []
    if durable:
        headers.append((AMQP_DURABLE, b"1"))
    if priority != DEFAULT_PRIORITY:
        headers.append((AMQP_PRIORITY, str(priority).encode()))
    return tuple(headers), ttl


short_header_fields: Final = functools.lru_cache(maxsize=256)(header_fields)
"""The same for a value of at most 100 bytes: clients use few headers."""


def annotation_fields(value: bytes) -> tuple[bytes | None, int | None, bool]:
    """Decode a message annotations' map to (key, partition, whether it contains other annotations).

    Other annotations must be stored; key, partition and the other coordinates are taken from the record on delivery.

    Raises:
        DecodeError: the map does not match part 3.2.3.
        Unmappable: an annotation asks for a feature that is not supported.
    """
    fields = decode(value, 0, len(value))[0]
    if not isinstance(fields, Pairs):
        raise DecodeError("message annotations that are no map")
    key: bytes | None = None
    partition: int | None = None
    more = False
    bridge, event_hubs = KEY_ANNOTATIONS
    for name, item in fields:
        if not isinstance(name, str) or name not in COORDINATE_NAMES:
            more = True
        if name == bridge or (name == event_hubs and key is None):
            if isinstance(item, str):
                key = item.encode()
            elif isinstance(item, bytes):
                key = item
            elif item is not None:
                raise DecodeError(f"{name} is neither string nor binary")
        elif name == PARTITION_ANNOTATION and item is not None:
            if type(item) is not int:
                raise DecodeError(f"{name} is no integer")
            partition = item
        elif name in DELAY_ANNOTATIONS:
            raise Unmappable(Outcome.UNFIT, "delayed delivery is not supported")
    return key, partition, more


PROPERTIES: Final = (
    MESSAGE_ID, USER_ID, TO, SUBJECT, REPLY_TO, CORRELATION_ID, CONTENT_TYPE, CONTENT_ENCODING, EXPIRY, CREATION_TIME,
    GROUP_ID, GROUP_SEQUENCE, REPLY_TO_GROUP_ID,
)  # fmt: skip
"""The record headers of the properties, in their order (part 3.2.4)."""
_PROPERTY_TYPES: Final[Types] = {**TYPES, 0xA3: bytes.decode}
"""A short symbol is a string here: clients send symbols for strings, and texts in UTF-8 as symbols."""


def properties(
    data: bytes, at: int, end: int, headers: list[Header], destination: AmqpDestination
) -> tuple[bytes | None, int | None, int | None]:
    """Append headers for the properties from `at` to `end`; return (group-id, absolute-expiry-time, creation-time).

    A `to` that equals the link's address is omitted. A user-id must be that of the destination.

    Raises:
        DecodeError: the list does not match part 3.2.4.
        Unmappable: DENIED, the user-id is not the authenticated one.
    """
    count, place, _ = compound(data, at, end)
    if count > len(PROPERTIES) or data[at] in MAP_CODES:
        raise DecodeError("properties that are no list, or too many")
    group: bytes | None = None
    times: dict[str, int] = {}
    for name in PROPERTIES[:count]:
        start = place
        value, place = decode(data, start, end, types=_PROPERTY_TYPES)
        if value is None:
            continue
        if name in (EXPIRY, CREATION_TIME):
            if type(value) is not Timestamp:
                raise DecodeError("a time that is no timestamp")
            times[name] = int(value)
            continue
        if name in (MESSAGE_ID, CORRELATION_ID):
            text = id_text(value, data[start])
        elif name == USER_ID:
            if type(value) is not bytes:
                raise DecodeError("a user-id that is not binary")
            if value != destination.user.encode():
                raise Unmappable(Outcome.DENIED, "the message's user-id is not the authenticated one")
            text = value
        elif name == GROUP_SEQUENCE:
            if type(value) is not int:
                raise DecodeError("a group-sequence that is no integer")
            text = b"%d" % value
        else:
            if not isinstance(value, str):
                raise DecodeError(f"property {name} of type 0x{data[start]:02x}")
            text = value.encode()
            if name == TO and text == destination.address_bytes:
                continue
            if name == GROUP_ID:
                group = text
        headers.append((name, text))
    if place != end:
        raise DecodeError("properties that are longer or shorter than their list")
    return group, times.get(EXPIRY), times.get(CREATION_TIME)


def application_properties(data: bytes, at: int, end: int, headers: list[Header]) -> None:
    """Append one header per entry of the map at `at`, and the header `amqp.types` unless all are strings.

    Raises:
        DecodeError: the map does not match part 3.2.5.
    """
    count, start, _ = compound(data, at, end)
    if count % 2 or data[at] not in MAP_CODES:
        raise DecodeError("application properties that are no map")
    letters = ""
    for _ in range(count // 2):
        name, start = decode(data, start, end)
        if type(name) is not str:
            raise DecodeError("a property's name that is no string")
        letter, text, start = property_text(data, start, end)
        if letter != UNREADABLE_TYPE:
            headers.append((header_name(name), text))
        letters += letter
    if start != end:
        raise DecodeError("application properties that are longer or shorter than their map")
    if letters.strip(STRING_TYPE):
        headers.append((AMQP_TYPES, letters.replace(UNREADABLE_TYPE, "").encode()))
