"""An assertion inside a test's own subscriber or handler fails the test, although the code around it contains it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

_assertions: list[AssertionError] = []


def note(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Keep the failed assertion that a line of the log reports; a processor of structlog."""
    if isinstance(error := event.get("exc_info"), AssertionError):
        _assertions.append(error)
    return event


def take() -> AssertionError | None:
    """Return the first assertion that failed since the last call, if any."""
    first = _assertions[0] if _assertions else None
    _assertions.clear()
    return first
