"""Maps HTTP requests to devices to records, and the answers' records back to HTTP. Pure.

A record's own headers are HTTP fields `Record-Header-NAME`. Names and values are percent-encoded (RFC 3986 section 2.1)
where HTTP could not carry them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote, unquote_to_bytes

from mapping.record import (
    CONTENT_TYPE,
    CORRELATION_ID,
    EXPIRY,
    GW_CLIENT,
    GW_PROTOCOL,
    MESSAGE_ID,
    REPLY_TO,
    TRACEPARENT,
    TRACESTATE,
    Header,
    Headers,
    Received,
    own_name,
    stored_name,
)
from mapping.rest.incoming import PROTOCOL

FIELD_PREFIX: Final = "Record-Header-"
FIELD_LIMIT: Final = 4096  # bytes of a name and value; clients accept lines of 8 KiB at most
FIELDS_LIMIT: Final = 50  # of one answer
DEFAULT_TYPE: Final = "application/octet-stream"
_TOKEN: Final = "!#$&'*+^`|"  # noqa: S105 - RFC 9110 section 5.6.2, without what `quote` never touches, and without %
_VISIBLE: Final = "!\"#$&'()*+,/:;<=>?@[\\]^`{|}"  # without %
_TYPE_LIMIT: Final = 256
_PREFIX: Final = FIELD_PREFIX.lower()
_TRACE: Final = {TRACEPARENT: "traceparent", TRACESTATE: "tracestate"}


def request_headers(
    fields: Iterable[tuple[str, str]],
    *,
    principal: str,
    reply_to: str,
    correlation_id: str,
    expires_ms: int,
    trace: Headers = (),
) -> Headers:
    """Return the headers of a request's record, which expires at `expires_ms` (epoch milliseconds).

    The answer must have the same `correlation_id`. It is the message id too, as some clients return that instead.
    """
    own: list[Header] = []
    content_type: str | None = None
    for name, value in fields:
        lower = name.lower()
        if lower.startswith(_PREFIX):
            plain = unquote(name[len(_PREFIX) :])
            if plain:
                own.append((stored_name(plain), unquote_to_bytes(value.encode("utf-8", "surrogateescape"))))
        elif lower == "content-type":
            content_type = value
    correlation = correlation_id.encode()
    headers: list[Header] = [
        (GW_PROTOCOL, PROTOCOL),
        (GW_CLIENT, principal.encode()),
        (REPLY_TO, reply_to.encode()),
        (CORRELATION_ID, correlation),
        (MESSAGE_ID, correlation),
        (EXPIRY, b"%d" % expires_ms),
    ]
    if content_type is not None:
        headers.append((CONTENT_TYPE, content_type.encode("utf-8", "surrogateescape")))
    named = {name for name, _ in own}
    return (*headers, *(header for header in trace if header[0] not in named), *own)


def correlation_of(record: Received) -> str | None:
    """Return the correlation id of an answer, or None."""
    for name, value in record.headers:
        if name == CORRELATION_ID and value is not None:
            return value.decode("utf-8", "replace")
    return None


def answer_fields(record: Received) -> list[tuple[str, str]]:
    """Return the fields of the HTTP answer: content type, trace context, and the record's own headers.

    Headers of more than `FIELD_LIMIT` bytes and headers over `FIELDS_LIMIT` are left out.
    """
    content_type = DEFAULT_TYPE
    fields: list[tuple[str, str]] = []
    for name, value in record.headers:
        if name == CONTENT_TYPE:
            content_type = _type(value) or content_type
        elif name in _TRACE:
            if value is not None:
                _add(fields, _TRACE[name], quote(value, safe=_VISIBLE))
        else:
            plain = own_name(name)
            if plain is not None:
                _add(fields, FIELD_PREFIX + quote(plain, safe=_TOKEN), quote(value or b"", safe=_VISIBLE))
    return [("Content-Type", content_type), *fields]


def _add(fields: list[tuple[str, str]], name: str, value: str) -> None:
    if len(name) + len(value) <= FIELD_LIMIT and len(fields) < FIELDS_LIMIT:
        fields.append((name, value))


def _type(value: bytes | None) -> str | None:
    """Return a content type that is legal in an HTTP field, or None."""
    if not value or len(value) > _TYPE_LIMIT or not value.isascii():
        return None
    text = value.decode()
    return text if text.isprintable() and "/" in text else None
