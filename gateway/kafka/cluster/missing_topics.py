"""Names of topics that cannot be used: remembered for a moment, so that a flood of one costs Kafka one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from gateway.kafka.contracts import Refused

UNKNOWN_FOR_S: Final = 5.0
"""How long an unknown name stays unknown without asking again."""
UNKNOWN_KEPT: Final = 10_000
"""How many unknown names are remembered; forgotten together when full."""


class Missing(msgspec.Struct, frozen=True):
    """A name that cannot be used, until when, and why. `absent`: there is no such topic; it could be made."""

    until: float
    refused: Refused
    absent: bool


class MissingTopics:
    """By name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._missing: dict[str, Missing] = {}

    def find(self, name: str) -> Missing | None:
        """Why a name cannot be used, if Kafka has said so a moment ago."""
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
        """There is such a topic now."""
        self._missing.pop(name, None)
