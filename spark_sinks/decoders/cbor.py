"""CBOR (RFC 8949): a value is one map."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import cbor2

from spark_sinks.decoders.values import Fault, Row, Wanted, row

DEEPEST: Final = 64
"""Maps and arrays inside of one another."""
_LARGEST: Final = 10_000
"""The exponent of a decimal fraction; a float has far less."""


@dataclass(frozen=True)
class Cbor:
    """Reads maps.

    A part of a path is a text key, or if it is a number and there is no such text, an integer key.
    """

    columns: tuple[Wanted, ...]
    time: str | None

    def __call__(self, value: bytes, sent_ms: int) -> Sequence[Row]:
        """See `Decoder`."""
        found = loaded(value)
        if not isinstance(found, Mapping):
            raise Fault("the value is no map of CBOR")

        def at(path: str) -> Any:
            place: Any = found
            for name in path.split("."):
                if not isinstance(place, Mapping):
                    return None
                place = place.get(name, place.get(int(name)) if name.isdecimal() else None)
            return None if place is cbor2.undefined else place

        return [row(self.columns, at, self.time and at(self.time))]


def loaded(value: bytes) -> Any:
    """The one data item of a value; `Fault` where it is none, or not alone."""
    stream = io.BytesIO(value)
    try:
        found = cbor2.CBORDecoder(stream, semantic_decoders=_TAGS, max_depth=DEEPEST).decode()
    except cbor2.CBORDecodeError as error:
        raise Fault("the value is no CBOR") from error
    if stream.tell() != len(value):
        raise Fault("the value is no CBOR: something is behind its first item")
    return found


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
    """Of seconds of the epoch."""
    return item * 1000 if isinstance(item, int | float) and not isinstance(item, bool) else None


_TAGS: Final[dict[int, Any]] = {
    # What else the library makes of tags (patterns, mails, addresses, sets, ...) no column can be, and much of it
    # costs more than it is long: the item inside is taken.
    **dict.fromkeys((2, 3, 5, 30, 35, 36, 37, 52, 54, 100, 258, 260, 261, 1004, 43000), _untagged),
    0: _text_of_time,
    1: _milliseconds,
    4: _decimal_fraction,
}
