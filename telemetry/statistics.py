"""Declares metrics on the fields of the structs that the parts' `statistics()` return.

A field is a metric: `published: Annotated[int, counter("messages that clients have published")]`. The metric's name is
derived from source and field (`telemetry.metrics`). Kind, labels and meaning are declared only here. A field that
is a struct of such fields adds its own name in between.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

LATENCY_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Kind = Literal["counter", "gauge", "histogram"]


class Declared(msgspec.Struct, frozen=True):
    """The declaration of a field."""

    kind: Kind | None  # None for a mapping of structs, whose fields have their own
    meaning: str  # one line without a full stop
    labels: tuple[str, ...] = ()  # names of a mapping's keys, outermost first


def counter(meaning: str, *labels: str) -> Declared:
    """Declare a number that only grows while the process runs."""
    return Declared("counter", meaning, labels)


def gauge(meaning: str, *labels: str) -> Declared:
    """Declare a current value."""
    return Declared("gauge", meaning, labels)


def histogram(meaning: str, *labels: str) -> Declared:
    """Declare a `Histogram`."""
    return Declared("histogram", meaning, labels)


def structs_by(*labels: str) -> Declared:
    """Declare a mapping of structs whose metrics get these labels."""
    return Declared(None, "", labels)


class Field(msgspec.Struct, frozen=True):
    """A field of a struct of statistics: a metric, a struct, or a mapping of structs."""

    name: str
    declared: Declared | None  # None for a struct and for a field that is no metric
    struct: type[msgspec.Struct] | None  # the struct that the field holds, if any


@functools.cache
def fields(struct: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Return the declared fields of a statistics struct in order; other fields are left out."""
    members = []
    for name, hint in get_type_hints(struct, include_extras=True).items():
        kind, declared = hint, None
        if get_origin(hint) is Annotated:
            kind, *notes = get_args(hint)
            declared = next((note for note in notes if isinstance(note, Declared)), None)
        inside = _struct_in(kind)
        if declared is not None or inside is not None:
            members.append(Field(name, declared, inside))
    return tuple(members)


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a field holds, directly or as the values of a mapping."""
    if get_origin(kind) is not None:
        origin = get_origin(kind)
        return _struct_in(get_args(kind)[1]) if isinstance(origin, type) and issubclass(origin, Mapping) else None
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


class Histogram:
    """Counts values by bounds. Cheap enough for one call per Kafka batch, not per message."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        """`bounds` are ascending, inclusive upper bounds; larger values are counted too."""
        if list(bounds) != sorted(set(bounds)):
            raise ValueError("bounds must ascend")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, in the unit of the bounds, `times` times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative counts per bound, as Prometheus expects them."""
        sums: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            sums.append((bound, float(running)))
        return sums
