"""Relations between MQTT filters: does one cover another, do two overlap.

They are over the access list's names (`topic/key`), where `$` has no special meaning: no Kafka topic begins with it. A
level may also be the `Beginning` of one, which only Kafka's prefixed ACLs are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

ANY: Final = "#"
ONE: Final = "+"


class Beginning(msgspec.Struct, frozen=True):
    """Every level that begins with a text."""

    text: str


Level = str | Beginning


def _holds(level: Level, other: Level) -> bool:
    """Whether a level, which is not `ANY`, matches all that the other one does."""
    if isinstance(level, Beginning):
        return other != ONE and (other.text if isinstance(other, Beginning) else other).startswith(level.text)
    return level in (ONE, other)


def matches(levels: Sequence[Level], name: Sequence[str]) -> bool:
    """Whether the filter `levels` matches `name`, both split at the slash."""
    for number, level in enumerate(levels):
        if level == ANY:
            return True
        if number >= len(name) or not _holds(level, name[number]):
            return False
    return len(levels) == len(name)


def covers(outer: Sequence[Level], inner: Sequence[Level]) -> bool:
    """Whether every name that the filter `inner` matches is matched by `outer` too."""
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
    """Whether some name is matched by both filters."""
    for left, right in zip(one, other, strict=False):
        if ANY in (left, right):
            return True
        if not (_holds(left, right) or _holds(right, left) or right == ONE):
            return False
    if len(one) == len(other):
        return True
    # `a/#` also matches its parent `a`; nothing longer than the shorter filter is left to both otherwise.
    shorter, longer = (one, other) if len(one) < len(other) else (other, one)
    return longer[len(shorter)] == ANY
