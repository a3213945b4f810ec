"""Mapping a record to an AMQP message.

With a sections header the message is delivered as it was sent, except that the gateway sets header.ttl and
header.delivery-count and adds the record's coordinates to the message annotations, which an intermediary may change
(part 3.2.3). Without one (a record from MQTT, HTTP or any Kafka client) the headers become properties and application
properties.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from struct import Struct
from typing import Final, TypeVar

import msgspec

from mapping.amqp import body as amqp_body
from mapping.amqp.values import id_value, property_name, property_value, text_or_binary
from mapping.record import (
    AMQP_BODY,
    AMQP_PRIORITY,
    AMQP_SECTIONS,
    AMQP_TYPES,
    CONTENT_ENCODING,
    CONTENT_TYPE,
    CORRELATION_ID,
    CREATION_TIME,
    DEAD_LETTER_PREFIX,
    DEAD_LETTER_TOPIC,
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
    Received,
)
from protocols.amqp import primitives
from protocols.amqp.primitives import DecodeError, compound, decode, skip
from protocols.amqp.sections import (
    APPLICATION_PROPERTIES,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    scan,
)

_Result = TypeVar("_Result")
_UINT_LIMIT: Final = 1 << 32
_LONG_LIMIT: Final = 1 << 63
TOMBSTONE: Final = primitives.symbol("x-opt-bridge.tombstone") + primitives.TRUE
_TOPIC: Final = primitives.symbol("x-opt-bridge.topic")
_PARTITION: Final = primitives.symbol("x-opt-bridge.partition")
KEY: Final = primitives.symbol("x-opt-bridge.key")
_AFTER_PARTITION: Final = primitives.symbol("x-opt-bridge.offset") + b"\x81"
AFTER_OFFSET: Final = primitives.symbol("x-opt-sequence-number") + b"\x81"
AFTER_SEQUENCE: Final = primitives.symbol("x-opt-enqueued-time") + b"\x83"
DEAD_LETTER_ANNOTATION: Final = "x-opt-dead-letter-"
EVENT_HUBS_OFFSET: Final = primitives.symbol("x-opt-offset") + b"\xa1"
ANNOTATIONS: Final = b"\x00\x53\x72\xd1"
_signed: Final = Struct(">q").pack
_CACHED_BYTES: Final = 100  # parts of stored sections up to this size are cached
_SPECIAL: Final = frozenset({AMQP_SECTIONS, AMQP_BODY, EXPIRY, DEAD_LETTER_TOPIC})
_COORDINATES: Final = 7
COORDINATE_NAMES: Final = frozenset(
    {
        "x-opt-bridge.topic", "x-opt-bridge.partition", "x-opt-bridge.key", "x-opt-bridge.offset",
        "x-opt-sequence-number", "x-opt-enqueued-time", "x-opt-offset", "x-opt-bridge.tombstone",
    }
)  # fmt: skip
PLAIN_HEADER: Final = b"\x00\x53\x70\xc0\x02\x01\x41"  # only durable=true: the message comes from a log


class _StoredSections(msgspec.Struct, frozen=True):
    """A parsed sections header."""

    header: bytes = b""  # the encoded section
    header_items: tuple[bytes, ...] = ()  # the encoded items of its list
    annotations: bytes = b""  # the encoded items of the sender's own message annotations
    items: int = 0  # how many items `annotations` has
    bare: bytes = b""  # the encoded sections properties and application properties
    body: bytes | None = None  # the encoded body sections, if they are stored
    footer: bytes = b""  # the encoded section


def from_record(record: Received, now_ms: int, delivery_count: int = 0) -> bytes | None:
    """Map a record to a message; None when it has expired at `now_ms` (epoch).

    `delivery_count` is the number of failed attempts (part 3.2.1).
    """
    headers, value = record.headers, record.value
    stored: _StoredSections | None = None
    form: bytes | None = None
    ttl: int | None = None
    dead = False
    for name, content in headers:
        if name == AMQP_SECTIONS:
            stored = _parse_stored(content) if content else None
        elif name == AMQP_BODY:
            form = content
        elif name == EXPIRY:
            expiry = _number(content, _LONG_LIMIT)
            if expiry is not None:
                ttl = expiry - now_ms
                if ttl <= 0:
                    return None
                if ttl >= _UINT_LIMIT:
                    ttl = None  # more than header.ttl can hold: 2**32 ms, seven weeks
        elif name == DEAD_LETTER_TOPIC:
            dead = True
    if stored is not None:
        header = _rewritten(stored, ttl, delivery_count)
        bare, footer, exact = stored.bare, stored.footer, stored.body
        own, own_count = stored.annotations, stored.items
    else:
        header = PLAIN_HEADER if ttl is None and not delivery_count else _new_header(record, ttl, delivery_count)
        bare = _from_headers(headers) if headers else b""
        own, own_count, footer, exact = b"", 0, b"", None
    tombstone = value is None and form != b"v:null"
    origin = _origin(headers) if dead else ()
    offset = _signed(record.offset)
    number = b"%d" % record.offset
    items = b"".join(
        (
            own,
            partition_head(record.topic, record.partition) + offset,
            AFTER_OFFSET + offset,
            AFTER_SEQUENCE + _signed(record.timestamp),
            EVENT_HUBS_OFFSET + bytes((len(number),)) + number,
            KEY + (primitives.NULL if record.key is None else text_or_binary(record.key)),
            TOMBSTONE if tombstone else b"",
            *origin,
        )
    )
    count = own_count + 2 * (_COORDINATES + tombstone) + len(origin)
    annotations = ANNOTATIONS + (len(items) + 4).to_bytes(4, "big") + count.to_bytes(4, "big") + items
    return b"".join((header, annotations, bare, amqp_body.from_value(value, form, exact), footer))


def _origin(headers: tuple[Header, ...]) -> tuple[bytes, ...]:
    """Encode a dead letter's origin and reason as annotations; its bare message is that of the original record."""
    items: list[bytes] = []
    for name, value in headers:
        if name.startswith(DEAD_LETTER_PREFIX) and value is not None:
            items.append(primitives.symbol(DEAD_LETTER_ANNOTATION + name[len(DEAD_LETTER_PREFIX) :]))
            items.append(text_or_binary(value))
    return tuple(items)


@functools.lru_cache(maxsize=4096)
def partition_head(topic: str, partition: int) -> bytes:
    """Encode the items of the annotations before the value of the offset."""
    return _TOPIC + primitives.string(topic) + _PARTITION + primitives.integer(partition) + _AFTER_PARTITION


def few_headers(headers: tuple[Header, ...]) -> bytes | None:
    """Encode the bare message's sections before the body, for a record without special AMQP headers; else None."""
    return None if any(name in _SPECIAL for name, _ in headers) else _from_headers(headers)


short_headers: Final = functools.lru_cache(maxsize=4096)(few_headers)
"""The same for headers of at most 400 bytes together: many records share theirs."""


def _cached(split: Callable[[bytes], _Result]) -> Callable[[bytes], _Result]:
    """Cache the results for short arguments, which many messages share."""
    cached = functools.lru_cache(maxsize=1024)(split)
    return lambda kept: cached(kept) if len(kept) <= _CACHED_BYTES else split(kept)


@_cached
def _without_coordinates(kept: bytes) -> tuple[bytes, int]:
    """Return the encoded items of an annotations' map and their number, without the annotations that we set."""
    count, place, end = compound(kept, 0, len(kept))
    items: list[bytes] = []
    for _ in range(count // 2):
        start = place
        name, place = decode(kept, place, end)
        place = skip(kept, place, end)
        if not isinstance(name, str) or not (name in COORDINATE_NAMES or name.startswith(DEAD_LETTER_ANNOTATION)):
            items.append(kept[start:place])
    return b"".join(items), 2 * len(items)


@_cached
def _header_items(kept: bytes) -> tuple[bytes, ...]:
    """Return the encoded items of a header's list. Raises DecodeError."""
    count, place, end = compound(kept, 0, len(kept))
    items: list[bytes] = []
    for _ in range(count):
        start = place
        _, place = decode(kept, place, end)
        items.append(kept[start:place])
    if place != end:
        raise DecodeError("a header that is longer or shorter than its list")
    return tuple(items)


def _parse_stored(data: bytes) -> _StoredSections | None:
    """Parse a sections header; None when the gateway did not write it (the readable headers are used instead)."""
    try:
        header = annotations = bare = body = footer = b""
        header_items: tuple[bytes, ...] = ()
        count = 0
        for code, start, at, end in scan(data):
            if code == HEADER:
                header, header_items = data[start:end], _header_items(data[at:end])
            elif code == MESSAGE_ANNOTATIONS:
                annotations, count = _without_coordinates(data[at:end])
            elif code in (PROPERTIES, APPLICATION_PROPERTIES):
                bare += data[start:end]
            elif code == FOOTER:
                footer = data[start:end]
            elif code == DELIVERY_ANNOTATIONS:
                return None
            else:
                body += data[start:end]
        return _StoredSections(header, header_items, annotations, count, bare, body or None, footer)
    except DecodeError:
        return None


def _rewritten(stored: _StoredSections, ttl: int | None, delivery_count: int) -> bytes:
    """Return a header section with our ttl and delivery-count (part 3.2.1: intermediaries change both)."""
    items = stored.header_items
    if ttl is None and not delivery_count and len(items) <= 2:
        return stored.header
    durable, priority, _, first, _ = (*items, *(primitives.NULL,) * 5)[:5]
    return _header((durable, priority), ttl, delivery_count, first)


def _new_header(record: Received, ttl: int | None, delivery_count: int) -> bytes:
    priority = next((_number(value, 256) for name, value in record.headers if name == AMQP_PRIORITY), None)
    encoded = primitives.NULL if priority is None else primitives.ubyte(priority)
    return _header((primitives.TRUE, encoded), ttl, delivery_count, primitives.NULL)


def _header(first_two: tuple[bytes, bytes], ttl: int | None, delivery_count: int, acquirer: bytes) -> bytes:
    items = [
        *first_two,
        primitives.NULL if ttl is None else primitives.uint(ttl),
        acquirer if not delivery_count else primitives.FALSE,
        primitives.NULL if not delivery_count else primitives.uint(delivery_count),
    ]
    while items and items[-1] == primitives.NULL:
        items.pop()
    return primitives.described(HEADER, primitives.list_of(items))


_INDEX: Final = {
    MESSAGE_ID: 0, USER_ID: 1, TO: 2, SUBJECT: 3, REPLY_TO: 4, CORRELATION_ID: 5, CONTENT_TYPE: 6,
    CONTENT_ENCODING: 7, CREATION_TIME: 9, GROUP_ID: 10, GROUP_SEQUENCE: 11, REPLY_TO_GROUP_ID: 12,
}  # fmt: skip
_SYMBOLS: Final = (6, 7)


def _from_headers(headers: tuple[Header, ...]) -> bytes:
    """Encode a record's headers as properties and application properties."""
    fields: dict[int, bytes] = {}
    own: list[tuple[str, bytes | None]] = []
    types: str | None = None
    for stored, value in headers:
        index = _INDEX.get(stored)
        if index is not None:
            if value is not None and index not in fields:
                encoded = _field(index, value)
                if encoded is not None:
                    fields[index] = encoded
            continue
        if stored == AMQP_TYPES and value is not None:
            types = value.decode("ascii", "replace")
            continue
        name = property_name(stored)
        if name is not None:
            own.append((name, value))
    parts: list[bytes] = []
    if fields:
        items = [fields.get(index, primitives.NULL) for index in range(max(fields) + 1)]
        parts.append(primitives.described(PROPERTIES, primitives.list_of(items)))
    if own:
        letters = types if types is not None and len(types) == len(own) else None
        pairs: list[bytes] = []
        taken: dict[str, int] = {}  # the last number behind each name
        for place, (name, value) in enumerate(own):
            unique, number = name, taken.get(name, 0)
            while unique in taken:  # a map must not repeat a name; Kafka's headers may
                number += 1
                unique = f"{name}.{number}"
            taken[unique] = 0
            taken[name] = number
            pairs.append(primitives.string(unique))
            pairs.append(property_value(None if letters is None else letters[place], value))
        parts.append(primitives.described(APPLICATION_PROPERTIES, primitives.map_of(pairs)))
    return b"".join(parts)


def _field(index: int, value: bytes) -> bytes | None:
    """Encode a header's value as a property; None when the property's type cannot represent it."""
    if index in (0, 5):
        return id_value(value)
    if index == 1:
        return primitives.binary(value)
    if index == 9:
        created = _number(value, _LONG_LIMIT)
        return None if created is None else primitives.timestamp(created)
    if index == 11:
        number = _number(value, _UINT_LIMIT)
        return None if number is None else primitives.uint(number)
    try:
        text = value.decode()
        return primitives.symbol(text) if index in _SYMBOLS else primitives.string(text)
    except UnicodeError:
        return None


def _number(value: bytes | None, limit: int) -> int | None:
    """Parse a decimal number in 0..limit - 1; None for anything else."""
    if value is None or not value.isdigit() or len(value) > 19:
        return None
    number = int(value)
    return number if number < limit else None
