"""A body of lines, cut at ends of lines as it comes in; none is longer than allowed. Pure."""

from __future__ import annotations

from typing import Final

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
