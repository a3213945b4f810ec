"""What a slow reader has not read, counted in the budget of all receivers.

A socket is counted from the first time on that the kernel takes no more, until the reader has caught up. Who reads is
never counted, and pays nothing for it.
"""

from __future__ import annotations

from typing import Final

from flowcontrol.budget import UNCOUNTED, Budget

LOW: Final = UNCOUNTED // 4
"""Bytes in a write buffer at which its reader has caught up; the kernel has a buffer of its own behind it."""


class Unread:
    """The write buffer of one socket, while its reader is slow."""

    __slots__ = ("_budget", "_most", "bytes")

    def __init__(self, budget: Budget, most: int) -> None:
        """Nothing is counted. `most`: bytes of this one, whatever is free."""
        self._budget = budget
        self._most = most
        self.bytes = 0

    def count(self, size: int) -> bool:
        """So many bytes are in the buffer now; whether more may be written: it has no more of them than is free."""
        change = size - self.bytes
        counted = bool(size) - bool(self.bytes)
        self.bytes = size
        if change > 0:
            self._budget.take(change, counted)
        elif change:
            self._budget.give(-change, -counted)
        return size < self._most and self._budget.allows(size, 0)
