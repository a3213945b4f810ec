"""Connections through load balancers: reads the PROXY header in front of TLS and the listener's protocol.

`ProxiedSocket` reads exactly the header and no byte behind it. TLS and the listener's own protocol then get a socket
from which nothing more was read, and the client's address as their `source`. Messages cost nothing extra.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Protocol, cast

import msgspec
import structlog

from gateway.failures import Repeats
from gateway.net.strangers import Stranger, Strangers
from gateway.security.throttle import address_of, peer_of
from gateway.statistics import counter, gauge
from protocols.proxy import HeaderParser, ProxyError, ProxyHeader

log = structlog.get_logger(__name__)

HEADER_S: Final = 5.0  # to receive the header; a balancer sends it as soon as it connects
WARN_INTERVAL_S: Final = 60.0
BUFFER_BYTES: Final = 4096

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Source(msgspec.Struct, frozen=True):
    """The client behind a connection, as its load balancer states."""

    peername: tuple[str, int]  # the client's address
    peercert: Mapping[str, Any] | None = None  # its certificate, in the form of `SSLObject.getpeercert`


def certificate(source: Source | None, transport: asyncio.BaseTransport | None) -> Mapping[str, Any] | None:
    """Return a client's certificate in the form of `SSLObject.getpeercert`; the balancer or we have verified it."""
    if source is not None and source.peercert is not None:
        return source.peercert
    shown: Mapping[str, Any] | None = transport.get_extra_info("peercert") if transport is not None else None
    return shown


class Sourced(Protocol):
    """A protocol whose `source` is set before `connection_made`. None means that the socket's peer is the client."""

    source: Source | None


class ProxyStatistics(msgspec.Struct):
    """Counts of connections to listeners with `proxy_protocol`, since the start."""

    headers_total: Annotated[int, counter("connections with a valid PROXY header")] = 0
    untrusted_total: Annotated[int, counter("connections refused: not from security.trusted_proxies")] = 0
    broken_total: Annotated[
        int, counter("connections refused: the PROXY header was missing, malformed or too slow")
    ] = 0
    waiting: Annotated[int, gauge("connections that wait for their PROXY header")] = 0


class Proxies:
    """The trusted load balancers."""

    def __init__(self, trusted: Sequence[Network], *, common_names: bool) -> None:
        """Trust headers from these networks; with `common_names` also their common name of a client's certificate."""
        self._trusted = trusted
        self._common_names = common_names
        self._counts = ProxyStatistics()
        self._repeats = Repeats(WARN_INTERVAL_S)
        self.waiting = 0  # connections whose header is not complete yet

    def trusts(self, peer: object) -> bool:
        """Whether a socket's `peername` is a trusted balancer."""
        if not isinstance(peer, tuple):
            return False
        address = ipaddress.ip_address(peer[0].partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._trusted)

    def source(self, header: ProxyHeader) -> Source | None:
        """Return the client of a connection with this header. None means that it is the balancer's own connection."""
        self._counts.headers_total += 1
        if header.source is None:
            return None
        name = header.common_name if self._common_names else None
        return Source(header.source, None if name is None else {"subject": ((("commonName", name),),)})

    def refuse_untrusted(self, peer: object) -> None:
        """Count a connection that does not come from a trusted balancer, and log it at times."""
        self._counts.untrusted_total += 1
        self._warn("connection refused: not from security.trusted_proxies", peer)

    def refuse_broken(self, peer: object, reason: str) -> None:
        """Count a balancer's connection without a valid header, and log it at times."""
        self._counts.broken_total += 1
        self._warn(f"connection refused, no valid PROXY header: {reason}", peer)

    def _warn(self, event: str, peer: object) -> None:
        if self._repeats.suppressed() is not None:
            log.warning(event, peer=peer[0] if isinstance(peer, tuple) else "unknown", further="none for a minute")

    def statistics(self) -> ProxyStatistics:
        """Return the counts so far."""
        return msgspec.structs.replace(self._counts, waiting=self.waiting)


class AwaitedHeaders:
    """The sockets of one listener whose PROXY header is awaited."""

    def __init__(
        self, proxies: Proxies, factory: Callable[[], asyncio.BaseProtocol], strangers: Strangers | None
    ) -> None:
        """`factory` makes the protocol behind the header. Until then `strangers` counts a socket as its balancer's."""
        self.proxies = proxies
        self.factory = factory
        self.strangers = strangers
        self.waiting: set[ProxiedSocket] = set()

    def accept(self) -> asyncio.BaseProtocol:
        """Return the protocol for a socket that was just accepted."""
        socket = ProxiedSocket(self)
        self.waiting.add(socket)
        self.proxies.waiting += 1
        return socket

    def stop(self) -> None:
        """Abort all sockets that have not sent their header."""
        for socket in tuple(self.waiting):
            socket.abort()


class ProxiedSocket(asyncio.BufferedProtocol):
    """The protocol of one socket until its header is read."""

    def __init__(self, headers: AwaitedHeaders) -> None:
        self._headers = headers
        self._stranger: Stranger | None = None
        self._parser = HeaderParser()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open, and nothing was read from it."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        proxies, strangers = self._headers.proxies, self._headers.strangers
        if peer is None:  # closed already: a balancer's health check that only connects
            self.abort()
            return
        if not proxies.trusts(peer):
            proxies.refuse_untrusted(peer)
            self.abort()
            return
        if strangers is not None:
            self._stranger = strangers.enter(address_of(peer_of(peer)), self.abort)
            if not self._stranger.received(BUFFER_BYTES):
                return
        self._timer = asyncio.get_running_loop().call_later(HEADER_S, self._refuse, "timeout")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return a buffer for bytes that certainly belong to the header, and no more."""
        return self._buffer[: self._parser.needed]

    def buffer_updated(self, nbytes: int) -> None:
        """A part of the header was received."""
        try:
            self._parser.receive_data(bytes(self._buffer[:nbytes]))
        except ProxyError as error:
            self._refuse(str(error))
            return
        if self._parser.header is not None and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._hand_over)  # a read callback must not change the protocol

    def eof_received(self) -> bool:
        """The balancer has closed; if it sent nothing, this was its health check."""
        if self._parser.started:
            self._refuse("truncated")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._end()

    def abort(self) -> None:
        """Abort the socket."""
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, reason: str) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self._headers.proxies.refuse_broken(transport.get_extra_info("peername"), reason)
            self.abort()
        self._end()

    def _end(self) -> None:
        if self in self._headers.waiting:
            self._headers.waiting.remove(self)
            self._headers.proxies.waiting -= 1
        self._transport = None
        if self._stranger is not None:
            self._stranger.leave()
            self._stranger = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hand_over(self) -> None:
        transport, header = self._transport, self._parser.header
        if transport is None or transport.is_closing() or header is None:
            return
        self._end()
        protocol = self._headers.factory()
        cast("Sourced", protocol).source = self._headers.proxies.source(header)
        transport.set_protocol(protocol)
        transport.resume_reading()  # like a socket that was just accepted
        protocol.connection_made(transport)
