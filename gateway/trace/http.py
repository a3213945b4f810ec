"""HTTP/1.1 as trace lines: heads of requests and responses, and the sizes of bodies; never the bodies.

Only header fields and query parameters that are known to hold no secret are shown with their values.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Final

from gateway.runtime.secret import BLANK
from gateway.runtime.texts import cut
from gateway.trace.shown import TEXT, Line

HEAD_END: Final = b"\r\n\r\n"
PIPELINED: Final = 256
LARGEST_HEAD: Final = 128 * 1024
REQUEST: Final = re.compile(rb"[A-Z]{3,10} \S+ HTTP/1\.[01]\r\n")
ANSWER: Final = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
FIELDS: Final = frozenset(
    {
        "accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect",
        "host", "last-event-id", "origin", "retry-after", "sec-websocket-protocol", "transfer-encoding", "upgrade",
        "user-agent",
    }
)  # fmt: skip
PARAMETERS: Final = frozenset(
    {
        "async", "duration", "format", "from", "group", "limit", "max_bytes", "offset", "partition", "timeout",
        "timestamp",
    }
)  # fmt: skip
USERINFO: Final = re.compile(r"(?<=://).*@")  # a password may have any character in it, allowed or not
EVENTS: Final = "text/event-stream"
SWITCHING: Final = 101

Unit = tuple[str, bytes, int]
"""The kind (`request`, `answer` or `end`), its bytes, and the length of its body."""


class Half:
    """Parses one direction of a connection into heads and the lengths of their bodies."""

    __slots__ = ("_body", "_buffer", "_chunked", "_edge", "_left", "_pattern", "_seen", "bare", "over")

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        """`pattern` matches the start of a head; earlier bytes are skipped."""
        self._pattern = pattern
        self._buffer = bytearray()
        self._edge = 0  # where the last read starts in the buffer
        self._seen = False  # whether a head was seen, so that the start of the next one is known
        self._left = 0  # bytes of the body or chunk still to come
        self._chunked = False
        self._body = 0  # bytes of the body so far
        self.over = False  # a stream of events or another protocol follows, which has a decoder of its own
        self.bare: deque[bool] = deque(maxlen=PIPELINED)  # whether the next responses have no body (to HEAD)

    def split(self, data: bytes, kind: str) -> Iterator[Unit]:
        """Yield the units that are complete with these bytes."""
        buffer = self._buffer
        self._edge = len(buffer)
        buffer += data
        while buffer and not self.over:
            if self._left:
                taken = min(self._left, len(buffer))
                self._left -= taken
                self._body += taken
                del buffer[:taken]
                if not self._left and not self._chunked:
                    yield self._end()
            elif self._chunked:
                size = self._chunk_size(buffer)
                if size is None:
                    return
                self._left, self._chunked = size, size > 0
                if not size:
                    yield self._end()
            else:
                head = self._next_head(buffer)
                if head is None:
                    return
                yield kind, head, 0
                if not self._has_body:
                    yield self._end()

    @property
    def _has_body(self) -> bool:
        """Whether a body, a stream or another protocol follows the head."""
        return self._left > 0 or self._chunked or self.over

    def _end(self) -> Unit:
        size, self._body = self._body, 0
        return "end", b"", size

    @staticmethod
    def _chunk_size(buffer: bytearray) -> int | None:
        """Consume a chunk's size (RFC 9112 section 7.1); 0 for the last chunk, None if it is incomplete."""
        if buffer[:2] == b"\r\n":
            del buffer[:2]
        end = buffer.find(b"\r\n")
        if end < 0:
            return None
        try:
            size = int(bytes(buffer[:end]).partition(b";")[0], 16)
        except ValueError:
            size = 0
        del buffer[: end + 2]
        if not size and buffer[:2] == b"\r\n":
            del buffer[:2]
        return max(0, size)

    def _begin(self, buffer: bytearray) -> int:
        """Return where the first head starts or may start: at the start of a line or of a read."""
        for match in self._pattern.finditer(buffer):
            at = match.start()
            if at in {0, self._edge} or buffer[at - 1 : at] == b"\n":
                return at
        if len(buffer) > LARGEST_HEAD:
            return len(buffer)
        return buffer.rfind(b"\n") + 1

    def _next_head(self, buffer: bytearray) -> bytes | None:
        """Consume a head. Returns None if it is incomplete or does not start here."""
        if buffer[:2] == b"\r\n":  # after the last chunk
            del buffer[:2]
        if not self._seen:
            del buffer[: self._begin(buffer)]
            if self._pattern.match(buffer) is None:
                return None
        end = buffer.find(HEAD_END)
        if end < 0:
            if len(buffer) > LARGEST_HEAD:
                buffer.clear()
                self._seen = False
            return None
        head = bytes(buffer[:end])
        del buffer[: end + len(HEAD_END)]
        self._seen = True
        fields = dict(_fields(head))
        length = fields.get("content-length", "0")
        self._left = int(length) if length.isascii() and length.isdecimal() and len(length) < 19 else 0
        self._chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        match = ANSWER.match(head)
        if match is not None:
            status = int(match[1])
            self.over = status == SWITCHING or fields.get("content-type", "").startswith(EVENTS)
            bare = status >= 200 and bool(self.bare) and self.bare.popleft()
            if bare or status < 200 or status in {204, 304}:
                self._left, self._chunked = 0, False
        return head


class HttpDecoder:
    """The requests and responses of one connection; a `gateway.trace.traces.Decoder`."""

    def __init__(self) -> None:
        self._requests = Half(REQUEST)
        self._answers = Half(ANSWER)
        self._topical = False  # whether the last request named the topic

    def units(self, data: bytes, *, sent: bool) -> Iterator[Unit]:
        """Yield the units that are complete with these bytes; `end` only for bodies that are not empty."""
        if self._answers.over:
            return
        half, kind = (self._answers, "answer") if sent else (self._requests, "request")
        for unit in half.split(data, kind):
            if unit[0] == "request":
                self._answers.bare.append(unit[1].startswith(b"HEAD "))
            if unit[0] != "end" or unit[2]:
                yield unit

    def concerns(self, unit: Unit, topic: bytes) -> bool:
        """Return whether a request names the topic in its path, or whether a response belongs to such a request."""
        if unit[0] == "request":
            self._topical = topic in unit[1].split(b"\r\n", 1)[0]
        return self._topical

    def line(self, unit: Unit, *, sent: bool) -> Line:
        """Return the unit's trace line."""
        kind, data, size = unit
        if kind == "end":
            return {"body": size}
        first, _, _ = data.partition(b"\r\n")
        if kind == "request":
            method, _, rest = first.decode("latin-1").partition(" ")
            line: Line = {"request": method, "target": target(rest.rpartition(" ")[0])}
        else:
            line = {"answer": int(first[9:12])}
        line["fields"] = {name: cut(value, TEXT) for name, value in _fields(data) if name in FIELDS}
        return line


def target(text: str) -> str:
    """Return a request's target with possible secrets blanked."""
    path, mark, query = USERINFO.sub(f"{BLANK}@", text, count=1).partition("?")
    parts = []
    for part in query.split("&") if mark else ():
        name, equals, _ = part.partition("=")
        parts.append(part if name in PARAMETERS else f"{cut(name, 32)}{equals}{BLANK if equals else ''}")
    return cut(path + mark + "&".join(parts), 1024)


def _fields(head: bytes) -> Iterator[tuple[str, str]]:
    for field in head.split(b"\r\n")[1:]:
        name, _, value = field.decode("latin-1").partition(":")
        yield name.strip().lower(), value.strip()
