"""Decodes CloudEvents 1.0 over HTTP: binary, structured and batched (HTTP binding section 3; JSON format). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from protocols.rest.errors import RestError, invalid
from protocols.rest.requests import check_utf8, decode

EVENT_TYPE: Final = "application/cloudevents+json"
BATCH_TYPE: Final = "application/cloudevents-batch+json"
ENVELOPES: Final = ("application/cloudevents+", "application/cloudevents-batch+")
"""The beginnings of the types of whole events (HTTP binding section 3): the rest names the format."""
FIELD_PREFIX: Final = "ce-"
_JSON_TYPE: Final = "application/json"
_REQUIRED: Final = ("id", "source", "specversion", "type")
_NOT_EMPTY: Final = (*_REQUIRED, "datacontenttype", "dataschema", "subject")
_NAME: Final = re.compile(r"[a-z0-9]{1,64}")  # section 3.1 of the specification, which recommends at most 20
_TIME: Final = re.compile(
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])[Tt]([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?"
    r"([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)
_LARGEST: Final = 2**31 - 1
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_VALUE: Final = msgspec.json.Decoder(str | int | bool | None)
_BYTES: Final = msgspec.json.Decoder(bytes | None)


class CloudEvent(msgspec.Struct, frozen=True, gc=False):
    """One event."""

    attributes: dict[str, str]  # the context attributes as canonical strings, without `datacontenttype`
    data: bytes  # b"" if it has none
    content_type: str | None  # of the data; None if unknown


def from_fields(fields: Iterable[tuple[str, str]], content_type: str | None, body: bytes) -> CloudEvent:
    """Decode an event in binary mode: header fields are its attributes, the body is its data. RestError 400."""
    attributes: dict[str, str] = {}
    for field, value in fields:
        name = field.lower()
        if name.startswith(FIELD_PREFIX):
            name = name.removeprefix(FIELD_PREFIX)
            where = f"header field `{field}`"
            if name in attributes:
                raise invalid(f"It is given more than once - at {where}")
            attributes[name] = _decoded(value, where)
    if "datacontenttype" in attributes:
        raise invalid("The type of the data must be in Content-Type - at header field `ce-datacontenttype`")
    _check(attributes, "the event")
    return CloudEvent(attributes, body, content_type)


def from_json(body: bytes) -> CloudEvent:
    """Decode an event in structured mode; RestError 400."""
    check_utf8(body)
    return _from_object(decode(_OBJECT, body), "$")


def from_batch(body: bytes, limit: int) -> list[CloudEvent]:
    """Decode a batch of events; RestError 400, or 413 for more than `limit`."""
    check_utf8(body)
    events = decode(_ARRAY, body)
    if len(events) > limit:
        raise RestError(413, f"The request has {len(events)} events; at most {limit} are allowed")
    return [_from_object(event, f"$[{index}]") for index, event in enumerate(events)]


def _from_object(members: dict[str, msgspec.Raw], where: str) -> CloudEvent:
    attributes = dict(_attributes(members, where))
    content_type = attributes.pop("datacontenttype", None)
    _check(attributes, f"`{where}`")
    if "data" in members and "data_base64" in members:
        raise invalid(f"An event has data or data_base64, not both - at `{where}`")
    if "data_base64" in members:
        data = _decode(_BYTES, members["data_base64"], f"{where}.data_base64")
        return CloudEvent(attributes, data or b"", content_type)
    if "data" not in members:
        return CloudEvent(attributes, b"", content_type)
    if content_type is None or _is_json(content_type):
        text = msgspec.json.format(bytes(members["data"]), indent=-1)
        return CloudEvent(attributes, text, content_type or _JSON_TYPE)  # section 3.1.1 of the format
    data = _decode(_VALUE, members["data"], f"{where}.data")
    if not isinstance(data, str):
        raise invalid(f"Data of the type {content_type} must be a string, or in data_base64 - at `{where}.data`")
    return CloudEvent(attributes, data.encode(), content_type)


def _attributes(members: dict[str, msgspec.Raw], where: str) -> Iterator[tuple[str, str]]:
    for name, raw in members.items():
        if name in {"data", "data_base64"}:
            continue
        value = _decode(_VALUE, raw, f"{where}.{name}")
        if value is None:
            continue  # null means absent
        if isinstance(value, bool):
            yield name, "true" if value else "false"
        elif isinstance(value, int):
            if not -_LARGEST - 1 <= value <= _LARGEST:
                raise invalid(f"An integer must fit in 32 bits - at `{where}.{name}`")
            yield name, str(value)
        else:
            yield name, value


def _check(attributes: dict[str, str], where: str) -> None:
    """Check the names of attributes and the required attributes (specification, section 3)."""
    for name in _REQUIRED:
        if name not in attributes:
            raise invalid(f"The event has no `{name}` - at {where}")
    for name, value in attributes.items():
        if not _NAME.fullmatch(name):
            raise invalid(f"Attribute names have only lower-case letters and digits, not {name[:64]!r} - at {where}")
        if not value and name in _NOT_EMPTY:
            raise invalid(f"`{name}` is empty - at {where}")
    if attributes["specversion"] != "1.0":
        raise invalid(f"Only version 1.0 is supported, not {attributes['specversion'][:64]!r} - at {where}")
    if "time" in attributes and not _TIME.fullmatch(attributes["time"]):
        raise invalid(f"`time` is not a timestamp of RFC 3339 - at {where}")


def _decode(decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw, where: str) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise invalid(f"{error} - at `{where}`") from error


def _decoded(value: str, where: str) -> str:
    """Decode a header field's value (HTTP binding section 3.1.3.2): remove quotes, then percent-decode UTF-8."""
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    try:
        value.encode()
        return value if "%" not in value else unquote_to_bytes(value).decode()
    except UnicodeError as error:
        raise invalid(f"It is not UTF-8 - at {where}") from error


def _is_json(content_type: str) -> bool:
    """Whether it is a JSON media type (section 3.1 of the JSON format)."""
    essence = content_type.partition(";")[0].strip().lower()
    subtype = essence.partition("/")[2]
    return subtype == "json" or subtype.endswith("+json")
