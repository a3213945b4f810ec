"""Answers that go on: lines of JSON, server-sent events, and the chunks of HTTP/1.1 that carry them. Pure."""

from __future__ import annotations

from typing import Final

EVENT_TYPE: Final = "text/event-stream"  # WHATWG HTML section 9.2
LINES_TYPE: Final = "application/x-ndjson"
LAST_CHUNK: Final = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk (RFC 9112 section 7.1); not empty, which would be the last."""
    assert data
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(line: bytes, position: str = "", kind: str = "") -> bytes:
    """One event; `line` is its data, without line feeds.

    `position` becomes what the client sends as `Last-Event-ID` when it comes back; none leaves that as it is. `kind` is
    what a browser's `addEventListener` names; none is `message`.
    """
    head = b"id: %b\n" % position.encode() if position else b""
    if kind:
        head += b"event: %b\n" % kind.encode()
    return b"%bdata: %b\n\n" % (head, line)


def heartbeat(position: str) -> bytes:
    """Nothing new: a comment, and a block without data, which moves the client's last event id without an event."""
    return b": nothing new\nid: %b\n\n" % position.encode() if position else b": nothing new\n\n"


def retry(milliseconds: int) -> bytes:
    """After how long a client that has lost us shall come back."""
    return b"retry: %d\n\n" % milliseconds


class Lines:
    """Lines of JSON that end before they are more than `max_bytes`; a first line that is longer is let in alone."""

    __slots__ = ("_body", "_limit", "count")

    def __init__(self, max_bytes: int) -> None:
        self._body = bytearray()
        self._limit = max_bytes
        self.count = 0

    def add(self, line: bytes) -> bool:
        """Append a line; False, and nothing is changed, when it does not fit."""
        if self.count and len(self._body) + len(line) + 1 > self._limit:
            return False
        self._body += line
        self._body += b"\n"
        self.count += 1
        return True

    def finish(self) -> bytes:
        """The body; nothing more is taken."""
        body, self._body = self._body, bytearray()
        return bytes(body)
