"""From what a message holds to the columns that a job declares, in plain Python: nothing of Spark, nothing that raises.

A decoder is a function of a value's bytes and of when it was sent (epoch ms). It gives rows: a value for each declared
column, in their order, and the time of the reading as text; or raises `Fault`. `decoded` is what the workers call.
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
"""The values of the declared columns, and the time as text: epoch ms or ISO 8601, or whatever was there; or None."""
LONGEST_TIME: Final = 64
"""Characters of a time that are looked at."""


class Fault(ValueError):  # noqa: N818 - what is wrong with a value, nothing of ours
    """A value is no good reading; the text is the error of its dead letter."""


class Wanted(NamedTuple):
    """A declared column."""

    name: str
    type: ColumnType
    path: str  # of its field
    optional: bool


class Decoder(Protocol):
    """Reads one value; it goes to Spark's workers, so it must be picklable."""

    def __call__(self, value: bytes, sent_ms: int) -> Sequence[Row]:
        """The readings in `value`; `Fault` where it is none."""
        raise NotImplementedError


def wanted(source: Source) -> tuple[Wanted, ...]:
    """The declared columns of a job's source."""
    return tuple(
        Wanted(name, column.type, column.field or name, column.optional) for name, column in source.columns.items()
    )


def decoded(decoder: Decoder, value: bytes | None, sent_ms: int) -> tuple[str | None, Sequence[Row]]:
    """What is wrong with a value (None: nothing), and its readings. Never raises."""
    try:
        if value is None:
            raise Fault("there is no value")
        return None, decoder(value, sent_ms)
    except Fault as fault:
        return str(fault), ()
    except Exception as error:  # of a library: one value must never stop a stream
        return f"the value cannot be read: {type(error).__name__}", ()


def row(columns: Iterable[Wanted], find: Callable[[str], Any], time: Any) -> Row:
    """The row of a message; `Fault` where a column is missing or of another type.

    Args:
        columns: the declared ones.
        find: gives what the message has at a field's path; None: nothing.
        time: what the message says of its time; None: nothing.
    """
    made = []
    for column in columns:
        value = _CONVERTED[column.type](find(column.path))
        if value is None and not column.optional:
            raise Fault(f"{column.name} is missing or no {TYPE_NAMES[column.type]}")
        made.append(value)
    return (*made, None if time is None else time_text(time))


def number(value: Any) -> float | None:
    """A finite number; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | Fraction):
        return None
    try:
        made = float(value)
    except (OverflowError, ValueError):  # too large, or a signalling NaN
        return None
    return made if math.isfinite(made) else None


def text(value: Any) -> str | None:
    """A text that can be written as UTF-8; None: it is none."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair
        return None
    return value


def time_text(value: Any) -> str:
    """What a message says of its time, as `spark_sinks.decode.instant` reads it; no time where it is none."""
    if isinstance(value, str):
        return (text(value) or "no text")[:LONGEST_TIME]
    found = number(value)
    return type(value).__name__ if found is None else repr(int(found) if found.is_integer() else found)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63 else None


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


_CONVERTED: Final[Mapping[ColumnType, Callable[[Any], Any]]] = {
    "double": number, "long": _whole, "boolean": _boolean, "string": text,
}  # fmt: skip
