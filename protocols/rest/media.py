"""Media types of the dialect: the format of a request's body, and content negotiation of the answer."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from protocols.rest.errors import Fault, RestError


class Format(enum.Enum):
    """How keys and values are embedded in the JSON of a body."""

    JSON = "json"  # as JSON
    BINARY = "binary"  # as base64 text (RFC 4648 section 4)
    TEXT = "text"  # as a JSON string


CONTROL_TYPE: Final = "application/vnd.kafka.v2+json"
"""The type of everything except lists of records: consumers, offsets, topics, errors."""
PLAIN_JSON_TYPE: Final = "application/json"
RECORD_TYPES: Final = {kind: f"application/vnd.kafka.{kind.value}.v2+json" for kind in Format}
FORMATS: Final = {media: kind for kind, media in RECORD_TYPES.items()}
_PRODUCE_FORMATS: Final = FORMATS | {PLAIN_JSON_TYPE: Format.JSON}
_UNSUPPORTED: Final = "The format of the request body is not supported"
_ACCEPT_LIMIT: Final = 64  # media ranges to check; no browser sends more than ten
_NO_PARAMETERS: Final[dict[str, str]] = {}


def produce_format(content_type: str | None) -> Format:
    """Return the embedded format of a produce request; RestError 400 for an unknown or missing Content-Type."""
    return _PRODUCE_FORMATS[body_type(content_type, _PRODUCE_FORMATS)]


def body_type(content_type: str | None, known: Collection[str]) -> str:
    """Return which of the `known` media types a body has; RestError 400 if none, or without Content-Type."""
    essence = "" if content_type is None else _essence(content_type)
    if essence not in known:
        raise _unsupported(content_type or "no Content-Type", known)
    return essence


def accepts(accept: str | None, media_type: str) -> bool:
    """Whether the field `Accept` allows `media_type` (RFC 9110 section 12.5.1)."""
    return preferred(accept, (media_type,)) is not None


def preferred(accept: str | None, offered: Sequence[str]) -> str | None:
    """Return which of `offered` the field `Accept` prefers, or None (RFC 9110 section 12.5.1).

    For each type the most specific matching range decides; weight 0 refuses; without the field everything is accepted.
    For equal weights the order of `offered` decides.
    """
    if accept is None or accept == "*/*":
        return offered[0]
    if accept in offered:
        return accept
    ranges = [_split(text) for text in accept.split(",")[:_ACCEPT_LIMIT]]
    chosen, heaviest = None, 0.0
    for media_type in offered:
        family = media_type.partition("/")[0] + "/*"
        best, weight = 0, 0.0
        for essence, parameters in ranges:
            rank = 3 if essence == media_type else 2 if essence == family else 1 if essence == "*/*" else 0
            if rank > best:
                best, weight = rank, _weight(parameters)
        if weight > heaviest:
            chosen, heaviest = media_type, weight
    return chosen


def preferred_coding(field: str | None, offered: Sequence[str]) -> str | None:
    """Return which of `offered` the field `Accept-Encoding` prefers over no coding, or None (RFC 9110 section 12.5.3).

    For equal weights the order of `offered` decides; a coding that is not named has the weight of `*`.
    """
    if field is None:
        return None
    weights = {}
    for text in field.split(",")[:_ACCEPT_LIMIT]:
        name, parameters = _split(text)
        weights["gzip" if name == "x-gzip" else name] = _weight(parameters)
    others = weights.get("*", 0.0)
    chosen, heaviest = None, 0.0
    for coding in offered:
        weight = weights.get(coding, others)
        if weight > heaviest:
            chosen, heaviest = coding, weight
    return chosen if heaviest >= weights.get("identity", 0.0) else None


def _essence(content_type: str) -> str:
    """Return the type without parameters if its charset is UTF-8 or not given; "" for any other charset."""
    essence, parameters = _split(content_type)
    return essence if parameters.get("charset", "utf-8").lower() == "utf-8" else ""


def _split(text: str) -> tuple[str, dict[str, str]]:
    essence, semicolon, rest = text.partition(";")
    if not semicolon:
        return essence.strip().lower(), _NO_PARAMETERS
    parameters = {}
    for parameter in rest.split(";"):
        name, _, value = parameter.partition("=")
        parameters[name.strip().lower()] = value.strip().strip('"')
    return essence.strip().lower(), parameters


def _weight(parameters: dict[str, str]) -> float:
    """Return the `q` parameter; a missing or malformed weight counts as 1."""
    try:
        return float(parameters.get("q", "1"))
    except ValueError:
        return 1.0


def _unsupported(got: str, wanted: Iterable[str]) -> RestError:
    return RestError(400, f"{_UNSUPPORTED}: {got}; one of {', '.join(sorted(wanted))} is needed", fault=Fault.MEDIA)
