"""Counts the bytes that a slow reader has not read in the budget of all receivers.

A socket is counted from the moment its kernel buffer is full until the peer has caught up. A peer that reads fast
enough is never counted and costs nothing.
"""

from __future__ import annotations

from typing import Final

from flowcontrol.budget import UNCOUNTED, Budget

LOW: Final = UNCOUNTED // 4
"""Bytes in our write buffer at which a reader has caught up; the kernel's buffer comes on top."""


class Unread:
    """The write buffer of one socket while its peer reads slowly."""

    __slots__ = ("_budget", "_most", "bytes")

    def __init__(self, budget: Budget, most: int) -> None:
        """`most` is the limit of this buffer in bytes, however much of the budget is free."""
        self._budget = budget
        self._most = most
        self.bytes = 0

    def count(self, size: int) -> bool:
        """Count `size` bytes in the buffer now. Returns whether that is below its limit and no more than is free."""
        change = size - self.bytes
        counted = bool(size) - bool(self.bytes)
        self.bytes = size
        if change > 0:
            self._budget.take(change, counted)
        elif change:
            self._budget.give(-change, -counted)
        return size < self._most and self._budget.allows(size, 0)
