"""Mapping an AMQP message to a record: the body as the value, readable headers, and a sections header with exact bytes.

The sections header, `amqp.sections`, stores the encoded header, message annotations, properties, application properties
and footer, because the readable headers may not restore them byte for byte (delivery annotations are hop by hop, part
3.2.2). It is omitted when `mapping.amqp.outgoing` makes the same message without it: the message is one Data section,
optionally with a header that only sets `durable` and with annotations that only repeat the record's coordinates.

`_native.c` does the same for messages of common clients, many times as fast, and leaves all others to this module. The
mapping is pure: the same
bytes give the same record, and the time is an argument. A record has no timestamp here: that is its arrival, which the
publisher sets (docs/adr/0101-arrival-and-watermark.md).
"""

from __future__ import annotations

from typing import Final

from mapping.amqp import body as amqp_body
from mapping.amqp.fields import (
    AmqpDestination,
    Unmappable,
    annotation_fields,
    application_properties,
    header_fields,
    properties,
)
from mapping.amqp.outgoing import PLAIN_HEADER
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
    DELIVERY_ANNOTATIONS,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    Section,
    scan,
)

__all__ = ["AmqpDestination", "Unmappable", "gateway_headers", "recipient", "to_record"]

PROTOCOL: Final = b"amqp10"


def gateway_headers(container_id: str) -> Headers:
    """Return the headers with a record's protocol and client."""
    return ((GW_PROTOCOL, PROTOCOL), (GW_CLIENT, container_id.encode()))


def to_record(data: bytes, destination: AmqpDestination, now_ms: int) -> Record:
    """Map the encoded message `data` to a record; `now_ms` is epoch milliseconds.

    Raises:
        Unmappable: UNFIT, DENIED or EXPIRED.
    """
    try:
        return _to_record(data, destination, now_ms)
    except DecodeError as error:
        raise Unmappable(Outcome.UNFIT, str(error)) from None


def recipient(data: bytes) -> str | None:
    """Return the property `to` of a message (part 3.2.4), or None if it is missing. Raises Unmappable (UNFIT)."""
    try:
        for code, _, at, end in scan(data):
            if code == PROPERTIES:
                count, start, after = compound(data, at, end)
                if count <= _TO:
                    return None
                for _ in range(_TO):
                    start = skip(data, start, after)
                address, _ = decode(data, start, after)
                if address is not None and type(address) is not str:
                    raise DecodeError("a property `to` that is no string")
                return address
    except DecodeError as error:
        raise Unmappable(Outcome.UNFIT, str(error)) from None
    return None


_TO: Final = 2  # the index of `to` in the properties
_JSON_CONTENT: Final = (CONTENT_TYPE, amqp_body.JSON_TYPE)


def _to_record(data: bytes, destination: AmqpDestination, now_ms: int) -> Record:
    headers: list[Header] = list(destination.headers)
    body: list[Section] = []
    stored: list[bytes] = []
    key, partition = destination.key, destination.partition
    own_key = False
    expiry: int | None = None
    footer = b""
    exact = False  # whether the sections header is needed
    for section in scan(data):
        code, start, at, end = section
        if code == APPLICATION_PROPERTIES:
            stored.append(data[start:end])
            application_properties(data, at, end, headers)
            exact = True
        elif code == PROPERTIES:
            stored.append(data[start:end])
            group, absolute, created = properties(data, at, end, headers, destination)
            if group is not None and not own_key:
                key = group
            if absolute is not None:
                expiry = absolute if expiry is None else min(expiry, absolute)
            if created is not None:
                headers.append((CREATION_TIME, b"%d" % created))
            exact = True
        elif code == HEADER:
            stored.append(data[start:end])
            more, ttl = header_fields(data[at:end])
            headers += more
            if ttl is not None:
                expiry = now_ms + ttl
            exact = data[start:end] != PLAIN_HEADER
        elif code == MESSAGE_ANNOTATIONS:
            stored.append(data[start:end])
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
        stored.append(mapped.exact)
    if footer:
        stored.append(footer)
    if exact or mapped.exact is not None or footer:
        headers.append((AMQP_SECTIONS, b"".join(stored)))
    return Record(destination.topic, key, mapped.value, tuple(headers), None, partition)


def _has_content_type(headers: list[Header]) -> bool:
    return any(name == CONTENT_TYPE for name, _ in headers)


def _check_partition(partition: int, destination: AmqpDestination) -> None:
    if not 0 <= partition < destination.partitions:
        raise Unmappable(Outcome.UNFIT, f"partition {partition} of {destination.partitions}")


def _expiry(expiry: int, now_ms: int) -> Header:
    if expiry <= now_ms:
        raise Unmappable(Outcome.EXPIRED, "the message had expired on arrival")
    return EXPIRY, b"%d" % expiry
