"""Decodes CBOR (RFC 8949); a value is one map."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import cbor2

from spark_sinks.decoders.values import ReadingFault, Row, Wanted, row

DEEPEST: Final = 64
"""The deepest nesting of maps and arrays."""
_LARGEST: Final = 10_000
"""The largest exponent of a decimal fraction; a float's is far smaller."""


@dataclass(frozen=True)
class Cbor:
    """Decodes maps.

    A part of a path is a text key or, if it is a number and there is no such text, an integer key.
    """

    columns: tuple[Wanted, ...]
    time: str | None

    def __call__(self, value: bytes, sent_ms: int) -> Sequence[Row]:
        """Decode a map to its columns; ValueError if it is none."""
        decoded = loaded(value)
        if not isinstance(decoded, Mapping):
            raise ReadingFault("the value is not a CBOR map")

        def at(path: str) -> Any:
            value: Any = decoded
            for name in path.split("."):
                if not isinstance(value, Mapping):
                    return None
                value = value.get(name, value.get(int(name)) if name.isdecimal() else None)
            return None if value is cbor2.undefined else value

        return [row(self.columns, at, self.time and at(self.time))]


def loaded(value: bytes) -> Any:
    """Decode the single data item of a value; `ReadingFault` if there is none, or more follows."""
    stream = io.BytesIO(value)
    try:
        decoded = cbor2.CBORDecoder(stream, semantic_decoders=_TAGS, max_depth=DEEPEST).decode()
    except cbor2.CBORDecodeError as error:
        raise ReadingFault("the value is not CBOR") from error
    if stream.tell() != len(value):
        raise ReadingFault("the value is not CBOR: bytes follow its first item")
    return decoded


def _decimal_fraction(item: Any, _: bool) -> float | None:
    match item:
        case [int(exponent), int(mantissa)] if abs(exponent) <= _LARGEST:
            return float(f"{mantissa}e{exponent}")
    return None


def _untagged(item: Any, _: bool) -> Any:
    return item


def _text_of_time(item: Any, _: bool) -> str | None:
    return item if isinstance(item, str) else None


def _milliseconds(item: Any, _: bool) -> float | None:
    """Convert seconds since the epoch."""
    return item * 1000 if isinstance(item, int | float) and not isinstance(item, bool) else None


_TAGS: Final[dict[int, Any]] = {
    # The other types that the library makes of tags (patterns, mails, addresses, sets, ...) cannot be columns, and many
    # are expensive to build, so the item inside the tag is used instead.
    **dict.fromkeys((2, 3, 5, 30, 35, 36, 37, 52, 54, 100, 258, 260, 261, 1004, 43000), _untagged),
    0: _text_of_time,
    1: _milliseconds,
    4: _decimal_fraction,
}
