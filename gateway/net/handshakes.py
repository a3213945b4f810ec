"""TLS handshakes under way: peers that nothing is known of yet, counted with the other strangers, for a bounded time.

A connection of ours is made when its handshake is done. What breaks off before leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

from gateway.net.proxied import Source, Sourced
from gateway.net.strangers import Stranger, Strangers
from gateway.security.throttle import address_of, peer_of

HANDSHAKE_S: Final = 10.0
HANDSHAKE_BYTES: Final = 48 * 1024
"""What one holds of ours while it is under way, whether its peer says something or not (OpenSSL's state, mostly)."""

Factory = Callable[[], asyncio.BaseProtocol]


class Handshakes:
    """Those of one listener."""

    def __init__(self, tls: ssl.SSLContext, factory: Factory, strangers: Strangers | None) -> None:
        """`factory` makes the protocol of a socket whose handshake is done. Until then `strangers` counts it."""
        self.tls = tls
        self.factory = factory
        self.strangers = strangers
        self.running: set[Handshake] = set()

    def accept(self) -> asyncio.BaseProtocol:
        """The protocol of a socket that was just accepted."""
        handshake = Handshake(self)
        self.running.add(handshake)
        return handshake

    def stop(self) -> None:
        """Break off all that are under way."""
        for handshake in tuple(self.running):
            handshake.abort()


class Handshake(asyncio.Protocol):
    """One socket, until its handshake is done.

    `start_tls` is begun within `connection_made`, before anything is read (a task would begin it too late), and goes on
    when its future is done: no task is needed.
    """

    def __init__(self, all_of_them: Handshakes) -> None:
        self._all = all_of_them
        self.source: Source | None = None  # see `gateway.net.proxied.Sourced`
        self._transport: asyncio.Transport | None = None
        self._stranger: Stranger | None = None
        self._going: Coroutine[Any, Any, asyncio.Transport | None] | None = None
        self._early: list[bytes] = []  # came with the end of the handshake
        self._is_at_end = False
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open, and nothing was read of it."""
        self._transport = raw = cast("asyncio.Transport", transport)
        if self._all.strangers is not None:
            peer = transport.get_extra_info("peername") if self.source is None else self.source.peername
            self._stranger = self._all.strangers.enter(address_of(peer_of(peer)), self.abort)
            if not self._stranger.took(HANDSHAKE_BYTES):
                return
        loop = asyncio.get_running_loop()
        self._going = loop.start_tls(raw, self, self._all.tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_S)
        self._go_on()

    def data_received(self, data: bytes) -> None:
        """The loop may be quicker to read than to say that the handshake is done."""
        self._early.append(data)

    def eof_received(self) -> bool:
        """Likewise."""
        self._is_at_end = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Likewise; or the socket was cut off before it began."""
        self._lost = True
        self._end()

    def abort(self) -> None:
        """Cut it off at once."""
        if self._transport is not None:
            self._transport.abort()

    def _go_on(self, _: object = None) -> None:
        """A step of the handshake: until its future is there, then to its end. Who cannot or does not is cut off."""
        assert self._going is not None
        try:
            waiting = self._going.send(None)
        except StopIteration as done:
            raw, secured = self._transport, done.value
            self._end()
            if secured is None or self._lost or raw is None or raw.is_closing():
                if secured is not None:
                    secured.abort()
                return
            self._hand_over(secured)
        except OSError:  # the handshake's faults are among them (`ssl.SSLError`)
            self.abort()
            self._end()
        else:
            waiting.add_done_callback(self._go_on)

    def _end(self) -> None:
        self._all.running.discard(self)
        self._transport = self._going = None
        if self._stranger is not None:
            self._stranger.leave()
            self._stranger = None

    def _hand_over(self, transport: asyncio.Transport) -> None:
        protocol = cast("asyncio.Protocol", self._all.factory())
        if self.source is not None:
            cast("Sourced", protocol).source = self.source
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for data in self._early:
            protocol.data_received(data)
        if self._is_at_end:
            protocol.eof_received()
