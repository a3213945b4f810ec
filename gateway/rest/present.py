"""Publishes the presence of HTTP clients: of consumers by name, of event streams and WebSockets by principal."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from gateway.presence.ledger import Present
from gateway.presence.presence import Presence
from gateway.presence.records import HTTP, Ended

BY_CLIENT = Ended("client")
STOPPED = Ended("drain", text="the gateway is stopping")
ABANDONED = Ended("timeout", text="the consumer was not used")
BY_SERVER = Ended("server")


def stream_key(name: str) -> str:
    """Return the key of an event stream or a WebSocket; `name` is the principal's name, unique across tenants."""
    return f"{HTTP}/stream/{name}"


class HttpPresence:
    """Reports HTTP clients to `Presence`, by keys: a consumer's `identifier`, or a `stream_key`."""

    def __init__(self, presence: Presence | None, wall_clock: Callable[[], int]) -> None:
        """Without `presence` all methods do nothing; `wall_clock` returns epoch milliseconds."""
        self._presence = presence
        self._wall_clock = wall_clock

    def online(self, key: str, connection: Hashable, client: str, principal: str, address: str) -> None:
        """A consumer was created, or a stream was opened."""
        if self._presence is not None:
            now = self._wall_clock()
            self._presence.online(key, connection, Present(client, principal, HTTP, address, now))

    def offline(self, key: str, connection: Hashable, ended: Ended) -> None:
        """A consumer was deleted, or a stream was closed."""
        if self._presence is not None:
            self._presence.offline(key, connection, ended)
