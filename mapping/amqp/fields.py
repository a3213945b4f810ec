"""Converting the sections of an AMQP message, except the body, to headers of a record."""

from __future__ import annotations

from typing import Final

import msgspec

from mapping.amqp.outgoing import COORDINATE_NAMES
from mapping.amqp.values import (
    ID_PREFIX,
    STRING_ID,
    STRING_TYPE,
    UNREADABLE_TYPE,
    checked_text,
    header_name,
    id_text,
    property_text,
)
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
from protocols.amqp.primitives import DecodeError, Pairs, decode, decode_items

DEFAULT_PRIORITY: Final = 4  # part 3.2.1, and JMS 3.4.10
KEY_ANNOTATIONS: Final = ("x-opt-bridge.key", "x-opt-partition-key")
PARTITION_ANNOTATION: Final = "x-opt-bridge.partition"
DELAY_ANNOTATIONS: Final = ("x-opt-delivery-time", "x-opt-delivery-delay")
_FOREVER: Final = 2**63 - 1


class Unmappable(Exception):  # noqa: N818 - it carries an outcome for the client, not an error in this code
    """The message cannot become a record. `outcome` decides the answer, `reason` is one line for the client."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class Destination(msgspec.Struct, frozen=True):
    """Where the messages of one link are stored, and the fields that all its records share."""

    topic: str  # the Kafka topic
    address_bytes: bytes  # the link's address as the client wrote it, in UTF-8
    partition: int | None  # from the address, or None
    key: bytes | None  # for messages without a key of their own
    user: str  # the authenticated name; a message's user-id must equal it
    headers: Headers  # `gw.protocol` and `gw.client`
    before_ms: int = _FOREVER  # how old a record's timestamp may be in this topic
    after_ms: int = _FOREVER  # how far in the future a record's timestamp may be in this topic
    partitions: int = 1 << 31  # number of the topic's partitions; an explicit partition must be below it


def header_fields(value: bytes) -> tuple[Headers, int | None]:
    """Decode a header section's list to (record headers, ttl in ms). Raises DecodeError."""
    items = [*decode_items(value, 0, len(value)), None, None, None]
    durable, priority, ttl = items[:3]
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


def annotation_fields(value: bytes) -> tuple[bytes | None, int | None, bool]:
    """Decode a message annotations' map to (key, partition, whether it contains other annotations).

    Other annotations must be stored; key, partition and the other coordinates are taken from the record on delivery.

    Raises:
        DecodeError: the map does not match part 3.2.3.
        Unmappable: an annotation asks for a feature that is not supported.
    """
    found = decode(value, 0, len(value))[0]
    if not isinstance(found, Pairs):
        raise DecodeError("message annotations that are no map")
    key: bytes | None = None
    partition: int | None = None
    more = False
    bridge, event_hubs = KEY_ANNOTATIONS
    for name, item in found:
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


# The properties in order (part 3.2.4): the record header of each, and its type.
_TEXT, _TO, _GROUP, _ID, _USER_ID, _SEQUENCE, _ABSOLUTE_EXPIRY, _CREATION = range(8)
_FIELDS: Final = (
    (MESSAGE_ID, _ID), (USER_ID, _USER_ID), (TO, _TO), (SUBJECT, _TEXT), (REPLY_TO, _TEXT), (CORRELATION_ID, _ID),
    (CONTENT_TYPE, _TEXT), (CONTENT_ENCODING, _TEXT), (EXPIRY, _ABSOLUTE_EXPIRY), (CREATION_TIME, _CREATION),
    (GROUP_ID, _GROUP), (GROUP_SEQUENCE, _SEQUENCE), (REPLY_TO_GROUP_ID, _TEXT),
)  # fmt: skip
_FIRST_FIELDS: Final = tuple(_FIELDS[:count] for count in range(len(_FIELDS) + 1))


def properties(
    data: bytes, at: int, end: int, headers: list[Header], destination: Destination
) -> tuple[bytes | None, int | None, int | None]:
    """Append headers for the properties from `at` to `end`; return (group-id, absolute-expiry-time, creation-time).

    A `to` that equals the link's address is omitted. A user-id must be that of the destination.

    Raises:
        DecodeError: the list does not match part 3.2.4.
        Unmappable: DENIED, the user-id is not the authenticated one.
    """
    count, place = _items(data, at, end)
    if count >= len(_FIRST_FIELDS) or data[at] not in (0xC0, 0xD0, 0x45):
        raise DecodeError("properties that are no list, or too many")
    group: bytes | None = None
    absolute: int | None = None
    created: int | None = None
    text: bytes | None
    append = headers.append
    try:
        for name, kind in _FIRST_FIELDS[count]:
            code = data[place]
            if code == 0x40:
                place += 1
            elif kind <= _ID:
                if code in (0xA1, 0xA3):
                    start = place + 2
                    place = start + data[place + 1]
                    text = checked_text(data[start:place])
                    if kind == _ID and text.startswith(ID_PREFIX):
                        text = STRING_ID + text
                elif kind == _ID:
                    text, place = id_text(data, place, end)
                elif code in (0xB1, 0xB3):
                    value, place = decode(data, place, end)
                    text = value.encode()
                else:
                    raise DecodeError(f"property {name} of type 0x{code:02x}")
                if kind == _GROUP:
                    group = text
                if kind != _TO or text != destination.address_bytes:
                    append((name, text))
            elif kind >= _ABSOLUTE_EXPIRY:
                if code != 0x83 or place + 9 > end:
                    raise DecodeError("a time that is no timestamp")
                time = int.from_bytes(data[place + 1 : place + 9], "big", signed=True)
                place += 9
                if kind == _CREATION:
                    created = time
                else:
                    absolute = time
            else:
                value, place = decode(data, place, end)
                if kind == _USER_ID:
                    if type(value) is not bytes:
                        raise DecodeError("a user-id that is not binary")
                    if value != destination.user.encode():
                        raise Unmappable(Outcome.DENIED, "the message's user-id is not the authenticated one")
                    append((name, value))
                else:
                    if type(value) is not int:
                        raise DecodeError("a group-sequence that is no integer")
                    append((name, b"%d" % value))
    except IndexError:
        raise DecodeError("properties end too early") from None
    if place != end:
        raise DecodeError("properties that are longer or shorter than their list")
    return group, absolute, created


def _items(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return (count, offset of the first item) of the list or map at `at` in a section. Raises DecodeError."""
    if data[at] in (0xC0, 0xC1) and at + 3 <= end:
        return data[at + 2], at + 3
    if data[at] in (0xD0, 0xD1) and at + 9 <= end:
        return int.from_bytes(data[at + 5 : at + 9], "big"), at + 9
    if data[at] == 0x45:
        return 0, at + 1
    raise DecodeError("neither a list nor a map with a count")


def application_properties(data: bytes, at: int, end: int, headers: list[Header]) -> None:
    """Append one header per entry of the map at `at`, and the header `amqp.types` unless all are strings.

    Raises:
        DecodeError: the map does not match part 3.2.5.
    """
    count, place = _items(data, at, end)
    if count % 2 or data[at] not in (0xC1, 0xD1):
        raise DecodeError("application properties that are no map")
    letters = ""
    try:
        for _ in range(count // 2):
            start, place = _string(data, place, end)
            name = header_name(data[start:place])
            letter, value, place = property_text(data, place, end)
            if letter != UNREADABLE_TYPE:
                headers.append((name, value))
            letters += letter
    except IndexError:
        raise DecodeError("application properties end too early") from None
    if place != end:
        raise DecodeError("application properties that are longer or shorter than their map")
    if letters.strip(STRING_TYPE):
        headers.append((AMQP_TYPES, letters.replace(UNREADABLE_TYPE, "").encode()))


def _string(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return (start, end) of the content of the string at `at`."""
    if data[at] == 0xA1:
        start = at + 2
        after = start + data[at + 1]
    elif data[at] == 0xB1:
        start = at + 5
        after = start + int.from_bytes(data[at + 1 : start], "big")
    else:
        raise DecodeError("a property's name that is no string")
    if after > end:
        raise DecodeError("a property's name ends too early")
    return start, after
