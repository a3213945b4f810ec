"""TLS handshakes in progress: they have a timeout, and count as peers that have not logged in.

The protocol's connection is created when its handshake is done. A handshake that fails leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from typing import Any, Final, cast

from gateway.net.strangers import Strangers
from gateway.net.unfinished import Factory, Unfinished

HANDSHAKE_S: Final = 10.0
HANDSHAKE_BYTES: Final = 48 * 1024
"""Memory of one handshake, whether its peer sends anything or not (mostly OpenSSL's state)."""


class Handshake(Unfinished, asyncio.Protocol):
    """The protocol of one socket until its handshake is done.

    `connection_made` starts `start_tls` itself, before anything is read (a task would start it too late), and continues
    it when its future is done: no task is needed.
    """

    def __init__(
        self, tls: ssl.SSLContext, factory: Factory, strangers: Strangers | None, unfinished: set[Unfinished]
    ) -> None:
        """Count the connection as unfinished until the handshake ends; the next protocol gets the decrypted bytes."""
        super().__init__(factory, strangers, unfinished)
        self._tls = tls
        self._starting: Coroutine[Any, Any, asyncio.Transport | None] | None = None
        self._early: list[bytes] = []  # data received together with the end of the handshake
        self._eof = False
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open, and nothing was read from it."""
        self._transport = raw = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername") if self.source is None else self.source.peername
        if not self._count(peer, HANDSHAKE_BYTES):
            return
        loop = asyncio.get_running_loop()
        self._starting = loop.start_tls(raw, self, self._tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_S)
        self._step()

    def data_received(self, data: bytes) -> None:
        """Keep data that the loop delivers before it reports the end of the handshake."""
        self._early.append(data)

    def eof_received(self) -> bool:
        """Note an end of data that the loop delivers before it reports the end of the handshake."""
        self._eof = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket was closed before the handshake was reported, or before it started."""
        self._lost = True
        self._end()

    def _step(self, _: object = None) -> None:
        """Run `start_tls` up to its future, and later to its end. Abort the socket if the handshake fails."""
        assert self._starting is not None
        try:
            waiting = self._starting.send(None)
        except StopIteration as done:
            raw, secured = self._transport, done.value
            self._end()
            if secured is None or self._lost or raw is None or raw.is_closing():
                if secured is not None:
                    secured.abort()
                return
            self._hand_over(secured)
        except OSError:  # includes `ssl.SSLError`
            self.abort()
            self._end()
        else:
            waiting.add_done_callback(self._step)

    def _end(self) -> None:
        super()._end()
        self._starting = None

    def _hand_over(self, transport: asyncio.Transport) -> None:
        protocol = self._next(transport, self.source)
        protocol.connection_made(transport)
        for data in self._early:
            protocol.data_received(data)
        if self._eof:
            protocol.eof_received()
