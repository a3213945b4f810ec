"""Bodies cut as they come in: at ends of lines, or into JSON documents one behind the other. Pure.

Documents (RFC 8259, concatenated) are objects or arrays; between them may be white space, and there need not be any.
What stands inside a document is looked at only as far as its end demands: strings and brackets. Whether it is JSON is
judged by who decodes it. Each byte is looked at once, however the body is cut into parts.
"""

from __future__ import annotations

import re
from typing import Final

from protocols.rest.errors import RestError

_FEED: Final = b"\n"


class LineSplitter:
    """Takes parts of a body, and gives blocks of whole lines."""

    __slots__ = ("_held", "_limit", "_parts", "_skipping")

    def __init__(self, limit: int) -> None:
        """`limit`: the most bytes of a line, its end not counted."""
        self._limit = limit
        self._parts: list[bytes] = []
        self._held = 0
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes | None]:
        """The next part of the body.

        Returns:
            In order: blocks of one or more lines with their ends, and None for each line that is too long; of that one
            nothing is kept.
        """
        if self._skipping:
            end = data.find(_FEED)
            if end < 0:
                return []
            self._skipping = False
            data = data[end + 1 :]
        end = data.rfind(_FEED) + 1
        found: list[bytes | None] = []
        if end:
            block = b"".join((*self._parts, data[:end])) if self._parts else data[:end]
            self._parts.clear()
            self._held = 0
            data = data[end:]
            if len(block) <= self._limit:
                found.append(block)
            else:
                self._sift(block, found)
        if data:
            self._parts.append(data)
            self._held += len(data)
            if self._held > self._limit:
                self._parts.clear()
                self._held = 0
                self._skipping = True
                found.append(None)
        return found

    def finish(self) -> list[bytes | None]:
        """The body is over: the last line, where it has no end."""
        return [b"".join(self._parts)] if self._parts else []

    def _sift(self, block: bytes, found: list[bytes | None]) -> None:
        """Lines that may be too long, one by one; the others stay together."""
        good: list[bytes] = []
        for line in [line + _FEED for line in block.split(_FEED)[:-1]]:
            if len(line) - 1 <= self._limit:
                good.append(line)
                continue
            if good:
                found.append(b"".join(good))
                good = []
            found.append(None)
        if good:
            found.append(b"".join(good))


_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_MARK: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)  # a whole string, or where one begins
_INSIDE: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # the rest of a string
_QUOTE: Final = ord('"')
_OPENING: Final = b"{["


class DocumentSplitter:
    """Takes parts of a body, and gives whole documents."""

    __slots__ = ("_data", "_depth", "_in_string", "_limit", "_seen", "fault")

    def __init__(self, limit: int) -> None:
        """`limit`: the most bytes of a document."""
        self.fault: RestError | None = None  # why nothing more can be cut; what was given before is good
        self._limit = limit
        self._data = bytearray()  # from the beginning of the document on
        self._seen = 0  # so far it was looked at
        self._depth = 0
        self._in_string = False

    def feed(self, part: bytes) -> list[bytes]:
        """The documents that end in the next part of the body; none any more after a fault."""
        found: list[bytes] = []
        if self.fault is not None:
            return found
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
                    self.fault = RestError(400, "Validation error on: the body is not JSON: an object was expected")
                    break
                depth = 1
                seen += 1
                continue
            if self._in_string:
                seen = _end(_INSIDE, data, seen)
                if seen == size or data[seen] != _QUOTE:  # the part ends in it, perhaps behind a backslash
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
                found.append(bytes(data[start:seen]))
                start = seen
        del data[:start]
        self._seen, self._depth = seen - start, depth
        if self.fault is None and len(data) > self._limit:
            self.fault = RestError(413, f"A document is larger than {self._limit} bytes")
        return found

    def finish(self) -> None:
        """The body is over; RestError: 400, in the middle of a document."""
        if self.fault is None and self._data:
            raise RestError(400, "Validation error on: the body is not JSON: it ends in the middle of an object")


def _end(pattern: re.Pattern[bytes], data: bytearray, position: int) -> int:
    match = pattern.match(data, position)
    assert match is not None, "it fits nothing at all too"
    return match.end()
