"""From an AMQP message to a record: the value as it is, readable headers, and a sections header with exact bytes.

The sections header, `amqp.sections`, holds what the readable headers may not restore to the byte: header, message
annotations, properties, application properties and footer (delivery annotations are hop by hop, part 3.2.2). There
is none when the way back (`mapping.amqp.outgoing`) makes the same message without it: one Data section, with or without
a header that says `durable` alone and with or without annotations that are coordinates of the record anyway.

A message whose sections begin as every client writes them, with any one body section, is taken apart in one pass; any
other one (delivery annotations, a footer, a body of several sections, other descriptors) is looked through first and
then mapped section by section. Both ways give the same record (tests compare them for what real clients send and what
is made of that). Pure: the same bytes give the same record, and the time comes as an
argument.
"""

from __future__ import annotations

from typing import Final

from mapping.amqp import body as amqp_body
from mapping.amqp.fields import (
    KEY_ALONE,
    Destination,
    Unmappable,
    annotation_fields,
    application_properties,
    header_fields,
    properties,
    short_annotation_fields,
)
from mapping.amqp.outgoing import PLAIN_HEADER
from mapping.amqp.values import checked_text
from mapping.outcomes import Outcome
from mapping.record import (
    AMQP_BODY,
    AMQP_SECTIONS,
    CONTENT_TYPE,
    CREATION_TIME,
    EXPIRY,
    GW_CLIENT,
    GW_PROTOCOL,
    Header,
    Headers,
    Record,
)
from protocols.amqp.primitives import DecodeError, compound, decode, skip
from protocols.amqp.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    SEQUENCE,
    VALUE,
    Section,
    scan,
    value_end,
)

__all__ = ["Destination", "Unmappable", "gateway_headers", "recipient", "to_record"]

PROTOCOL: Final = b"amqp10"
CREATION_WINDOW_MS: Final = 24 * 3600 * 1000
"""How old a creation-time may be to become the record's timestamp: retention counts from there, and a record must not
be deleted as soon as it was acknowledged. Older ones are kept in the header `creation-time`."""


def gateway_headers(container_id: str) -> Headers:
    """The headers that say by which protocol and from whom a record came."""
    return ((GW_PROTOCOL, PROTOCOL), (GW_CLIENT, container_id.encode()))


def to_record(data: bytes, destination: Destination, now_ms: int) -> Record:
    """The record of a message, all of its sections as received; `now_ms` is epoch milliseconds.

    Raises:
        Unmappable: UNFIT, DENIED or EXPIRED.
    """
    # One short Data section and nothing else: nothing to decode.
    if data[:4] == b"\x00\x53\x75\xa0" and len(data) > 4 and data[4] == len(data) - 5:
        return Record(destination.topic, destination.key, data[5:], destination.headers, None, destination.partition)
    try:
        return usual_record(data, destination, now_ms) or general_record(data, destination, now_ms)
    except DecodeError as error:
        raise Unmappable(Outcome.UNFIT, str(error)) from None


def recipient(data: bytes) -> str | None:
    """The `to` of a message (part 3.2.4); None when it has none; Unmappable: UNFIT."""
    try:
        for code, _, at, end in scan(data):
            if code == PROPERTIES:
                count, place, after = compound(data, at, end)
                if count <= _TO:
                    return None
                for _ in range(_TO):
                    place = skip(data, place, after)
                address, _ = decode(data, place, after)
                if address is not None and type(address) is not str:
                    raise DecodeError("a property `to` that is no string")
                return address
    except DecodeError as error:
        raise Unmappable(Outcome.UNFIT, str(error)) from None
    return None


_TO: Final = 2  # its place among the properties

# The beginnings of sections in the usual form: a numeric descriptor in two bytes, then an empty list or a compound.
_HEADER: Final = frozenset({b"\x00\x53\x70\xc0", b"\x00\x53\x70\x45", b"\x00\x53\x70\xd0"})
_ANNOTATIONS: Final = frozenset({b"\x00\x53\x72\xc1", b"\x00\x53\x72\xd1"})
_PROPERTIES: Final = frozenset({b"\x00\x53\x73\xc0", b"\x00\x53\x73\x45", b"\x00\x53\x73\xd0"})
_APPLICATION: Final = frozenset({b"\x00\x53\x74\xc1", b"\x00\x53\x74\xd1"})
_DATA: Final = b"\x00\x53\x75\xa0"
_TEXT: Final = b"\x00\x53\x77\xa1"
_JSON_CONTENT: Final = (CONTENT_TYPE, amqp_body.JSON_TYPE)
_FEW_BYTES: Final = 256  # of message annotations that are worth remembering
_TEXT_FORM: Final = (AMQP_BODY, b"v:str")
_BODIES: Final = {b"\x00\x53\x75": DATA, b"\x00\x53\x76": SEQUENCE, b"\x00\x53\x77": VALUE}


def usual_record(data: bytes, destination: Destination, now_ms: int) -> Record | None:
    """The record of a message of some sections in their usual form and one body section; None for any other.

    Raises:
        DecodeError, Unmappable: as `to_record`.
    """
    size = len(data)
    headers: list[Header] = []  # beside the destination's
    key, partition = destination.key, destination.partition
    expiry: int | None = None
    timestamp: int | None = None
    own_key = False
    exact = False
    at = 0
    start = data[:4]
    if start in _HEADER:
        at = 5 + data[4] if start[3] == 0xC0 and size > 4 else _end(data, 0)
        more, ttl = header_fields(data[3:at])
        headers += more
        if ttl is not None:
            expiry = now_ms + ttl
        exact = data[:at] != PLAIN_HEADER
        start = data[at : at + 4]
    if start in _ANNOTATIONS:
        begin = at
        at = at + 5 + data[at + 4] if start[3] == 0xC1 and at + 4 < size else _end(data, at)
        found: bytes | None
        place: int | None = None
        if (
            data[begin + 5 : begin + 25] == KEY_ALONE
            and begin + 25 < at <= size
            and data[begin + 25] == at - begin - 26
        ):
            found = checked_text(data[begin + 26 : at])
        else:
            fields = annotation_fields if at - begin > _FEW_BYTES else short_annotation_fields
            found, place, others = fields(data[begin + 3 : at])
            exact = exact or others
        if found is not None:
            key, own_key = found, True
        if place is not None:
            partition = place
        start = data[at : at + 4]
    if start in _PROPERTIES:
        begin, at = at + 3, _end(data, at)
        group, absolute, created = properties(data, begin, at, headers, destination)
        if group is not None and not own_key:
            key = group
        if absolute is not None:
            expiry = absolute if expiry is None else min(expiry, absolute)
        if created is not None:
            timestamp = creation_timestamp(created, headers, destination, now_ms)
        exact = True
        start = data[at : at + 4]
    if start in _APPLICATION:
        begin, at = at + 3, _end(data, at)
        application_properties(data, begin, at, headers)
        exact = True
        start = data[at : at + 4]
    # The body must be all that is left.
    value: bytes | None
    form: Header | None = None
    exact_end = at  # of the sections header
    body_is_json = False
    if at + 4 < size and start == _DATA and at + 5 + data[at + 4] == size:
        value = data[at + 5 :]
    elif at + 4 < size and start == _TEXT and at + 5 + data[at + 4] == size:
        value = data[at + 5 :]
        if not value.isascii():
            checked_text(value)
        form = _TEXT_FORM
    else:
        code = _BODIES.get(start[:3])
        if code is None or value_end(data, at + 3, size) != size:
            return None
        mapped = amqp_body.to_value(data, [(code, at, at + 3, size)])
        value, body_is_json = mapped.value, mapped.is_json
        if mapped.form is not None:
            form = AMQP_BODY, mapped.form
        if mapped.exact is not None:
            exact, exact_end = True, size
    if partition is not None:
        _check_partition(partition, destination)
    if expiry is not None:
        headers.append(_expiry(expiry, now_ms))
    if form is not None:
        headers.append(form)
        if body_is_json and not _has_content_type(headers):
            headers.append(_JSON_CONTENT)
    if exact:
        headers.append((AMQP_SECTIONS, data[:exact_end]))
    # The same object where it can be: Kafka's batch writes it once for many records.
    all_headers = (*destination.headers, *headers) if headers else destination.headers
    return Record(destination.topic, key, value, all_headers, timestamp, partition)


def general_record(data: bytes, destination: Destination, now_ms: int) -> Record:
    """The record of any message; decodeError, Unmappable: as `to_record`."""
    headers: list[Header] = list(destination.headers)
    body: list[Section] = []
    sidecar: list[bytes] = []
    key, partition = destination.key, destination.partition
    timestamp: int | None = None
    own_key = False
    expiry: int | None = None
    footer = b""
    exact = False  # whether the sections header is needed
    for section in scan(data):
        code, start, at, end = section
        if code == APPLICATION_PROPERTIES:
            sidecar.append(data[start:end])
            application_properties(data, at, end, headers)
            exact = True
        elif code == PROPERTIES:
            sidecar.append(data[start:end])
            group, absolute, created = properties(data, at, end, headers, destination)
            if group is not None and not own_key:
                key = group
            if absolute is not None:
                expiry = absolute if expiry is None else min(expiry, absolute)
            if created is not None:
                timestamp = creation_timestamp(created, headers, destination, now_ms)
            exact = True
        elif code == HEADER:
            sidecar.append(data[start:end])
            more, ttl = header_fields(data[at:end])
            headers += more
            if ttl is not None:
                expiry = now_ms + ttl
            exact = data[start:end] != PLAIN_HEADER
        elif code == MESSAGE_ANNOTATIONS:
            sidecar.append(data[start:end])
            found_key, found_partition, others = annotation_fields(data[at:end])
            if found_key is not None:
                key, own_key = found_key, True
            if found_partition is not None:
                partition = found_partition
            exact = exact or others
        elif code == FOOTER:
            decode(data, at, end)
            footer = data[start:end]
        elif code != DELIVERY_ANNOTATIONS:
            body.append(section)
    if partition is not None:
        _check_partition(partition, destination)
    mapped = amqp_body.to_value(data, body)
    if expiry is not None:
        headers.append(_expiry(expiry, now_ms))
    if mapped.form is not None:
        headers.append((AMQP_BODY, mapped.form))
        if mapped.is_json and not _has_content_type(headers):
            headers.append(_JSON_CONTENT)
    if mapped.exact is not None:
        sidecar.append(mapped.exact)
    if footer:
        sidecar.append(footer)
    if exact or mapped.exact is not None or footer:
        headers.append((AMQP_SECTIONS, b"".join(sidecar)))
    return Record(destination.topic, key, mapped.value, tuple(headers), timestamp, partition)


def _end(data: bytes, at: int) -> int:
    """Where the compound section at `at` ends, whose descriptor takes three bytes. Raises DecodeError."""
    if data[at + 3] == 0x45:
        return at + 4
    if data[at + 3] < 0xD0:
        after = at + 5 + int.from_bytes(data[at + 4 : at + 5], "big")
    else:
        after = at + 8 + int.from_bytes(data[at + 4 : at + 8], "big")
    if after > len(data):
        raise DecodeError("a section ends too early")
    return after


def _has_content_type(headers: list[Header]) -> bool:
    return any(name == CONTENT_TYPE for name, _ in headers)


def _check_partition(partition: int, destination: Destination) -> None:
    if not 0 <= partition < destination.partitions:
        raise Unmappable(Outcome.UNFIT, f"partition {partition} of {destination.partitions}")


def _expiry(expiry: int, now_ms: int) -> Header:
    if expiry <= now_ms:
        raise Unmappable(Outcome.EXPIRED, "its time to live was over when it came")
    return EXPIRY, b"%d" % expiry


def creation_timestamp(created: int, headers: list[Header], destination: Destination, now_ms: int) -> int | None:
    """The record's timestamp for a creation-time (ms); one that the topic would not take becomes a header."""
    oldest = now_ms - min(destination.before_ms, CREATION_WINDOW_MS)
    if oldest <= created <= now_ms + destination.after_ms:
        return created
    headers.append((CREATION_TIME, b"%d" % created))
    return None
