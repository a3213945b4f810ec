"""Splits a body as it arrives, into lines or into concatenated JSON documents. Pure.

Documents (RFC 8259) are objects or arrays with optional white space between them. To find a document's end, only
strings and brackets are recognized; the decoder checks whether it is JSON. Each byte is scanned once, however the body
is split into parts.
"""

from __future__ import annotations

import re
from typing import Final

from protocols.rest.errors import RestError
from protocols.rest.responses import ErrorBody

_FEED: Final = b"\n"


class LineSplitter:
    """Turns parts of a body into blocks of complete lines."""

    __slots__ = ("_held", "_limit", "_parts", "_skipping")

    def __init__(self, limit: int) -> None:
        """`limit` is the maximum size of a line in bytes, without its end."""
        self._limit = limit
        self._parts: list[bytes] = []
        self._held = 0
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes | None]:
        """Process the next part of the body.

        Returns:
            In order, blocks of one or more lines with their ends, and None for each line that is too long, which is
            discarded.
        """
        if self._skipping:
            end = data.find(_FEED)
            if end < 0:
                return []
            self._skipping = False
            data = data[end + 1 :]
        end = data.rfind(_FEED) + 1
        pieces: list[bytes | None] = []
        if end:
            block = b"".join((*self._parts, data[:end])) if self._parts else data[:end]
            self._parts.clear()
            self._held = 0
            data = data[end:]
            if len(block) <= self._limit:
                pieces.append(block)
            else:
                self._split_long_lines(block, pieces)
        if data:
            self._parts.append(data)
            self._held += len(data)
            if self._held > self._limit:
                self._parts.clear()
                self._held = 0
                self._skipping = True
                pieces.append(None)
        return pieces

    def finish(self) -> list[bytes | None]:
        """Return the last line if the body does not end with a line end."""
        return [b"".join(self._parts)] if self._parts else []

    def _split_long_lines(self, block: bytes, pieces: list[bytes | None]) -> None:
        """Check lines one by one for their length; consecutive good lines stay in one block."""
        good: list[bytes] = []
        for line in [line + _FEED for line in block.split(_FEED)[:-1]]:
            if len(line) - 1 <= self._limit:
                good.append(line)
                continue
            if good:
                pieces.append(b"".join(good))
                good = []
            pieces.append(None)
        if good:
            pieces.append(b"".join(good))


_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_MARK: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)  # a whole string, its start, a bracket
_INSIDE: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # the rest of a string
_QUOTE: Final = ord('"')
_OPENING: Final = b"{["


class DocumentSplitter:
    """Turns parts of a body into complete documents."""

    __slots__ = ("_data", "_depth", "_in_string", "_limit", "_seen", "fault")

    def __init__(self, limit: int) -> None:
        """`limit` is the maximum size of a document in bytes."""
        self.fault: ErrorBody | None = None  # why splitting stopped; documents returned before are valid
        self._limit = limit
        self._data = bytearray()  # from the start of the current document on
        self._seen = 0  # bytes of it that are scanned
        self._depth = 0
        self._in_string = False

    def feed(self, part: bytes) -> list[bytes]:
        """Return the documents that end in the next part of the body; none after a fault."""
        pieces: list[bytes] = []
        if self.fault is not None:
            return pieces
        data = self._data
        data += part
        start, seen, depth = 0, self._seen, self._depth
        size = len(data)
        while seen < size:
            if not depth:
                start = seen = _end(_SPACE, data, seen)
                if seen == size:
                    break
                if data[seen] not in _OPENING:
                    self.fault = ErrorBody(400, "Validation error on: the body is not JSON: an object was expected")
                    break
                depth = 1
                seen += 1
                continue
            if self._in_string:
                seen = _end(_INSIDE, data, seen)
                if seen == size or data[seen] != _QUOTE:  # the part ends in the string, perhaps after a backslash
                    break
                self._in_string = False
                seen += 1
                continue
            mark = _MARK.search(data, seen)
            if mark is None:
                seen = size
                break
            token = data[mark.start()]
            if token == _QUOTE and mark.end() - mark.start() == 1:
                self._in_string = True
                seen = mark.end()
                continue
            seen = mark.end()
            if token == _QUOTE:
                continue
            if token in _OPENING:
                depth += 1
                continue
            depth -= 1
            if not depth:
                if seen - start > self._limit:
                    break
                pieces.append(bytes(data[start:seen]))
                start = seen
        del data[:start]
        self._seen, self._depth = seen - start, depth
        if self.fault is None and len(data) > self._limit:
            self.fault = ErrorBody(413, f"A document is larger than {self._limit} bytes")
        return pieces

    def finish(self) -> None:
        """Check that the body does not end within a document; else RestError 400."""
        if self.fault is None and self._data:
            raise RestError(400, "Validation error on: the body is not JSON: it ends in the middle of an object")


def _end(pattern: re.Pattern[bytes], data: bytearray, position: int) -> int:
    match = pattern.match(data, position)
    assert match is not None, "it also matches the empty string"
    return match.end()
