"""The server's side of a live WebSocket: frames (RFC 6455) in, messages out; no socket and no clock. Sans-io.

The bytes are those of the socket behind the opening handshake. Messages are text; each is gathered up to a limit. What
is no message of ours is answered, and the connection goes on; what breaks WebSocket's own rules ends it, with its code.
"""

from __future__ import annotations

import io
import struct
from typing import Any, Final

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage
from wsproto.frame_protocol import CloseReason

from protocols.connection import ConnectionClosed, ConnectionFailed
from protocols.rest.live_messages import decode_message

SILENT_HEARTBEATS: Final = 4  # without a byte from the peer: it is gone, or has stopped reading long ago
_TEXT: Final = 0x81  # a whole text message
_GOING_AWAY: Final = CloseReason.GOING_AWAY


def text_frame(payload: bytes) -> bytes:
    """A whole text message of the server's (section 5.2): not masked, so that many connections can share it."""
    size = len(payload)
    if size < 126:
        return bytes((_TEXT, size)) + payload
    if size < 65536:
        return struct.pack("!BBH", _TEXT, 126, size) + payload
    return struct.pack("!BBQ", _TEXT, 127, size) + payload


class LiveConnection:
    """See the module and `protocols.connection.Connection`.

    Attributes:
        waiting: bytes that wait for `data_to_send`.
        closing: see there.
        heeded: whether the peer is being read: only then its silence means something.
    """

    def __init__(self, max_message_bytes: int, heartbeat_s: float) -> None:
        """`tick` sends a Ping every `heartbeat_s` seconds; messages over `max_message_bytes` end the connection."""
        self.waiting = 0
        self.closing = False
        self.heeded = True
        self._framing = Connection(ConnectionType.SERVER)
        self._out: list[bytes] = []
        self._parts = io.StringIO()  # frames may be tiny: no object for each
        self._size = 0
        self._limit = max_message_bytes
        self._heartbeat_s = heartbeat_s
        self._now = 0.0
        self._heard = 0.0
        self._next_ping: float | None = None

    # protocols.connection.Connection

    def receive_data(self, data: bytes) -> list[Any]:
        """See there."""
        if self.closing:
            return []
        self._heard = self._now
        self._framing.receive_data(data)
        events: list[Any] = []
        ping: Ping | None = None
        for event in self._framing.events():
            kind = type(event)
            if kind is TextMessage:
                fault = self._gather(event, events)  # type: ignore[arg-type]
                if fault is not None:
                    events.append(self._fail(*fault))
                    break
            elif kind is Ping:
                ping = event  # type: ignore[assignment]
            elif kind is BytesMessage:
                events.append(self._fail(CloseReason.UNSUPPORTED_DATA, "messages are text"))
                break
            elif kind is CloseConnection:
                events.append(self._closed(event))  # type: ignore[arg-type]
                break
        if ping is not None and not self.closing:  # the newest is enough (section 5.5.3)
            self._write(self._framing.send(ping.response()))
        return events

    def receive_eof(self) -> list[Any]:
        """See there."""
        if self.closing:
            return []
        self.closing = True
        return [ConnectionFailed("the peer left without a Close frame", str(int(CloseReason.ABNORMAL_CLOSURE)))]

    def release(self) -> None:
        """The socket is gone. wsproto's parser is a generator that its own object holds: a cycle until it is closed."""
        self.closing = True
        self._framing._proto._parse_more.close()

    def data_to_send(self) -> bytes:
        """See there."""
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        self.waiting = 0
        return data

    def next_deadline(self) -> float | None:
        """See there."""
        return None if self.closing else self._next_ping

    def tick(self, now: float) -> list[Any]:
        """See there."""
        self._now = now
        if self.closing:
            return []
        if self._next_ping is None or not self.heeded:
            self._heard = now
            self._next_ping = now + self._heartbeat_s
        elif now >= self._next_ping:
            if now - self._heard >= SILENT_HEARTBEATS * self._heartbeat_s:
                return [self._fail(_GOING_AWAY, "silent for too long")]
            self._next_ping = now + self._heartbeat_s
            self._write(self._framing.send(Ping()))
        return []

    # the session's side

    def send(self, payload: bytes) -> None:
        """Send a text message; nothing after a Close frame (section 5.5.1)."""
        self.send_frame(text_frame(payload))

    def send_frame(self, frame: bytes) -> None:
        """The same, for a frame that was made before."""
        if not self.closing:
            self._write(frame)

    def close(self, code: CloseReason = _GOING_AWAY, reason: str = "") -> None:
        """Say goodbye."""
        if not self.closing:
            self.closing = True
            if self._framing.state is ConnectionState.OPEN:
                self._write(self._framing.send(CloseConnection(code, reason or None)))

    # inside

    def _gather(self, event: TextMessage, events: list[Any]) -> tuple[CloseReason, str] | None:
        self._size += len(event.data)  # characters: at most as many as bytes
        if self._size > self._limit:
            return CloseReason.MESSAGE_TOO_BIG, f"a message has at most {self._limit} characters"
        self._parts.write(event.data)
        if event.message_finished:
            events.append(decode_message(self._parts.getvalue()))
            self._parts = io.StringIO()
            self._size = 0
        return None

    def _closed(self, event: CloseConnection) -> ConnectionClosed | ConnectionFailed:
        """The peer has said goodbye, or broken the rules of frames."""
        if self._framing.state is not ConnectionState.REMOTE_CLOSING:
            return self._fail(CloseReason(event.code), event.reason or "broken frames")
        self.closing = True
        self._write(self._framing.send(event.response()))
        return ConnectionClosed(str(int(event.code)))

    def _fail(self, code: CloseReason, reason: str) -> ConnectionFailed:
        self.close(code, reason)
        return ConnectionFailed(reason, str(int(code)))

    def _write(self, data: bytes) -> None:
        self._out.append(data)
        self.waiting += len(data)
