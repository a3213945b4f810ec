"""Ends a client's rights when its token expires, even while the connection stays open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

CHECK_S: Final = 3600.0  # the wall clock may be adjusted, so it is checked at least this often


class Expiry:
    """Calls a callback once, at an expiry time."""

    __slots__ = ("_ended", "_expires_ms", "_timer", "_wall_clock")

    def __init__(self, wall_clock: Callable[[], int], ended: Callable[[], None]) -> None:
        """`ended` is called at the expiry time by `wall_clock`, which returns epoch milliseconds."""
        self._wall_clock = wall_clock
        self._ended = ended
        self._expires_ms = 0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, expires_ms: int | None) -> None:
        """Set the expiry time, in place of the previous one. None means never."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if expires_ms is not None:
            self._expires_ms = expires_ms
            self._arm()

    def release(self) -> None:
        """Cancel the call."""
        self.set(None)
        del self._ended

    def _arm(self) -> None:
        delay = min(CHECK_S, max(0.0, (self._expires_ms - self._wall_clock()) / 1000))
        self._timer = asyncio.get_running_loop().call_later(delay, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._wall_clock() >= self._expires_ms:
            self._ended()
        else:
            self._arm()
