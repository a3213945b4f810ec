"""Listeners (bind, PROXY header, TLS, connection limit, pause) and the servers of their connections."""

from __future__ import annotations

import abc
import asyncio
import errno
import functools
import os
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final, cast

import msgspec
import structlog

from gateway.net.descriptors import descriptors
from gateway.net.handshakes import Handshake
from gateway.net.proxied import Proxies
from gateway.net.strangers import Strangers
from gateway.net.unfinished import Factory, ProxiedSocket, Unfinished
from gateway.runtime.failures import ExpectedError, Repeats
from gateway.security.entrance import Entrance
from gateway.security.throttle import peer_of
from gateway.settings.config import Address
from gateway.settings.listeners import ListenerSettings
from gateway.views.clients import Connected
from gateway.views.drain import Departing
from gateway.views.flow import Flowing
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)

WARN_INTERVAL_S: Final = 60.0
BACKLOG: Final = 4096  # a fleet that reconnects at the same moment waits in the kernel and is not refused


class ListenError(Exception):
    """The gateway cannot listen on an address; the text says which and why."""


class NoDescriptorsError(ExpectedError):
    """A socket was accepted in the same loop iteration in which the file descriptors were used up."""


Counts = dict[str, dict[str, int]]
"""By the listener's name and its protocol."""


class ListenerStatistics(msgspec.Struct, frozen=True):
    """Counts of each listener."""

    connections: Annotated[
        Counts, gauge("open connections, including those that have not logged in", "listener", "protocol")
    ]
    connections_total: Annotated[Counts, counter("connections accepted", "listener", "protocol")]
    refused_total: Annotated[
        Counts, counter("connections closed because the listener had its max_connections", "listener", "protocol")
    ]
    certificate_ends: Annotated[
        dict[str, float], gauge("when the first certificate of its chain ends, in seconds since the epoch", "listener")
    ]


class Listener:
    """One listening address. It can pause: clients that connect meanwhile wait in the kernel's backlog.

    uvloop's server cannot pause, so it is closed and re-created around the same sockets, which are kept here.
    """

    def __init__(
        self,
        settings: ListenerSettings,
        entrance: Entrance,  # the listener's name and logins, as its connections see them
        accept: Callable[[Entrance], asyncio.BaseProtocol],  # makes the protocol of a connection, behind TLS
        *,
        tls: ssl.SSLContext | None = None,  # None: plain text
        strangers: Strangers | None = None,  # counts memory of connections whose PROXY header or TLS is not done
        proxies: Proxies | None = None,  # the load balancers in front; None: clients connect directly
    ) -> None:
        self.name = settings.name
        self.entrance = entrance
        self.settings = settings
        self.is_secure = tls is not None
        self._make = accept
        self._unfinished: set[Unfinished] = set()  # sockets in the PROXY header or the TLS handshake
        self._factory: Factory = self._admit
        if tls is not None:
            self._factory = functools.partial(Handshake, tls, self._factory, strangers, self._unfinished)
        if proxies is not None:
            self._factory = functools.partial(ProxiedSocket, proxies, self._factory, strangers, self._unfinished)
        self._servers: list[asyncio.Server] = []
        self._sockets: list[socket.socket] = []
        self._bound = ""
        self.accepted = self.refused = 0
        self._repeats = Repeats(WARN_INTERVAL_S)

    async def start(self) -> None:
        """Bind and accept; raise ListenError when the address cannot be bound."""
        settings = self.settings
        address = settings.address
        try:
            server = await asyncio.get_running_loop().create_server(
                self._accept, address.host, address.port, backlog=BACKLOG
            )
        except OSError as error:
            raise ListenError(listen_error(settings.key, address, error)) from error
        self._servers = [server]
        self._sockets = [socket.socket(fileno=os.dup(listening.fileno())) for listening in server.sockets]
        self._bound = peer_of(server.sockets[0].getsockname())
        descriptors.listeners.add(self)
        log.info("listening", listener=self.name, protocol=settings.protocol, address=self._bound, tls=self.is_secure)

    def _accept(self) -> asyncio.BaseProtocol:
        if descriptors.paused:
            raise NoDescriptorsError  # makes libuv stop accepting; the server is closed in this same loop iteration
        descriptors.accepted()
        most = self.settings.max_connections
        if most is not None and self.connections >= most:
            self._refuse(most)
            return _Closed()
        self.accepted += 1
        return self._factory()

    def _admit(self) -> asyncio.BaseProtocol:
        self.entrance.connections += 1
        return self._make(self.entrance)

    def _refuse(self, most: int) -> None:
        self.refused += 1
        if self._repeats.suppressed() is not None:
            log.warning("connection closed", listener=self.name, max_connections=most, further="none for a minute")

    @property
    def bound(self) -> str:
        """The address that is bound, as `HOST:PORT`; "" while not listening."""
        return self._bound

    @property
    def accepting(self) -> bool:
        """Whether new sockets are accepted."""
        return any(server.is_serving() for server in self._servers)

    @property
    def connections(self) -> int:
        """The number of open connections, including those in the PROXY header or the TLS handshake."""
        return len(self._unfinished) + self.entrance.connections

    def pause(self) -> None:
        """Stop accepting; clients wait in the kernel's backlog."""
        for server in self._servers:
            server.close()
        self._servers = []

    async def resume(self) -> None:
        """Accept again, on the same sockets."""
        for listening in self._sockets:
            copy = listening.dup()
            server = await asyncio.get_running_loop().create_server(self._accept, sock=copy, backlog=BACKLOG)
            if self._sockets and not descriptors.paused:
                self._servers.append(server)
            else:
                server.close()

    def close(self) -> None:
        """Stop listening; open connections stay open."""
        descriptors.listeners.discard(self)
        self.pause()
        for unfinished in tuple(self._unfinished):
            unfinished.abort()
        for listening in self._sockets:
            listening.close()
        self._sockets = []
        self._bound = ""


def listener_statistics(listeners: Iterable[Listener], certificate_ends: dict[str, float]) -> ListenerStatistics:
    """Return the counts so far."""
    counts = ListenerStatistics({}, {}, {}, certificate_ends)
    for listener in listeners:
        protocol = listener.settings.protocol
        counts.connections[listener.name] = {protocol: listener.connections}
        counts.connections_total[listener.name] = {protocol: listener.accepted}
        counts.refused_total[listener.name] = {protocol: listener.refused}
    return counts


class _Closed(asyncio.Protocol):
    """The protocol of a socket above `max_connections`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()


MetricSource = tuple[str, Callable[[], msgspec.Struct]]
"""The prefix of metrics, and what returns their values."""


class Server(abc.ABC):
    """One protocol's server, from the sockets of all its listeners to Kafka and back."""

    name: str  # of the protocol
    stopped = False  # for good, as opposed to paused listeners

    def __init__(self) -> None:
        self.listeners: list[Listener] = []

    def add(self, listener: Listener) -> None:
        """Serve this listener too. Must be called before the start."""
        self.listeners.append(listener)

    @abc.abstractmethod
    def accept(self, entrance: Entrance) -> asyncio.BaseProtocol:
        """Return the asyncio protocol for a new socket of a listener."""

    def messages(self, data: bytes) -> Sequence[bytes]:
        """Return the WebSocket messages in which the bytes of one write are sent: by default all in one."""
        return (data,)

    async def start(self) -> None:
        """Listen; raise ListenError when an address cannot be bound."""
        for listener in self.listeners:
            await listener.start()

    @property
    def bound(self) -> str:
        """The address of the first listener, as `HOST:PORT`; "" while not listening."""
        return self.listeners[0].bound if self.listeners else ""

    def stop_accepting(self) -> None:
        """Close the listening sockets; open connections stay open."""
        self.stopped = True
        for listener in self.listeners:
            listener.close()

    def stop_receiving(self) -> None:
        """Accept no more messages; those already received are still answered."""
        self.stop_accepting()

    @abc.abstractmethod
    async def stop(self, timeout: float) -> None:
        """Close every connection with the protocol's own message, within `timeout` seconds."""

    def departing(self) -> Iterable[Departing]:
        """Return every connection, to be closed when the gateway stops."""
        return ()

    def flowing(self) -> list[Flowing]:
        """Return the connections that can report their flow, for /flow."""
        return []

    def clients(self) -> Iterable[Connected]:
        """Return the clients that operators can list, trace and close."""
        return ()

    @abc.abstractmethod
    def statistics(self) -> msgspec.Struct:
        """Return the counts for the metrics."""

    def sources(self) -> Iterable[MetricSource]:
        """Return all of its counts."""
        yield self.name, self.statistics


async def try_address(key: str, address: Address) -> None:
    """Raise ListenError if nobody could listen on the address now, so that a start fails before it waits for Kafka."""
    try:
        server = await asyncio.get_running_loop().create_server(_Closed, address.host, address.port)
    except OSError as error:
        raise ListenError(listen_error(key, address, error)) from error
    server.close()


def listen_error(key: str, address: Address, error: OSError) -> str:
    """Return one line for a listener that cannot be opened: the `key` of the configuration, and why."""
    if error.errno == errno.EADDRINUSE:
        return f"{key}: {address} is in use by another program"
    if error.errno == errno.EACCES:
        return f"{key}: {address} needs a privilege that this process does not have"
    return f"{key}: {address}: {error.strerror or error}"
