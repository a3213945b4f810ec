"""Accepted sockets that do not belong to the listener's protocol yet: first a PROXY header or TLS must be received.

`ProxiedSocket` reads exactly the header and no byte behind it. TLS and the listener's own protocol then get a socket
from which nothing more was read, and the client's address as their `source`. Messages cost nothing extra.
`gateway.net.handshakes` has TLS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from gateway.net.proxied import ProxiedSource, Proxies, Sourced
from gateway.net.strangers import Stranger, Strangers
from gateway.security.throttle import address_of, peer_of
from protocols.proxy import HeaderParser, ProxyError

HEADER_S: Final = 5.0  # to receive the header; a balancer sends it as soon as it connects
BUFFER_BYTES: Final = 4096

Factory = Callable[[], asyncio.BaseProtocol]


class Unfinished(asyncio.BaseProtocol):
    """The protocol of one socket until then. Its peer has not logged in."""

    def __init__(self, factory: Factory, strangers: Strangers | None, unfinished: set[Unfinished]) -> None:
        """`factory` makes the next protocol. `unfinished` are the sockets of the listener in this state."""
        self.source: ProxiedSource | None = None  # see `gateway.net.proxied.Sourced`
        self._factory = factory
        self._strangers = strangers
        self._unfinished = unfinished
        self._stranger: Stranger | None = None
        self._transport: asyncio.Transport | None = None
        unfinished.add(self)

    def abort(self) -> None:
        """Abort the socket."""
        if self._transport is not None:
            self._transport.abort()

    def _count(self, peername: object, size: int) -> bool:
        """Count memory for the peer until the end. False means that the socket was aborted for it."""
        if self._strangers is not None:
            self._stranger = self._strangers.enter(address_of(peer_of(peername)), self.abort)
        return self._stranger is None or self._stranger.received(size)

    def _end(self) -> None:
        self._unfinished.discard(self)
        self._transport = None
        if self._stranger is not None:
            self._stranger.leave()
            self._stranger = None

    def _next(self, transport: asyncio.Transport, source: ProxiedSource | None) -> asyncio.Protocol:
        """Return the next protocol, to which the socket belongs now; its `connection_made` must be called."""
        protocol = cast("asyncio.Protocol", self._factory())
        if source is not None:
            cast("Sourced", protocol).source = source
        transport.set_protocol(protocol)
        return protocol


class ProxiedSocket(Unfinished, asyncio.BufferedProtocol):
    """The protocol of one socket until its header is read. Until then it counts as its balancer's."""

    def __init__(
        self, proxies: Proxies, factory: Factory, strangers: Strangers | None, unfinished: set[Unfinished]
    ) -> None:
        """Count the connection as unfinished until its header ends; the next protocol gets the bytes behind it."""
        super().__init__(factory, strangers, unfinished)
        self._proxies = proxies
        self._parser = HeaderParser()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        proxies.waiting += 1
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open, and nothing was read from it."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        if peer is None:  # closed already: a balancer's health check that only connects
            self.abort()
            return
        if not self._proxies.trusts(peer):
            self._proxies.refuse_untrusted(peer)
            self.abort()
            return
        if not self._count(peer, BUFFER_BYTES):
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

    def _refuse(self, reason: str) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self._proxies.refuse_broken(transport.get_extra_info("peername"), reason)
            self.abort()
        self._end()

    def _end(self) -> None:
        if self in self._unfinished:
            self._proxies.waiting -= 1
        super()._end()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hand_over(self) -> None:
        transport, header = self._transport, self._parser.header
        if transport is None or transport.is_closing() or header is None:
            return
        self._end()
        protocol = self._next(transport, self._proxies.source(header))
        transport.resume_reading()  # like a socket that was just accepted
        protocol.connection_made(transport)
