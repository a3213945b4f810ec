"""Converts decoded messages to the columns that a job declares, in plain Python without Spark.

A decoder is a function of a value's bytes and the time it was sent (epoch ms). It returns rows, each with one value for
each declared column in order and the time of the reading as text; or it raises `ReadingFault`. Workers call `decoded`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, NamedTuple, Protocol

from spark_sinks.spec.parts import Source
from spark_sinks.spec.values import TYPE_NAMES, ColumnType

Row = tuple[Any, ...]
"""The values of the declared columns, and the time as text: epoch ms, ISO 8601, another text, or None."""
WHOLE_FLOAT: Final = 2.0**53
"""Up to here every whole number has a floating-point number of its own."""
LONGEST_TIME: Final = 64
"""The characters of a time that are kept."""


class ReadingFault(ValueError):  # noqa: N818 - describes a value, not an error of the program
    """A value is not a good reading; the text becomes the error of its dead letter."""


class Wanted(NamedTuple):
    """A declared column."""

    name: str
    type: ColumnType
    path: str  # path of its field
    optional: bool


class Decoder(Protocol):
    """Decodes one value. It is sent to Spark's workers, so it must be picklable."""

    def __call__(self, value: bytes, sent_ms: int) -> Sequence[Row]:
        """Return the readings in `value`; raise `ReadingFault` if it is invalid."""
        raise NotImplementedError


def wanted(source: Source) -> tuple[Wanted, ...]:
    """Return the declared columns of a job's source."""
    return tuple(
        Wanted(name, column.type, column.field or name, column.optional) for name, column in source.columns.items()
    )


def decoded(decoder: Decoder, value: bytes | None, sent_ms: int) -> tuple[str | None, Sequence[Row]]:
    """Return the error of a value (None for a good one), and its readings. Never raises."""
    try:
        if value is None:
            raise ReadingFault("the value is null")
        return None, decoder(value, sent_ms)
    except ReadingFault as fault:
        return str(fault), ()
    except Exception as error:  # from a library: one value must never stop a stream
        return f"the value cannot be read: {type(error).__name__}", ()


def row(columns: Iterable[Wanted], find: Callable[[str], Any], time: Any) -> Row:
    """Convert a message to a row; `ReadingFault` if a column is missing or has another type.

    Args:
        columns: the declared columns.
        find: returns the message's value at a field's path, or None.
        time: the message's own time, or None.
    """
    made = []
    for column in columns:
        value = _CONVERTED[column.type](find(column.path))
        if value is None and not column.optional:
            raise ReadingFault(f"{column.name} is missing or not a {TYPE_NAMES[column.type]}")
        made.append(value)
    return (*made, None if time is None else time_text(time))


def number(value: Any) -> float | None:
    """Return a finite number; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | Fraction):
        return None
    try:
        made = float(value)
    except (OverflowError, ValueError):  # too large, or a signalling NaN
        return None
    return made if math.isfinite(made) else None


def text(value: Any) -> str | None:
    """Return a text that can be encoded as UTF-8; None if it is not one."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return None
    return value


def time_text(value: Any) -> str:
    """Return a message's time as text for `spark_sinks.read.decode.instant`, also if it is not a time."""
    if isinstance(value, str):
        return (text(value) or "no text")[:LONGEST_TIME]
    seconds = number(value)
    return type(value).__name__ if seconds is None else repr(int(seconds) if seconds.is_integer() else seconds)


def _whole(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer() and abs(value) <= WHOLE_FLOAT:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63 else None


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


_CONVERTED: Final[Mapping[ColumnType, Callable[[Any], Any]]] = {
    "double": number, "long": _whole, "boolean": _boolean, "string": text,
}  # fmt: skip
