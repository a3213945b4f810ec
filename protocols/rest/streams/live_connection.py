"""The server's side of a live WebSocket: frames (RFC 6455) in, messages out. Sans-io.

It gets the bytes behind the opening handshake. Messages are text and have a maximum size. A message that is not valid
is answered with an error and the connection stays open; a violation of RFC 6455 closes it with the code for it.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from protocols.connection import ConnectionClosed, ConnectionFailed
from protocols.rest.streams.live_messages import decode_message
from protocols.rest.streams.stream_connection import StreamConnection
from protocols.websocket import (
    ABNORMAL_CLOSURE,
    CLOSE,
    GOING_AWAY,
    INTERNAL_ERROR,
    INVALID_PAYLOAD,
    MESSAGE_TOO_BIG,
    NO_STATUS,
    PING,
    PONG,
    TEXT,
    FrameReader,
    close_frame,
    write_frame,
)

SILENT_HEARTBEATS: Final = 4  # after so many heartbeats without a byte from the peer the connection is closed


def text_frame(payload: bytes) -> bytes:
    """Return a complete text message of the server (section 5.2); not masked, so many connections can share it."""
    return write_frame(TEXT, payload)


class LiveConnection(StreamConnection):
    """One live WebSocket after its opening handshake; a `protocols.connection.Connection`."""

    def __init__(self, max_message_bytes: int, heartbeat_s: float) -> None:
        """`tick` sends a Ping every `heartbeat_s` seconds; a message over `max_message_bytes` ends the connection."""
        super().__init__(heartbeat_s)
        self.reading = True  # whether the socket is being read: only then a silent peer times out
        self._frames = FrameReader(TEXT)
        self._message = bytearray()  # the received part of the current message
        self._limit = max_message_bytes
        self._now = 0.0
        self._received_at = 0.0

    # protocols.connection.Connection

    def receive_data(self, data: bytes) -> list[Any]:
        """Return the events for bytes from the socket; [] after the end."""
        if self.closing:
            return []
        self._received_at = self._now
        received = self._frames.receive(data)
        events: list[Any] = []
        at = 0
        for end in received.ends:
            if not self._gather(received.payload[at:end], events):
                return events
            at = end
            try:
                text = self._message.decode()
            except UnicodeDecodeError:
                events.append(self._fail(INVALID_PAYLOAD, "text that is not UTF-8"))
                return events
            events.append(decode_message(text))
            self._message = bytearray()
        if not self._gather(received.payload[at:], events):
            return events
        if received.fault is not None:
            events.append(self._fail(received.fault.code, received.fault.reason))
        elif received.close is not None:
            self.closing = True
            self._write(write_frame(CLOSE, received.close[:2]))
            code = int.from_bytes(received.close[:2], "big") if received.close else NO_STATUS
            events.append(ConnectionClosed(str(code)))
        elif received.ping is not None:  # only the newest needs a Pong (section 5.5.3)
            self._write(write_frame(PONG, received.ping))
        return events

    def receive_eof(self) -> list[Any]:
        """The peer has closed its side of the socket."""
        if self.closing:
            return []
        self.closing = True
        return [ConnectionFailed("the peer closed without a Close frame", str(ABNORMAL_CLOSURE))]

    def release(self) -> None:
        """Note that the socket is closed."""
        self.closing = True

    def tick(self, now: float) -> list[Any]:
        """Send a Ping, or close the connection of a peer that was silent for too long."""
        self._now = now
        if self.closing:
            return []
        if self._next_heartbeat is None or not self.reading:
            self._received_at = now
            self._next_heartbeat = now + self._heartbeat_s
        elif now >= self._next_heartbeat:
            if now - self._received_at >= SILENT_HEARTBEATS * self._heartbeat_s:
                return [self._fail(GOING_AWAY, "silent for too long")]
            self._next_heartbeat = now + self._heartbeat_s
            self._write(write_frame(PING))
        return []

    # the session's side

    @property
    def frames(self) -> FrameReader:
        """A copy of the frame reader, to decode the following bytes separately."""
        return copy.copy(self._frames)

    def send(self, payload: bytes) -> None:
        """Send a text message; does nothing after a Close frame (section 5.5.1)."""
        self.send_frame(text_frame(payload))

    def send_frame(self, frame: bytes) -> None:
        """Send a ready frame; does nothing after a Close frame."""
        if not self.closing:
            self._write(frame)

    def close(self, code: int = GOING_AWAY, reason: str = "") -> None:
        """Send a Close frame; nothing is sent after it."""
        if not self.closing:
            self.closing = True
            self._write(close_frame(code, reason))

    def give_up(self) -> list[Any]:
        """Close the connection after a bug of ours, with code 1011."""
        return [] if self.closing else [self._fail(INTERNAL_ERROR, "internal error")]

    # inside

    def _gather(self, part: bytes, events: list[Any]) -> bool:
        """Append to the message; False if it is too large and the connection is being closed."""
        if len(self._message) + len(part) > self._limit:
            events.append(self._fail(MESSAGE_TOO_BIG, f"a message has at most {self._limit} bytes"))
            return False
        self._message += part
        return True

    def _fail(self, code: int, reason: str) -> ConnectionFailed:
        self.close(code, reason)
        return ConnectionFailed(reason, str(code))
