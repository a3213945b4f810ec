"""Notifies traces of opened and closed connections. Without traces this costs a connection one check.

The process has one `taps`. `gateway.trace` decides what is traced and how.
"""

from __future__ import annotations

from typing import Any, Final, Protocol


class Watcher(Protocol):
    """A running trace."""

    def opened(self, socket: Any) -> None:
        """Called when a connection is open and nothing has been read from it."""

    def named(self, socket: Any, identifier: str) -> None:
        """Called when a client has logged in; `identifier` is its id (`gateway.views.clients`)."""

    def closed(self, socket: Any, reason: str) -> None:
        """Called when a connection is closed."""

    def end(self, why: str) -> None:
        """Called when the process stops: watch no longer."""


class Taps:
    """The running traces."""

    __slots__ = ("watchers",)

    def __init__(self) -> None:
        self.watchers: tuple[Watcher, ...] = ()

    def opened(self, socket: Any) -> None:
        """A connection was accepted."""
        for watcher in self.watchers:
            watcher.opened(socket)

    def named(self, socket: Any, identifier: str) -> None:
        """A connection's client is known by this id now."""
        for watcher in self.watchers:
            watcher.named(socket, identifier)

    def closed(self, socket: Any, reason: str) -> None:
        """A connection was closed, for a reason that is "" if the client just left."""
        for watcher in self.watchers:
            watcher.closed(socket, reason)


taps: Final = Taps()
"""The process's taps."""
