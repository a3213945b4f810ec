"""The connection of an endless answer: written without waiting, with few system calls, bounded for slow readers.

The socket is taken over from aiohttp after the head of the answer, so the request's task ends. Bytes to send are
collected and written at the end of the event loop iteration (`writes.Writes`). A thousand streams that get the same
event are written in portions, between which the gateway does other work.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import Final, Protocol

from aiohttp import web

from flowcontrol.budget import UNCOUNTED, Budget
from gateway.net.http_server import SERVER, HttpConnection
from gateway.net.pump import UNREAD_S
from gateway.net.unread import LOW, Unread
from gateway.net.writes import Writes
from gateway.pauses import SLOW_READER, pauses
from gateway.rest.server.call import Call
from gateway.security.entrance import Entrance
from protocols.rest.streaming import LAST_CHUNK

HIGH: Final = 64 * 1024  # bytes that wait here, and again as many in the transport
_NUMBER: Final = struct.Struct("i")


class StreamUser(Protocol):
    """The stream that writes to a socket. It is a Protocol because a stream makes its socket itself."""

    def writable(self) -> None:
        """Called when the socket has capacity again."""

    def closed(self) -> None:
        """Called once, when the connection is closed."""

    @property
    def subject(self) -> str:
        """The subject under which pauses of the connection are reported."""


class StreamSocket(asyncio.Protocol):
    """The connection of one endless answer."""

    __slots__ = (
        "_closed", "_ending", "_entrance", "_outgoing", "_paused", "_pending", "_size", "_unread",
        "_user", "_waiting", "_writes", "busy", "has_capacity", "total", "transport",
    )  # fmt: skip

    def __init__(self, writes: Writes, outgoing: Budget, user: StreamUser) -> None:
        """`writes` is shared by all streams; `outgoing` counts the bytes that slow readers have not read."""
        self._writes = writes
        self._outgoing = outgoing
        self._unread: Unread | None = None  # while the client reads slowly
        self._user = user
        self.transport: asyncio.Transport | None = None  # None before `begin` and after the connection is closed
        self._pending: list[bytes] = []
        self._size = 0
        self._waiting = False
        self._paused = False
        self._closed = False
        self._ending = False
        self.has_capacity = True  # whether more may be sent
        self.total = 0  # bytes sent so far
        self.busy = False  # whether something was written since this was last set to False

    def begin(self, transport: asyncio.Transport, entrance: Entrance) -> None:
        """Take over the socket, which was accepted at `entrance`."""
        self.transport = transport
        self._entrance = entrance
        transport.set_protocol(self)
        transport.set_write_buffer_limits(high=UNCOUNTED, low=LOW)
        if transport.is_closing():
            self.connection_lost(None)
        elif self._ending:
            self.end()
        elif self._pending:
            self.flush_now()

    def send(self, data: bytes) -> None:
        """Write complete chunks of the answer soon."""
        self._pending.append(data)
        self._size += len(data)
        self.total += len(data)
        if self._size >= HIGH:
            self.has_capacity = False
        if not self._waiting and self.transport is not None and not self._closed:
            self._waiting = True
            self._writes.add(self)

    def flush_now(self) -> None:
        """Write the collected bytes (`writes.Flushed`)."""
        self._waiting = False
        if self._closed or self.transport is None or not self._pending:
            return
        data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
        self._pending.clear()
        self._size = 0
        self.busy = True
        self.transport.write(data)
        if self._unread is not None:
            self._count_unread(self._unread)
        if not self.has_capacity and not self._paused:
            self.has_capacity = True
            self._user.writable()

    def end(self) -> None:
        """Write the collected bytes and the end of the answer, and close."""
        self._ending = True
        if self._closed or self.transport is None:
            return
        self.flush_now()
        self.transport.write(LAST_CHUNK)
        self.transport.close()
        if self.unwritten:  # a client that reads nothing would keep the socket open for ever
            asyncio.get_running_loop().call_later(UNREAD_S, self.transport.abort)

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        return self._closed

    def abort(self) -> None:
        """Abort the connection."""
        if self.transport is not None:
            self.transport.abort()

    @property
    def unwritten(self) -> int:
        """Unsent bytes here and in the transport."""
        return self._size + (0 if self.transport is None else self.transport.get_write_buffer_size())

    def acknowledged(self) -> int:
        """Return a lower bound for the number of sent bytes that the peer's TCP stack has acknowledged.

        It is a lower bound because the kernel counts unacknowledged bytes on the wire, which TLS makes more.
        """
        transport = self.transport
        if transport is None:
            return 0
        waiting = self.unwritten
        socket = transport.get_extra_info("socket")
        if socket is not None and not self._closed:
            (queued,) = _NUMBER.unpack(fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(_NUMBER.size)))
            waiting += queued
        return self.total - waiting

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        """Ignore what the client sends after its request."""

    def pause_writing(self) -> None:
        """The kernel's send buffer is full: count the unsent bytes from now on, and limit them."""
        self._unread = Unread(self._outgoing, HIGH)
        self._count_unread(self._unread)

    def _count_unread(self, unread: Unread) -> None:
        if self.transport is None or unread.count(self.transport.get_write_buffer_size()) or self._paused:
            return
        self._paused = True
        self.has_capacity = False
        if not self._closed:
            pauses.begin(SLOW_READER, self, self._user.subject)

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.count(0)
            self._unread = None
            pauses.end(SLOW_READER, self)

    def resume_writing(self) -> None:
        """The client has caught up with reading."""
        self._paused = False
        self._forget_unread()
        if self._size < HIGH:
            self.has_capacity = True
            self._user.writable()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the stream that the connection is closed."""
        if not self._closed:
            self._closed = True
            self.has_capacity = False
            self._forget_unread()
            self._pending.clear()
            self.transport = None
            self._entrance.connections -= 1
            user = self._user
            del self._user  # it refers to this socket: no reference cycle may be left
            user.closed()


class _StreamHead(web.StreamResponse):
    """An answer whose end aiohttp must not write."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Leave the end of the answer to `StreamSocket.end`."""


async def begin_stream(call: Call, media: str, first: bytes, socket: StreamSocket) -> web.StreamResponse:
    """Send the head of an endless answer, and hand the connection to `socket`, which writes the rest in chunks.

    `first` is sent with the head: a part of the answer without a chunk's frame.

    Raises:
        ConnectionError: The client has disconnected.
    """
    connection = call.request.protocol
    assert isinstance(connection, HttpConnection)
    answer = _StreamHead(
        headers={
            "Content-Type": media,
            "Server": SERVER,
            "Cache-Control": "no-store",
            "Connection": "close",
            "X-Accel-Buffering": "no",  # makes proxies such as nginx forward without buffering
        }
    )
    await call.begin(answer)
    await answer.write(first)
    released = connection.release()
    if released is None:
        raise ConnectionResetError("the client has left")
    socket.begin(released[0], connection.entrance)
    return answer
