"""Where traces learn of connections that come and go. Nobody traces, as a rule: then a connection costs a look here.

There is one `taps` for the process. What is traced, and how, is `gateway.trace`'s business.
"""

from __future__ import annotations

from typing import Any, Final, Protocol


class Watcher(Protocol):
    """A trace that goes on."""

    def opened(self, socket: Any) -> None:
        """A connection is open, and nothing was read of it."""

    def named(self, socket: Any, identifier: str) -> None:
        """Its client has logged in; `identifier`: its id (`gateway.clients`)."""

    def closed(self, socket: Any, reason: str) -> None:
        """The connection is gone."""


class Taps:
    """The traces that go on."""

    __slots__ = ("watchers",)

    def __init__(self) -> None:
        self.watchers: tuple[Watcher, ...] = ()

    def opened(self, socket: Any) -> None:
        """See `Watcher.opened`; likewise the others."""
        for watcher in self.watchers:
            watcher.opened(socket)

    def named(self, socket: Any, identifier: str) -> None:
        """A client has logged in."""
        for watcher in self.watchers:
            watcher.named(socket, identifier)

    def closed(self, socket: Any, reason: str) -> None:
        """A connection is gone."""
        for watcher in self.watchers:
            watcher.closed(socket, reason)


taps: Final = Taps()
"""The process's."""
