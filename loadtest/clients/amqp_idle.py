"""An AMQP 1.0 connection with a session and a sender's link, that does nothing once it has credit."""

from __future__ import annotations

import asyncio
from typing import Final, cast

from loadtest.clients.amqp_wire import (
    CLOSE,
    DETACH,
    END,
    FLOW,
    GOODBYE,
    GREETING,
    IDLE,
    SASL_OUTCOME,
    Splitter,
    attach_sender,
    opening,
    read_value,
)

SIGN_OF_LIFE_S: Final = 10.0


class Idle(asyncio.Protocol):
    """One of them. `ready` is done when it has credit; it carries the error when the connection fails before."""

    def __init__(self, container: str, address: str) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._container = container
        self._address = address
        self._splitter = Splitter()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(GREETING)
        self._live()

    def data_received(self, data: bytes) -> None:
        """Frames."""
        assert self._transport is not None
        for body in self._splitter.feed(data):
            (code, fields), _ = read_value(body, 0)
            if code == SASL_OUTCOME:
                self._transport.write(opening(self._container) + attach_sender("idle", self._container, self._address))
            elif code == FLOW and not self.ready.done():
                self.ready.set_result(None)
            elif code in (DETACH, END, CLOSE) and not self.ready.done():
                self.ready.set_exception(ConnectionAbortedError(f"peer sent 0x{code:02x}: {fields}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway closed the socket."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.ready.done():
            self.ready.set_exception(exc or ConnectionResetError("connection closed"))

    def close(self) -> None:
        """Say goodbye and close."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(GOODBYE)
            self._transport.close()

    def _live(self) -> None:
        """An empty frame now and then, that the gateway does not take us for lost."""
        if self._transport is not None and self.ready.done():
            self._transport.write(IDLE)
        self._timer = asyncio.get_running_loop().call_later(SIGN_OF_LIFE_S, self._live)
