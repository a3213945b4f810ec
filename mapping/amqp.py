"""From an AMQP message to a record: the value as it is, readable headers, and a side-car with the exact bytes.

The side-car, header `amqp.sections`, holds what the readable headers may not restore to the byte: header, message
annotations, properties, application properties and footer (delivery annotations are hop by hop, part 3.2.2). It is
written when there is any such section; a message of one Data section has none. `mapping.amqp_out` is the way back.

Pure: the same bytes give the same record, and the time comes as an argument.
"""

from __future__ import annotations

import functools
from typing import Final

import msgspec

from mapping import amqp_body
from mapping.amqp_values import (
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
    AMQP_BODY,
    AMQP_DURABLE,
    AMQP_PRIORITY,
    AMQP_SECTIONS,
    AMQP_TYPES,
    CONTENT_ENCODING,
    CONTENT_TYPE,
    CORRELATION_ID,
    CREATION_TIME,
    EXPIRY,
    GROUP_ID,
    GROUP_SEQUENCE,
    GW_CLIENT,
    GW_PROTOCOL,
    MESSAGE_ID,
    REPLY_TO,
    REPLY_TO_GROUP_ID,
    SUBJECT,
    TO,
    USER_ID,
    Header,
    Headers,
    Record,
)
from protocols.amqp.primitives import DecodeError, Pairs, Timestamp, compound, decode, decode_items
from protocols.amqp.sections import (
    APPLICATION_PROPERTIES,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    Section,
    scan,
)

PROTOCOL: Final = b"amqp10"
DEFAULT_PRIORITY: Final = 4  # part 3.2.1
CREATION_WINDOW_MS: Final = 24 * 3600 * 1000
"""How old a creation-time may be to become the record's timestamp: retention counts from there, and a record must not
be deleted as soon as it was acknowledged. Older ones are kept in the header `creation-time`."""
_FOREVER: Final = 2**63 - 1

KEY_ANNOTATIONS: Final = ("x-opt-bridge.key", "x-opt-partition-key")
PARTITION_ANNOTATION: Final = "x-opt-bridge.partition"
DELAY_ANNOTATIONS: Final = ("x-opt-delivery-time", "x-opt-delivery-delay")


class Unmappable(Exception):  # noqa: N818 - it is an outcome, not an error of ours
    """The message becomes no record. `outcome` says what to answer, `reason` is one line for the client."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class Destination(msgspec.Struct, frozen=True):
    """Where the messages of one link go, and what all its records share.

    Attributes:
        topic: the Kafka topic.
        address_bytes: the link's address as the client wrote it, in UTF-8.
        partition: from the address, or None.
        key: for messages without a key of their own.
        user: the authenticated name: a message's user-id must be the same.
        headers: `gw.protocol` and `gw.client`.
        before_ms, after_ms: how far from now the topic lets a timestamp be.
        partitions: of the topic; an explicit partition must be below it.
    """

    topic: str
    address_bytes: bytes
    partition: int | None
    key: bytes | None
    user: str
    headers: Headers
    before_ms: int = _FOREVER
    after_ms: int = _FOREVER
    partitions: int = 1 << 31


def gateway_headers(container_id: str) -> Headers:
    """The headers that say by which protocol and from whom a record came."""
    return ((GW_PROTOCOL, PROTOCOL), (GW_CLIENT, container_id.encode()))


def to_record(data: bytes, destination: Destination, now_ms: int) -> Record:
    """The record of a message.

    Args:
        data: all sections of the message, as received.
        destination: see `Destination`.
        now_ms: the wall clock, epoch milliseconds.

    Raises:
        Unmappable: UNFIT, DENIED or EXPIRED.
    """
    # One short Data section and nothing else: nothing to decode.
    if data[:4] == b"\x00\x53\x75\xa0" and len(data) > 4 and data[4] == len(data) - 5:
        return Record(destination.topic, destination.key, data[5:], destination.headers, None, destination.partition)
    try:
        return _to_record(data, destination, now_ms)
    except DecodeError as error:
        raise Unmappable(Outcome.UNFIT, str(error)) from None


def _to_record(data: bytes, destination: Destination, now_ms: int) -> Record:
    headers: list[Header] = list(destination.headers)
    body: list[Section] = []
    sidecar: list[bytes] = []
    key, partition = destination.key, destination.partition
    timestamp: int | None = None
    own_key = False
    expiry: int | None = None
    footer = b""
    for section in scan(data):
        code, start, at, end = section
        if code == APPLICATION_PROPERTIES:
            sidecar.append(data[start:end])
            _application_properties(data, at, end, headers)
        elif code == PROPERTIES:
            sidecar.append(data[start:end])
            group, absolute, created = _properties(data, at, end, headers, destination)
            if group is not None and not own_key:
                key = group
            if absolute is not None:
                expiry = absolute if expiry is None else min(expiry, absolute)
            if created is not None:
                oldest = now_ms - min(destination.before_ms, CREATION_WINDOW_MS)
                if oldest <= created <= now_ms + destination.after_ms:
                    timestamp = created
                else:
                    headers.append((CREATION_TIME, str(created).encode()))
        elif code == HEADER:
            sidecar.append(data[start:end])
            durable, priority, ttl = _header(data[at:end])
            if durable:
                headers.append((AMQP_DURABLE, b"1"))
            if priority != DEFAULT_PRIORITY:
                headers.append((AMQP_PRIORITY, str(priority).encode()))
            if ttl is not None:
                expiry = now_ms + ttl
        elif code == MESSAGE_ANNOTATIONS:
            sidecar.append(data[start:end])
            found_key, found_partition = _annotations(data, at, end)
            if found_key is not None:
                key, own_key = found_key, True
            if found_partition is not None:
                partition = found_partition
        elif code == FOOTER:
            decode(data, at, end)
            footer = data[start:end]
        elif code != DELIVERY_ANNOTATIONS:
            body.append(section)
    if partition is not None and not 0 <= partition < destination.partitions:
        raise Unmappable(Outcome.UNFIT, f"partition {partition} of {destination.partitions}")
    mapped = amqp_body.to_value(data, body)
    if expiry is not None:
        if expiry <= now_ms:
            raise Unmappable(Outcome.EXPIRED, "its time to live was over when it came")
        headers.append((EXPIRY, str(expiry).encode()))
    if mapped.form is not None:
        headers.append((AMQP_BODY, mapped.form))
        if mapped.is_json and not any(name == CONTENT_TYPE for name, _ in headers):
            headers.append((CONTENT_TYPE, amqp_body.JSON_TYPE))
    if mapped.exact is not None:
        sidecar.append(mapped.exact)
    if footer:
        sidecar.append(footer)
    if sidecar:
        headers.append((AMQP_SECTIONS, b"".join(sidecar)))
    return Record(destination.topic, key, mapped.value, tuple(headers), timestamp, partition)


@functools.lru_cache(maxsize=1024)
def _header(value: bytes) -> tuple[bool, int, int | None]:
    """(durable, priority, ttl in ms) of a header section's list; few different ones are ever sent."""
    items = [*decode_items(value, 0, len(value)), None, None, None]
    durable, priority, ttl = items[:3]
    if priority is None:
        priority = DEFAULT_PRIORITY
    if not isinstance(durable, bool | None) or type(priority) is not int or not isinstance(ttl, int | None):
        raise DecodeError("a header with wrong fields")
    return bool(durable), priority, ttl


# The properties in order (part 3.2.4), by the header that carries them.
_FIELD_NAMES: Final = (
    MESSAGE_ID, USER_ID, TO, SUBJECT, REPLY_TO, CORRELATION_ID, CONTENT_TYPE, CONTENT_ENCODING, EXPIRY, CREATION_TIME,
    GROUP_ID, GROUP_SEQUENCE, REPLY_TO_GROUP_ID,
)  # fmt: skip
_FIELDS: Final = len(_FIELD_NAMES)
_USER_ID, _TO, _ABSOLUTE_EXPIRY, _GROUP, _SEQUENCE = 1, 2, 8, 10, 11
_IDS: Final = frozenset({0, 5})
_TEXTS: Final = frozenset({2, 3, 4, 6, 7, 10, 12})
_TEXT_OR_ID: Final = _IDS | _TEXTS
_SHORT_TEXTS: Final = (0xA1, 0xA3)  # constructors of a string and a symbol below 256 bytes


def _properties(
    data: bytes, at: int, end: int, headers: list[Header], destination: Destination
) -> tuple[bytes | None, int | None, int | None]:
    """Append the headers of the properties; (group-id, absolute-expiry-time, creation-time)."""
    count, place, end = compound(data, at, end)
    if count > _FIELDS:
        raise DecodeError("too many properties")
    group: bytes | None = None
    absolute: int | None = None
    created: int | None = None
    for index in range(count):
        if place >= end:
            raise DecodeError("properties end too early")
        code = data[place]
        if code == 0x40:
            place += 1
            continue
        name = _FIELD_NAMES[index]
        if code in _SHORT_TEXTS and index in _TEXT_OR_ID and place + 1 < end:
            start, place = place + 2, place + 2 + data[place + 1]
            text = data[start:place]
            if place > end:
                raise DecodeError("properties end too early")
            if not text.isascii():
                checked_text(text)
            if index in _IDS:
                if text.startswith(ID_PREFIX):
                    text = STRING_ID + text
            elif index == _GROUP:
                group = text
            if index != _TO or text != destination.address_bytes:
                headers.append((name, text))
        elif index in _TEXTS:
            if code not in (0xB1, 0xB3):
                raise DecodeError(f"property {name} of type 0x{code:02x}")
            value, place = decode(data, place, end)
            text = value.encode()
            if index == _GROUP:
                group = text
            if index != _TO or text != destination.address_bytes:
                headers.append((name, text))
        elif index in _IDS:
            found, place = id_text(data, place, end)
            headers.append((name, found))
        else:
            value, place = decode(data, place, end)
            if index == _USER_ID:
                if type(value) is not bytes:
                    raise DecodeError("a user-id that is not binary")
                if value != destination.user.encode():
                    raise Unmappable(Outcome.DENIED, "the message's user-id is not the authenticated one")
                headers.append((USER_ID, value))
            elif index == _SEQUENCE:
                if type(value) is not int:
                    raise DecodeError("a group-sequence that is no integer")
                headers.append((GROUP_SEQUENCE, b"%d" % value))
            elif type(value) is not Timestamp:
                raise DecodeError("a time that is no timestamp")
            elif index == _ABSOLUTE_EXPIRY:
                absolute = int(value)
            else:
                created = int(value)
    if place != end:
        raise DecodeError("bytes behind the last property")
    return group, absolute, created


def _application_properties(data: bytes, at: int, end: int, headers: list[Header]) -> None:
    count, place, end = compound(data, at, end)
    if count % 2 or data[at] not in (0xC1, 0xD1):
        raise DecodeError("application properties that are no map")
    letters: list[str] = []
    plain = True
    for _ in range(count // 2):
        if place + 1 < end and data[place] == 0xA1:
            start, place = place + 2, place + 2 + data[place + 1]
        else:
            start, place = _string(data, place, end)
        name = header_name(data[start:place])
        if place + 1 < end and data[place] == 0xA1:
            start, place = place + 2, place + 2 + data[place + 1]
            if place > end:
                raise DecodeError("application properties end too early")
            text = data[start:place]
            headers.append((name, text if text.isascii() else checked_text(text)))
            letters.append(STRING_TYPE)
            continue
        if place >= end:
            raise DecodeError("application properties end too early")
        letter, value, place = property_text(data, place, end)
        if letter != STRING_TYPE:
            plain = False
        if letter != UNREADABLE_TYPE:
            headers.append((name, value))
            letters.append(letter)
    if place != end:
        raise DecodeError("bytes behind the last application property")
    if not plain:
        headers.append((AMQP_TYPES, "".join(letters).encode()))


def _string(data: bytes, at: int, end: int) -> tuple[int, int]:
    """(start, end) of the string's bytes at `at`."""
    if at + 1 < end and data[at] == 0xA1:
        start, after = at + 2, at + 2 + data[at + 1]
    elif at + 4 < end and data[at] == 0xB1:
        start, after = at + 5, at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
    else:
        raise DecodeError("a property's name that is no string")
    if after > end:
        raise DecodeError("a property's name ends too early")
    return start, after


def _annotations(data: bytes, at: int, end: int) -> tuple[bytes | None, int | None]:
    """(key, partition) of message annotations."""
    annotations = decode(data, at, end)[0]
    if not isinstance(annotations, Pairs):
        raise DecodeError("message annotations that are no map")
    key: bytes | None = None
    partition: int | None = None
    bridge, event_hubs = KEY_ANNOTATIONS
    for name, value in annotations:
        if name == bridge or (name == event_hubs and key is None):
            if isinstance(value, str):
                key = value.encode()
            elif isinstance(value, bytes):
                key = value
            elif value is not None:
                raise DecodeError(f"{name} is neither string nor binary")
        elif name == PARTITION_ANNOTATION and value is not None:
            if type(value) is not int:
                raise DecodeError(f"{name} is no integer")
            partition = value
        elif name in DELAY_ANNOTATIONS:
            raise Unmappable(Outcome.UNFIT, "delayed delivery is not offered")
    return key, partition
