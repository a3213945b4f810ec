"""A gate that signals whether more may be requested; a budget opens and shuts it."""

from __future__ import annotations

from collections.abc import Callable

Callback = Callable[[bool], None]
"""Called with the new state: True when the gate has opened, False when it has shut."""


class Gate:
    """Open or shut, with callbacks for each transition. It refuses nothing; it signals when to stop requesting more.

    Invariant: each transition calls the callbacks once, in the order of subscription. If a callback causes another
    transition, the remaining callbacks are called only for the latest one.
    """

    __slots__ = ("_callbacks", "_open")

    def __init__(self) -> None:
        self._open = True
        self._callbacks: tuple[Callback, ...] = ()  # most gates have none, and an empty list takes memory

    @property
    def is_open(self) -> bool:
        """Whether more may be requested."""
        return self._open

    def change(self, is_open: bool) -> None:
        """Open or shut; idempotent. Callbacks run before this returns."""
        if is_open == self._open:
            return
        self._open = is_open
        for callback in self._callbacks:
            # A callback may have unsubscribed a later one, or changed the state again. Then the nested call has
            # called the rest already.
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
