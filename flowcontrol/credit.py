"""A window that counts messages in flight. It raises where clamping would hide a lost or repeated settlement."""

from __future__ import annotations

from dataclasses import dataclass


class WindowError(Exception):
    """A window would fall below zero or exceed its limit: a message was settled twice, or sent without permission."""


@dataclass(slots=True, eq=False)
class Inflight:
    """Counts the messages in flight in one direction, against a limit.

    MQTT's Receive Maximum (MQTT 5.0 section 4.9): each direction of a connection has its own window.

    Invariant: `0 <= used <= limit`; a call that would break it raises and changes nothing.
    """

    limit: int  # how many messages may be in flight
    used: int = 0  # how many are

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"a window holds one at least, got {self.limit}")

    @property
    def free(self) -> int:
        """How many more messages may be sent."""
        return self.limit - self.used

    def take(self, count: int = 1) -> None:
        """Count `count` more messages as in flight.

        Raises:
            WindowError: the limit would be exceeded; nothing is taken.
        """
        used = self.used + count
        if count < 0 or used > self.limit:
            raise WindowError(f"{count} more in flight, with {self.used} of {self.limit} used")
        self.used = used

    def release(self, count: int = 1) -> None:
        """Count `count` messages as no longer in flight.

        Raises:
            WindowError: fewer are in flight; nothing is released.
        """
        used = self.used - count
        if count < 0 or used < 0:
            raise WindowError(f"{count} released, with only {self.used} in flight")
        self.used = used
