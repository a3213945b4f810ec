"""A short-lived cache of topic names that cannot be used, so that a flood of one name costs Kafka one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from gateway.kafka.contracts import Refused

UNKNOWN_FOR_S: Final = 5.0
"""How long a name stays in the cache."""
UNKNOWN_KEPT: Final = 10_000
"""Capacity of the cache, which is cleared when full."""


class Missing(msgspec.Struct, frozen=True):
    """Why a name cannot be used, and until when that is cached. `absent`: no such topic; it may be created."""

    until: float
    refused: Refused
    absent: bool


class MissingTopics:
    """The cache."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._missing: dict[str, Missing] = {}

    def find(self, name: str) -> Missing | None:
        """Return why a name cannot be used, or None when that is not in the cache."""
        missing = self._missing.get(name)
        if missing is not None and self._clock() >= missing.until:
            del self._missing[name]
            return None
        return missing

    def add(self, name: str, refused: Refused, *, absent: bool = False) -> None:
        """Remember why a name cannot be used."""
        if len(self._missing) >= UNKNOWN_KEPT:
            self._missing.clear()
        self._missing[name] = Missing(self._clock() + UNKNOWN_FOR_S, refused, absent)

    def remove(self, name: str) -> None:
        """Forget a name: the topic exists now."""
        self._missing.pop(name, None)
