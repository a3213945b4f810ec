"""The messages of HTTP's live WebSockets and the events of its streams as trace lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.trace.shown import Line, shown_bytes
from protocols.websocket import TEXT, FrameReader, unmasked_frames

KEPT: Final = 4096  # bytes kept of a message
CLOSE: Final = "close"
EVENT_END: Final = b"\n\n"

Message = tuple[bytes, int, str]
"""The start of a message, its length, and `close` for a Close frame."""


class WebSocketDecoder:
    """The messages of one connection; a `gateway.trace.traces.Decoder`."""

    def __init__(self, frames: FrameReader | None, payload: int) -> None:
        """`frames` continues from the state of the connection's own reader. `payload`: bytes shown of each message."""
        self._frames = frames if frames is not None else FrameReader(TEXT)
        self._begun = bytearray()
        self._size = 0
        self._payload = payload

    def units(self, data: bytes, *, sent: bool) -> Iterator[Message]:
        """Yield the messages that are complete with these bytes."""
        if sent:  # writes always contain whole frames
            for opcode, payload in unmasked_frames(data):
                if opcode == TEXT:
                    yield payload[:KEPT], len(payload), ""
                elif payload:
                    yield payload, len(payload), CLOSE
            return
        received = self._frames.receive(data)
        at = 0
        for end in received.ends:
            self._gather(received.payload[at:end])
            yield bytes(self._begun), self._size, ""
            self._begun.clear()
            self._size = 0
            at = end
        self._gather(received.payload[at:])
        if received.close is not None:
            yield received.close, len(received.close), CLOSE

    def _gather(self, part: bytes) -> None:
        self._size += len(part)
        self._begun += part[: KEPT - len(self._begun)]

    @staticmethod
    def concerns(message: Message, topic: bytes) -> bool:
        """Return whether a message names the topic."""
        return topic in message[0]

    def line(self, message: Message, *, sent: bool) -> Line:
        """Return the message's trace line."""
        data, size, kind = message
        if kind == CLOSE:
            return {"close": int.from_bytes(data[:2]), "reason": shown_bytes(data[2:], 128)}
        line: Line = {"message": size}
        if self._payload:
            line["payload"] = shown_bytes(data, self._payload)
        return line


class EventDecoder:
    """The events of one stream; a `gateway.trace.traces.Decoder`."""

    def __init__(self, payload: int) -> None:
        """`payload`: bytes shown of each event."""
        self._payload = payload

    @staticmethod
    def units(data: bytes, *, sent: bool) -> Iterator[bytes]:
        """Yield the events; a write contains whole ones, each in its HTTP chunk."""
        for part in data.split(EVENT_END) if sent else ():
            event = part.rpartition(b"\r\n")[2]  # without the chunk's frame
            if event:
                yield event

    @staticmethod
    def concerns(event: bytes, topic: bytes) -> bool:
        """Return whether an event names the topic."""
        return topic in event

    def line(self, event: bytes, *, sent: bool) -> Line:
        """Return the event's trace line."""
        line: Line = {"event": len(event)}
        if self._payload:
            line["payload"] = shown_bytes(event, self._payload)
        return line
