"""Gives traces access to the bytes of a connection, by a wrapper that is installed when a trace starts.

A `TappedConnection` wraps a pump's sans-io connection; a `TappedTransport` wraps an HTTP connection's transport. Both
are removed when the connection's last trace ends.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Protocol, cast

from gateway.net.pump import Pump
from gateway.runtime.failures import failures
from protocols.connection import Connection

TO_PROTOCOL: Final = frozenset({"eof_received", "pause_writing", "resume_writing"})
"""What a socket's transport calls on its protocol, and a tap does not care about."""


class Tap(Protocol):
    """A trace's tap on one connection."""

    def take(self, data: bytes, *, sent: bool) -> None:
        """Inspect bytes that were received or are being sent. Must not keep `data` longer than needed."""


class _Taps:
    """The taps of one connection."""

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: tuple[Tap, ...] = ()

    def take(self, data: bytes, *, sent: bool) -> None:
        for tap in self.all:
            try:
                tap.take(data, sent=sent)
            except Exception as error:  # a bug in a trace must not break the connection: drop the tap
                failures.report("trace", error)
                self.all = tuple(other for other in self.all if other is not tap)


class TappedConnection:
    """Wraps a sans-io connection and passes its bytes to the taps; delegates everything else."""

    __slots__ = ("inner", "taps")

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.taps = _Taps()

    def receive_data(self, data: bytes) -> list[Any]:
        """Show what was received, then parse it."""
        self.taps.take(data, sent=False)
        events: list[Any] = self.inner.receive_data(data)
        return events

    def data_to_send(self) -> bytes:
        """Return the bytes to send, and show them."""
        data: bytes = self.inner.data_to_send()
        if data:
            self.taps.take(data, sent=True)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class TappedTransport:
    """Sits between a socket's transport and its protocol, and acts as the other one to each of them.

    What it does not define itself it delegates: `TO_PROTOCOL` to the protocol, everything else to the transport.
    """

    def __init__(self, transport: asyncio.Transport, user: Any) -> None:
        self.inner = transport
        self.user = user
        self.taps = _Taps()

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the taps and the protocol."""
        self.taps.take(data, sent=False)
        self.user.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed: tell the owner, and drop it."""
        user, self.user = self.user, None
        if user is not None:
            user.connection_lost(exc)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Pass bytes to the taps and the transport."""
        self.taps.take(bytes(data), sent=True)
        self.inner.write(data)

    def writelines(self, parts: Any) -> None:
        """Write several parts as one."""
        self.write(b"".join(parts))

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Replace the protocol that uses the socket."""
        self.user = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol that uses the socket."""
        user: asyncio.BaseProtocol = self.user
        return user

    def __getattr__(self, name: str) -> Any:
        return getattr(self.user if name in TO_PROTOCOL else self.inner, name)


Tapped = TappedConnection | TappedTransport


def install_tap(socket: Any, tap: Tap) -> Tapped | None:
    """Install a tap on a connection. Returns None if the connection is closed.

    `socket` is a `Pump`, or an object whose `transport` may be replaced.
    """
    tapped: Any
    if isinstance(socket, Pump):
        tapped = socket.connection
        if not isinstance(tapped, TappedConnection):
            tapped = TappedConnection(tapped)
            socket.connection = cast("Connection", tapped)
    else:
        tapped = socket.transport
        if tapped is None or tapped.is_closing():
            return None
        if not isinstance(tapped, TappedTransport):
            tapped = TappedTransport(tapped, socket)
            tapped.inner.set_protocol(tapped)
            socket.transport = tapped
    tapped.taps.all = (*tapped.taps.all, tap)
    installed: Tapped = tapped
    return installed


def remove_tap(socket: Any, tapped: Tapped, tap: Tap) -> None:
    """Remove a tap that `install_tap` installed."""
    tapped.taps.all = tuple(other for other in tapped.taps.all if other is not tap)
    if tapped.taps.all:
        return
    if isinstance(tapped, TappedConnection):
        if socket.connection is tapped:
            socket.connection = tapped.inner
        return
    user = tapped.user  # may have changed: an event stream, a WebSocket
    if user is not None and getattr(user, "transport", None) is tapped:
        tapped.inner.set_protocol(user)
        user.transport = tapped.inner
