"""Windows that count what is on the way. They raise where a clamp would hide a lost or doubled settlement."""

from __future__ import annotations


class WindowError(Exception):
    """A window was left below zero or above its limit: something was settled twice, or sent without leave."""


class Inflight:
    """How many messages of one direction are on the way, against a limit.

    MQTT's Receive Maximum (MQTT 5.0 section 4.9): each direction of a connection has a window of its own.

    Invariant: `0 <= used <= limit`; a call that would break it raises and changes nothing.

    Attributes:
        limit: how many may be on the way.
        used: how many are.
    """

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a window holds one at least, got {limit}")
        self.limit = limit
        self.used = 0

    @property
    def free(self) -> int:
        """How many more may be on the way."""
        return self.limit - self.used

    def take(self, count: int = 1) -> None:
        """Put `count` more on the way.

        Raises:
            WindowError: the limit would be passed; nothing is taken.
        """
        used = self.used + count
        if count < 0 or used > self.limit:
            raise WindowError(f"{count} more on the way, with {self.used} of {self.limit} used")
        self.used = used

    def release(self, count: int = 1) -> None:
        """Take `count` off the way.

        Raises:
            WindowError: fewer are on the way; nothing is released.
        """
        used = self.used - count
        if count < 0 or used < 0:
            raise WindowError(f"{count} came back, with only {self.used} on the way")
        self.used = used
