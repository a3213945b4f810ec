"""Relations between MQTT filters: whether one covers another, and whether two overlap.

The filters apply to the access list's names (`topic/key`), where `$` has no special meaning: no Kafka topic begins with
it. A level may also be a prefix (`Beginning`), which only Kafka's prefixed ACLs use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

ANY: Final = "#"
ONE: Final = "+"


class Beginning(msgspec.Struct, frozen=True):
    """Matches every level that begins with `text`."""

    text: str


Level = str | Beginning


def _holds(level: Level, other: Level) -> bool:
    """Return whether `level`, which is not `ANY`, matches everything that `other` matches."""
    if isinstance(level, Beginning):
        return other != ONE and (other.text if isinstance(other, Beginning) else other).startswith(level.text)
    return level in (ONE, other)


def matches(levels: Sequence[Level], name: Sequence[str]) -> bool:
    """Return whether the filter `levels` matches `name`; both are split at the slash."""
    for number, level in enumerate(levels):
        if level == ANY:
            return True
        if number >= len(name) or not _holds(level, name[number]):
            return False
    return len(levels) == len(name)


def covers(outer: Sequence[Level], inner: Sequence[Level]) -> bool:
    """Return whether `outer` matches every name that `inner` matches."""
    if list(outer) == [ONE, ANY]:
        return True  # a name has a first level, so this is everything
    for number, level in enumerate(outer):
        if level == ANY:
            return True
        if number >= len(inner):
            return False
        other = inner[number]
        if other == ANY or not _holds(level, other):
            return False
    return len(outer) == len(inner)


def overlap(one: Sequence[Level], other: Sequence[Level]) -> bool:
    """Return whether both filters match some name."""
    for left, right in zip(one, other, strict=False):
        if ANY in (left, right):
            return True
        if not (_holds(left, right) or _holds(right, left) or right == ONE):
            return False
    if len(one) == len(other):
        return True
    # `a/#` also matches its parent `a`. Otherwise both can match nothing longer than the shorter filter.
    shorter, longer = (one, other) if len(one) < len(other) else (other, one)
    return longer[len(shorter)] == ANY
