"""How a trace gets at the bytes of one connection: something in their way, put there when a trace begins.

A pump's sans-io connection is stood for by a `TappedConnection`, an HTTP connection's transport by a `TappedTransport`.
When the last trace of it ends, both are taken away.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Protocol, cast

from gateway.failures import failures
from gateway.net.pump import Pump
from protocols.connection import Connection

_NOTHING_EXTRA: Final[dict[str, Any]] = {}


class Tap(Protocol):
    """A trace of one connection."""

    def take(self, data: bytes, *, sent: bool) -> None:
        """Bytes came, or leave. It looks at them and keeps none that it does not need."""


class _Taps:
    """Those of one connection."""

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: tuple[Tap, ...] = ()

    def take(self, data: bytes, *, sent: bool) -> None:
        for tap in self.all:
            try:
                tap.take(data, sent=sent)
            except Exception as error:  # our bug, in a trace: the connection goes on without it
                failures.tell("trace", error)
                self.all = tuple(one for one in self.all if one is not tap)


class TappedConnection:
    """A sans-io connection whose bytes are looked at on their way; in everything else it is the connection."""

    __slots__ = ("inner", "taps")

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.taps = _Taps()

    def receive_data(self, data: bytes) -> list[Any]:
        """See `protocols.connection.Connection`."""
        self.taps.take(data, sent=False)
        events: list[Any] = self.inner.receive_data(data)
        return events

    def data_to_send(self) -> bytes:
        """See `protocols.connection.Connection`."""
        data: bytes = self.inner.data_to_send()
        if data:
            self.taps.take(data, sent=True)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class TappedTransport(asyncio.Transport, asyncio.Protocol):
    """Between a socket's transport and who uses it; towards either it is the other."""

    def __init__(self, transport: asyncio.Transport, user: Any) -> None:
        super().__init__(_NOTHING_EXTRA)
        self.inner = transport
        self.user = user
        self.taps = _Taps()

    # the socket's side

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self.taps.take(data, sent=False)
        self.user.data_received(data)

    def eof_received(self) -> bool | None:
        """The peer will send no more."""
        ended: bool | None = self.user.eof_received()
        return ended

    def pause_writing(self) -> None:
        """The write buffer is over its mark."""
        self.user.pause_writing()

    def resume_writing(self) -> None:
        """The write buffer is below its mark."""
        self.user.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        user, self.user = self.user, None
        if user is not None:
            user.connection_lost(exc)

    # the user's side

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes leave."""
        self.taps.take(bytes(data), sent=True)
        self.inner.write(data)

    def writelines(self, parts: Any) -> None:
        """Likewise."""
        self.write(b"".join(parts))

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Another one uses the socket from now on."""
        self.user = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Who uses the socket."""
        user: asyncio.BaseProtocol = self.user
        return user

    def is_closing(self) -> bool:
        """Whether the socket is closing or closed."""
        return self.inner.is_closing()

    def close(self) -> None:
        """Close the socket after the bytes written."""
        self.inner.close()

    def abort(self) -> None:
        """Close the socket at once."""
        self.inner.abort()

    def can_write_eof(self) -> bool:
        """Whether the way to the peer can be closed alone."""
        return self.inner.can_write_eof()

    def write_eof(self) -> None:
        """Close it."""
        self.inner.write_eof()

    def pause_reading(self) -> None:
        """Read nothing."""
        self.inner.pause_reading()

    def resume_reading(self) -> None:
        """Go on reading."""
        self.inner.resume_reading()

    def is_reading(self) -> bool:
        """Whether the socket is being read."""
        return self.inner.is_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The marks of the write buffer, in bytes."""
        self.inner.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """The low and the high mark."""
        return self.inner.get_write_buffer_limits()

    def get_write_buffer_size(self) -> int:
        """Bytes that wait to be sent."""
        return self.inner.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the socket tells."""
        return self.inner.get_extra_info(name, default)


Tapped = TappedConnection | TappedTransport


def put_in(socket: Any, tap: Tap) -> Tapped | None:
    """Have a tap look at a connection's bytes; None: the connection is gone.

    `socket`: a `Pump`, or who has a transport and may be given another one.
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
    found: Tapped = tapped
    return found


def take_out(socket: Any, tapped: Tapped, tap: Tap) -> None:
    """End what `put_in` began."""
    tapped.taps.all = tuple(one for one in tapped.taps.all if one is not tap)
    if tapped.taps.all:
        return
    if isinstance(tapped, TappedConnection):
        if socket.connection is tapped:
            socket.connection = tapped.inner
        return
    user = tapped.user  # may be another one by now: a stream of events, a WebSocket
    if user is not None and getattr(user, "transport", None) is tapped:
        tapped.inner.set_protocol(user)
        user.transport = tapped.inner
