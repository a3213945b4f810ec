"""Streamed answers: lines of JSON, server-sent events, and the chunks of HTTP/1.1 that carry them. Pure."""

from __future__ import annotations

from typing import Final

EVENT_TYPE: Final = "text/event-stream"  # WHATWG HTML section 9.2
LINES_TYPE: Final = "application/x-ndjson"
LAST_CHUNK: Final = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Frame a chunk (RFC 9112 section 7.1); an empty one would be the last."""
    assert data
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(line: bytes, position: str = "", kind: str = "") -> bytes:
    """Return an event; `line` is its data, without line feeds.

    The client sends `position` as `Last-Event-ID` when it reconnects; without it the client keeps the former one.
    `kind` is the type for a browser's `addEventListener`, by default `message`.
    """
    head = b"id: %b\n" % position.encode() if position else b""
    if kind:
        head += b"event: %b\n" % kind.encode()
    return b"%bdata: %b\n\n" % (head, line)


def heartbeat(position: str) -> bytes:
    """Return a comment, and the position in a block without data, which updates Last-Event-ID without an event."""
    return b": nothing new\nid: %b\n\n" % position.encode() if position else b": nothing new\n\n"


def retry(milliseconds: int) -> bytes:
    """Set the time after which a disconnected client reconnects."""
    return b"retry: %d\n\n" % milliseconds


class Lines:
    """Lines of JSON of at most `max_bytes`; a single line that is larger is accepted."""

    __slots__ = ("_body", "_limit", "count")

    def __init__(self, max_bytes: int) -> None:
        self._body = bytearray()
        self._limit = max_bytes
        self.count = 0

    def add(self, line: bytes) -> bool:
        """Append a line. Returns False and changes nothing if it does not fit."""
        if self.count and len(self._body) + len(line) + 1 > self._limit:
            return False
        self._body += line
        self._body += b"\n"
        self.count += 1
        return True

    def finish(self) -> bytes:
        """Return the body. The object must not be used any more."""
        body, self._body = self._body, bytearray()
        return bytes(body)
