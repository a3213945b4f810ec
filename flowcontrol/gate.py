"""A gate that is open or shut, with two thresholds (hysteresis), so that it does not flap."""

from __future__ import annotations

from collections.abc import Callable

Callback = Callable[[bool], None]
"""Called with the new state: True when the gate has opened, False when it has shut."""


class Gate:
    """Shuts when the level reaches the high mark, opens when it is back at or below the low mark.

    The gate does not count: its owner calls `level` after each change. It refuses nothing; it signals when to stop
    requesting more.

    Invariant: it is shut from a level of `high` or more on, until one of `low` or less. Each transition calls the
    callbacks once, in the order of subscription. If a callback causes another transition, the remaining callbacks are
    called only for the latest one.
    """

    __slots__ = ("_callbacks", "_open", "high", "low")

    def __init__(self, high: int, low: int) -> None:
        if not 0 <= low < high:
            raise ValueError(f"0 <= low < high needed, got low {low}, high {high}")
        self.high = high
        self.low = low
        self._open = True
        self._callbacks: tuple[Callback, ...] = ()  # most gates have none, and an empty list takes memory

    @property
    def is_open(self) -> bool:
        """Whether more may be requested."""
        return self._open

    def level(self, level: int) -> None:
        """Set the level after a change; callbacks run before this returns, once per transition."""
        if self._open:
            if level >= self.high:
                self.change(False)
        elif level <= self.low:
            self.change(True)

    def change(self, is_open: bool) -> None:
        """Open or shut regardless of the level (a budget with two levels decides itself); idempotent."""
        if is_open == self._open:
            return
        self._open = is_open
        for callback in self._callbacks:
            # A callback may have unsubscribed a later one, or changed the level and so the state again. Then the
            # nested call of `change` has called the rest already.
            if self._open != is_open:
                return
            if callback in self._callbacks:
                callback(is_open)

    def subscribe(self, callback: Callback) -> None:
        """Call `callback(is_open)` at each transition from now on, after those subscribed before.

        Raises:
            ValueError: it is subscribed already.
        """
        if callback in self._callbacks:
            raise ValueError("this callback is subscribed already")
        self._callbacks += (callback,)

    def unsubscribe(self, callback: Callback) -> None:
        """Stop calling `callback`; allowed from inside a callback.

        Raises:
            ValueError: it is not subscribed.
        """
        if callback not in self._callbacks:
            raise ValueError("this callback is not subscribed")
        self._callbacks = tuple(other for other in self._callbacks if other != callback)
