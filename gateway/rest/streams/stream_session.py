"""What event streams and live WebSockets have in common: a session on a pump, and the set of the open sessions."""

from __future__ import annotations

import abc
import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from flowcontrol.admission import client_share
from gateway.net.connected_client import ConnectedClient
from gateway.net.http.http_server import HttpConnection
from gateway.net.pump import Pump
from gateway.net.pumps import Pumps
from gateway.rest.present import BY_CLIENT, stream_key
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.services import RestServices
from gateway.rest.streams.feeds import Feeds
from gateway.security.expiry import Expiry
from gateway.security.rights.authorization import Grant
from gateway.views.clients import CLOSED
from gateway.views.presence import HTTP, Present
from protocols.connection import Connection
from protocols.rest.errors import busy, too_many

TOO_MANY: Final = "There are too many streams; try again"
PENDING: Final = 64 * 1024  # bytes that are written immediately; fewer wait for the end of the loop iteration


class RecordConnection(Connection, Protocol):
    """The sans-io connection of a session, such as a `protocols.rest.streams.stream_connection.StreamConnection`."""

    waiting: int  # bytes that wait to be written
    closing: bool


class StreamSession(ConnectedClient):
    """A connection on which records are sent."""

    protocol = "http"

    def __init__(self, streams: Streams[Any], call: Call, connection: RecordConnection) -> None:
        super().__init__()
        self.services = streams.services
        self.connection = connection
        self.grant = call.grant
        self.identity, self.principal = call.grant.identity, call.grant.identity.name
        self.limits = call.connection.limits  # the session's own from `connected` on
        self.streams: Streams[Any] | None = None  # that count it, while it is open
        self._presence = streams.services.presence
        self._presence_key = stream_key(call.grant.names.mqtt(call.grant.identity.name))
        self._ended = BY_CLIENT  # why it ended, for presence
        self._expires_ms = call.expires_ms

    # pump.Handler

    def connected(self, pump: Pump) -> None:
        """The session has the socket now."""
        super().connected(pump)
        self._expiry = Expiry(self.services.wall_clock, self._expired)
        self._expiry.set(self._expires_ms)
        if self._presence is not None:
            name = self.grant.identity.name
            present = Present(name, name, HTTP, pump.peer, self.services.wall_clock())
            self._presence.online(self._presence_key, self, present)
        self.limit_sending()

    def disconnected(self, reason: str) -> None:
        """End the session: its connection is closed."""
        if self.streams is not None:
            self.streams.left(self)
            self.streams = None
        if self._presence is not None:
            self._presence.offline(self._presence_key, self, self._ended)
        self._expiry.release()
        self.leave_limits()

    def flush(self) -> None:
        """Write what was sent soon, or immediately if it is much."""
        if self.connection.waiting >= PENDING:
            self.pump.flush()
        else:
            self.pump.flush_soon()

    # its end

    @abc.abstractmethod
    def end(self, reason: str) -> None:
        """Close the connection in the protocol's way; the client is told the reason if the protocol can."""

    @abc.abstractmethod
    def rights_changed(self) -> None:
        """End what the client's changed rights no longer allow."""

    def kick(self) -> None:
        """Close the connection on behalf of an operator."""
        self.end(CLOSED)

    def _expired(self) -> None:
        self.end("the token has expired")

    # for operators

    @property
    def identifier(self) -> str:
        """Its address; "" once it ends."""
        return "" if self.left else f"http/{self.pump.peer}"


Session = TypeVar("Session", bound=StreamSession)


class Streams(OperationSet, Generic[Session]):
    """The open sessions of one kind, and the operation that opens them."""

    def __init__(self, services: RestServices, feeds: Feeds) -> None:
        self.services = services
        self.feeds = feeds
        self.pumps = Pumps(services.spawn, outgoing=services.publisher.budgets.outgoing)
        self._opening = 0  # requests that are opening a session
        self._clients: Counter[str] = Counter()  # open sessions, by client
        services.access_list.watch(self._rights_changed)

    def check_full(self, call: Call) -> None:
        """Raise RestError if there are as many sessions as the configuration allows, in all (503) or of a client (429).

        Sessions that are being opened count in all only.
        """
        config = self.services.config
        if len(self.pumps) + self._opening >= config.max_streams:
            raise busy(TOO_MANY)
        most = client_share(config.max_streams, config.max_streams_per_client)
        if self._clients[call.connection.share] >= most:
            raise too_many(f"You have {most} streams; close some or try again")

    def left(self, session: StreamSession) -> None:
        """Stop counting a session for its client."""
        self._clients[session.share] -= 1
        if not self._clients[session.share]:
            del self._clients[session.share]

    def connect(
        self, session: Session, connection: HttpConnection, transport: asyncio.Transport, received: bytes
    ) -> None:
        """Hand a socket that the HTTP connection has released to a session."""
        pump = self.pumps.open(session.connection, session, connection.entrance)
        pump.source = connection.source
        transport.set_protocol(pump)
        pump.connection_made(transport)
        self._clients[session.share] += 1
        session.streams = self
        if received:
            pump.data_received(received)

    def _rights_changed(self, changed: AbstractSet[Grant]) -> None:
        for session in self.departing():
            if session.grant in changed:
                session.rights_changed()

    def departing(self) -> Sequence[Session]:
        """Return the open sessions."""
        return tuple(cast("Iterable[Session]", self.pumps.handlers()))

    def clients(self) -> Sequence[Session]:
        """Return the open sessions."""
        return self.departing()

    def flowing(self) -> Sequence[Session]:
        """Return the open sessions."""
        return self.departing()

    async def stop(self) -> None:
        """Abort the connections that are still open."""
        await self.pumps.close(0)
