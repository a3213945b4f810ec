"""A WebSocket (RFC 6455) under a protocol that only knows byte streams: MQTT 5.0 section 6, AMQP's WebSocket binding.

It is a protocol for the socket and a transport for the pump, so the pump serves TCP, TLS and WebSocket in the same way.
Received binary payloads are one stream of bytes, regardless of frames and messages [MQTT-6.0.0-2]. The bytes of one
read are handed on in one call. Each write is one write of the socket too, and one binary message or more
(`Server.messages`).

Compression (permessage-deflate, RFC 7692) is never negotiated: its two windows of 32 KiB would take many times the
memory of an idle connection, and a small message may inflate to a huge one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, cast

from gateway.net.listener import Server
from gateway.net.pump import LINGER_S
from protocols.websocket import (
    BINARY,
    CLOSE,
    NORMAL_CLOSURE,
    PONG,
    SERVICE_RESTART,
    FrameReader,
    ReceivedMessage,
    close_frame,
    write_frame,
)

_NORMAL: Final = close_frame(NORMAL_CLOSURE)
_RESTARTING: Final = close_frame(SERVICE_RESTART, "the gateway stops")


class WebSocket(asyncio.Protocol):
    """The server's side of one WebSocket after its opening handshake.

    For the user it is a transport: what it does not define itself (pauses of reading, the write buffer, `abort`) is the
    socket's. A ping is not answered while reading is paused.
    """

    __slots__ = ("_closing", "_draining", "_frames", "_ping", "_server", "_socket", "_user", "_writable")

    def __init__(self, transport: asyncio.Transport, user: asyncio.Protocol, server: Server) -> None:
        """`user` gets the bytes inside the frames, and this object as its transport.

        `server` is the subprotocol's, and divides what is written into messages. After it has stopped, our Close frames
        say that the service restarts.
        """
        self._socket = transport
        self._user = user
        self._server = server
        self._frames = FrameReader()
        self._ping: bytes | None = None  # a Ping that waits for its Pong
        self._writable = True
        self._closing = False  # our Close frame is sent, and nothing more may be sent (section 5.5.1)
        self._draining = False  # the peer's input is read and discarded

    def start(self, received: bytes) -> None:
        """Take over the socket; `received` are the bytes behind the opening handshake."""
        self._socket.set_protocol(self)
        self._user.connection_made(cast("asyncio.Transport", self))
        if received:
            self.data_received(received)

    # the socket's side

    def data_received(self, data: bytes) -> None:
        """Bytes of frames were received, split anywhere."""
        if self._draining:
            return
        received = self._frames.receive(data)
        if received.ping is not None:
            self._ping = received.ping
        if received.payload:
            self._user.data_received(received.payload)
        self._pong()
        if received.close is not None or received.fault is not None:
            self._end(received)

    def eof_received(self) -> bool:
        """The peer closed without a Close frame; the socket closes itself after our last bytes."""
        self._user.eof_received()
        return False

    def pause_writing(self) -> None:
        """The write buffer is over its high mark."""
        self._writable = False
        self._user.pause_writing()

    def resume_writing(self) -> None:
        """The write buffer is below its low mark."""
        self._writable = True
        self._user.resume_writing()
        self._pong()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._user.connection_lost(exc)

    # the user's side

    def write(self, data: bytes) -> None:
        """Send `data` in binary messages; does nothing after our Close frame."""
        if not self._closing:
            self._socket.write(b"".join([write_frame(BINARY, message) for message in self._server.messages(data)]))

    def writelines(self, parts: Iterable[bytes]) -> None:
        """Write several parts as one."""
        self.write(b"".join(parts))

    def can_write_eof(self) -> bool:
        """Return True, also over TLS: a Close frame signals the end of data."""
        return True

    def write_eof(self) -> None:
        """Send a Close frame and continue to read; the peer's Close frame closes the socket."""
        if not self._closing:
            self._send_close(_RESTARTING if self._server.stopped else _NORMAL)

    def close(self) -> None:
        """Send a Close frame, and close the socket after the bytes that were written."""
        self.write_eof()
        self._socket.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    # inside

    def _pong(self) -> None:
        """Answer only the newest Ping (section 5.5.3), and none while the peer does not read."""
        ping = self._ping
        if ping is not None and self._writable:
            self._ping = None
            if not self._closing:
                self._socket.write(write_frame(PONG, ping))

    def _send_close(self, close: bytes) -> None:
        self._closing = True
        self._socket.write(close)

    def _end(self, received: ReceivedMessage) -> None:
        """Handle a Close frame of the peer, or its violation of the protocol."""
        self._draining = True
        if self._closing:
            self._socket.close()
        elif received.fault is None:
            self._user.eof_received()
            if not self._closing:  # the user may have closed
                self._send_close(write_frame(CLOSE, received.close or b""))
            self._socket.close()
        else:
            # Closing a socket with unread input makes the kernel send a reset, which can destroy our Close frame.
            self._send_close(close_frame(received.fault.code, received.fault.reason))
            self._user.eof_received()
            asyncio.get_running_loop().call_later(LINGER_S, self._socket.close)
