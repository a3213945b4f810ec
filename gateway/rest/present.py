"""Publishes the presence of HTTP clients: of consumers by name, of event streams and WebSockets by principal."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from gateway.presence.ledger import Present
from gateway.presence.presence import Presence
from gateway.presence.records import CLIENT, DRAIN, HTTP, SERVER, TIMEOUT, Ended

BY_CLIENT = Ended(CLIENT)
STOPPED = Ended(DRAIN, text="the gateway is stopping")
ABANDONED = Ended(TIMEOUT, text="the consumer was not used")
BY_SERVER = Ended(SERVER)


class Consumer(Hashable, Protocol):
    """A consumer that a client created."""

    name: str

    @property
    def identifier(self) -> str:
        """See `gateway.clients.Connected`."""

    @property
    def principal(self) -> str:
        """The principal of its owner."""


class HttpPresence:
    """Reports HTTP clients to `Presence`."""

    def __init__(self, presence: Presence | None, wall_clock: Callable[[], int]) -> None:
        """Without `presence` all methods do nothing; `wall_clock` returns epoch milliseconds."""
        self._presence = presence
        self._wall_clock = wall_clock

    def consumer(self, consumer: Consumer, address: str) -> None:
        """A consumer was created."""
        self._online(consumer.identifier, consumer, consumer.name, consumer.principal, address)

    def consumer_deleted(self, consumer: Consumer, ended: Ended) -> None:
        """A consumer was deleted."""
        if self._presence is not None:
            self._presence.offline(consumer.identifier, consumer, ended)

    def stream(self, stream: Hashable, name: str, principal: str, address: str) -> None:
        """An event stream or a WebSocket was opened; `name` is the principal's name, unique across tenants."""
        self._online(f"{HTTP}/stream/{name}", stream, principal, principal, address)

    def stream_closed(self, stream: Hashable, name: str, ended: Ended) -> None:
        """An event stream or a WebSocket was closed."""
        if self._presence is not None:
            self._presence.offline(f"{HTTP}/stream/{name}", stream, ended)

    def _online(self, key: str, connection: Hashable, client: str, principal: str, address: str) -> None:
        if self._presence is not None:
            now = self._wall_clock()
            self._presence.online(key, connection, Present(client, principal, HTTP, address, now))
