"""Relations between MQTT filters: does one cover another, do two overlap.

They are over the access list's names (`topic/key`), where `$` has no special meaning: no Kafka topic begins with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

ANY: Final = "#"
ONE: Final = "+"


def matches(levels: Sequence[str], name: Sequence[str]) -> bool:
    """Whether the filter `levels` matches `name`, both split at the slash."""
    for number, level in enumerate(levels):
        if level == ANY:
            return True
        if number >= len(name) or level not in (ONE, name[number]):
            return False
    return len(levels) == len(name)


def covers(outer: Sequence[str], inner: Sequence[str]) -> bool:
    """Whether every name that the filter `inner` matches is matched by `outer` too."""
    if list(outer) == [ONE, ANY]:
        return True  # a name has a first level, so this is everything
    for number, level in enumerate(outer):
        if level == ANY:
            return True
        if number >= len(inner):
            return False
        other = inner[number]
        if other == ANY or level not in (ONE, other):
            return False
    return len(outer) == len(inner)


def overlap(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether some name is matched by both filters."""
    for left, right in zip(one, other, strict=False):
        if ANY in (left, right):
            return True
        if left != right and ONE not in (left, right):
            return False
    if len(one) == len(other):
        return True
    # `a/#` also matches its parent `a`; nothing longer than the shorter filter is left to both otherwise.
    shorter, longer = (one, other) if len(one) < len(other) else (other, one)
    return longer[len(shorter)] == ANY
