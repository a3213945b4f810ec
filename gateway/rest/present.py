"""What the presence topic is told of HTTP's clients: of consumers by name, of streams and WebSockets by principal."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from gateway.presence.ledger import Present
from gateway.presence.presence import Presence
from gateway.presence.records import CLIENT, DRAIN, HTTP, SERVER, TIMEOUT, Ended

BY_CLIENT = Ended(CLIENT)
STOPPED = Ended(DRAIN, text="the gateway is stopping")
ABANDONED = Ended(TIMEOUT, text="nobody has asked the consumer")
OVER = Ended(SERVER)


class Consumer(Hashable, Protocol):
    """A consumer that a client created."""

    name: str

    @property
    def identifier(self) -> str:
        """See `gateway.clients.Connected`."""

    @property
    def principal(self) -> str:
        """Whose it is."""


class Presents:
    """HTTP's clients of a process."""

    def __init__(self, presence: Presence | None, wall_clock: Callable[[], int]) -> None:
        """Nobody is told without a `presence`; `wall_clock`: epoch milliseconds."""
        self._presence = presence
        self._wall_clock = wall_clock

    def consumer(self, consumer: Consumer, address: str) -> None:
        """A consumer was created."""
        self._online(consumer.identifier, consumer, consumer.name, consumer.principal, address)

    def consumer_gone(self, consumer: Consumer, ended: Ended) -> None:
        """It was deleted."""
        if self._presence is not None:
            self._presence.offline(consumer.identifier, consumer, ended)

    def stream(self, stream: Hashable, name: str, principal: str, address: str) -> None:
        """A stream of events or a WebSocket is open; `name`: the principal's among those of all tenants."""
        self._online(f"{HTTP}/stream/{name}", stream, principal, principal, address)

    def stream_gone(self, stream: Hashable, name: str, ended: Ended) -> None:
        """It was closed."""
        if self._presence is not None:
            self._presence.offline(f"{HTTP}/stream/{name}", stream, ended)

    def _online(self, key: str, connection: Hashable, client: str, principal: str, address: str) -> None:
        if self._presence is not None:
            now = self._wall_clock()
            self._presence.online(key, connection, Present(client, principal, HTTP, address, now))
