"""A WebSocket (RFC 6455) under a protocol that only knows byte streams: MQTT 5.0 section 6, AMQP's WebSocket binding.

Towards the socket it is a protocol, towards the pump a transport, so that the pump serves TCP, TLS and WebSocket alike.
Received binary payloads are a stream of bytes, whatever the frames and messages they come in [MQTT-6.0.0-2]: each part
of a frame is handed on as it arrives, so no message is ever gathered here and none is too long. What one read of the
socket brought is handed on at once, and each write becomes one binary message.

Compression (permessage-deflate, RFC 7692) is never agreed on: its two windows of 32 KiB alone would be many times the
memory of an idle connection, and a small message may unpack to a huge one.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage
from wsproto.frame_protocol import CloseReason

from gateway.net.pump import LINGER_S

NO_TEXT: Final = CloseConnection(CloseReason.UNSUPPORTED_DATA, "binary frames only")
DONE: Final = CloseConnection(CloseReason.NORMAL_CLOSURE)


class WebSocket(asyncio.Transport, asyncio.Protocol):
    """The server's side of one WebSocket whose opening handshake is over."""

    __slots__ = ("_deaf", "_framing", "_ping", "_socket", "_user", "_writable")

    def __init__(self, transport: asyncio.Transport, user: asyncio.Protocol) -> None:
        """`user` gets the bytes inside the frames, and this object as its transport."""
        super().__init__()
        self._socket = transport
        self._user = user
        self._framing = Connection(ConnectionType.SERVER)
        self._ping: Ping | None = None
        self._writable = True
        self._deaf = False  # what the peer still sends is read and thrown away

    def start(self, received: bytes) -> None:
        """Take the socket over; `received` came behind the opening handshake."""
        self._socket.set_protocol(self)
        self._user.connection_made(self)
        if received:
            self.data_received(received)

    # the socket's side

    def data_received(self, data: bytes) -> None:
        """Frames came, cut anywhere."""
        if self._deaf:
            return
        framing = self._framing
        framing.receive_data(data)
        payloads: list[bytes] = []
        ending: CloseConnection | None = None
        for event in framing.events():
            kind = type(event)
            if kind is BytesMessage:
                payloads.append(event.data)  # type: ignore[attr-defined]
            elif kind is Ping:
                self._ping = event  # type: ignore[assignment]
            elif kind is TextMessage:
                ending = NO_TEXT  # [MQTT-6.0.0-1]
                break
            elif kind is CloseConnection:
                ending = event  # type: ignore[assignment]
                break
        together = payloads[0] if len(payloads) == 1 else b"".join(payloads)
        if together:
            self._user.data_received(together)
        self._pong()
        if ending is not None:
            self._end(ending)

    def eof_received(self) -> bool:
        """The peer left without a Close frame; the socket closes itself after our last bytes."""
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
        """The socket is gone."""
        self._user.connection_lost(exc)

    # the user's side

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send one binary message; after a Close frame of either side nothing is sent any more (section 5.5.1)."""
        if self._framing.state is ConnectionState.OPEN:
            self._socket.write(self._framing.send(BytesMessage(data)))  # type: ignore[arg-type]

    def can_write_eof(self) -> bool:
        """Over TLS too: the Close frame says that no more is sent."""
        return True

    def write_eof(self) -> None:
        """Say that no more is sent; what the peer still sends is read. Its answer closes the socket."""
        if self._framing.state is ConnectionState.OPEN:
            self._socket.write(self._framing.send(DONE))

    def close(self) -> None:
        """Close the socket after the bytes written, the last of which are a Close frame."""
        self.write_eof()
        self._socket.close()

    def abort(self) -> None:
        """Close the socket at once."""
        self._socket.abort()

    def is_closing(self) -> bool:
        """Whether the socket is closing or closed."""
        return self._socket.is_closing()

    def pause_reading(self) -> None:
        """Stop reading the socket; pings are not answered meanwhile."""
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Go on reading."""
        self._socket.resume_reading()

    def is_reading(self) -> bool:
        """Whether the socket is being read."""
        return self._socket.is_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The marks of the socket's write buffer, in bytes."""
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """The low and the high mark."""
        return self._socket.get_write_buffer_limits()

    def get_write_buffer_size(self) -> int:
        """Bytes that wait to be sent, frames' heads included."""
        return self._socket.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the socket tells: `peername`, `peercert` and so on."""
        return self._socket.get_extra_info(name, default)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Who gets the bytes."""
        return self._user

    # inside

    def _pong(self) -> None:
        """Answer the newest ping only (section 5.5.3), and none while the peer does not read its answers."""
        ping = self._ping
        if ping is not None and self._writable:
            self._ping = None
            if self._framing.state is ConnectionState.OPEN:
                self._socket.write(self._framing.send(ping.response()))

    def _end(self, ending: CloseConnection) -> None:
        """The peer closed, answered our Close frame, or broke the rules of frames."""
        framing = self._framing
        self._deaf = True
        if framing.state is ConnectionState.REMOTE_CLOSING:
            self._user.eof_received()
            self._socket.write(framing.send(ending.response()))
            self._socket.close()
        elif framing.state is ConnectionState.OPEN:
            # Closing a socket with unread input makes the kernel send a reset, which can destroy our reason on its way.
            self._socket.write(framing.send(ending))
            self._user.eof_received()
            asyncio.get_running_loop().call_later(LINGER_S, self._socket.close)
        else:
            self._socket.close()
