"""Heads of requests that their connection has sent before: what was read of one, and judged, holds for the next.

A client says the same again and again on a connection: the same line, the same fields, another body. Parsing and
judging that head anew is more work than the whole rest of a small request. So what serves a request may leave behind
what its head came to, and the next request with the very same bytes is given to that (ADR 0059). Only the number in
`Content-Length` may differ, and it must be what is there.
"""

from __future__ import annotations

import re
from typing import Final, Generic, TypeVar

Serves = TypeVar("Serves")  # what serves the requests that have one head

REMEMBERED: Final = 16
"""Heads of one connection: a client that has more is served all the same, by their words."""
LONGEST: Final = 4096
"""Bytes of a head that is remembered: a long token is in it, and there may be thousands of connections."""
TRIES: Final = 32
"""Heads that are remembered without one that comes again: then its client says something else each time."""
_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]+)(\r\n)")


class KnownHead(Generic[Serves]):
    """One head, but for the number in its `Content-Length`."""

    __slots__ = ("_after", "_before", "serves")

    def __init__(self, before: bytes, after: bytes, serves: Serves) -> None:
        self._before = before
        self._after = after
        self.serves = serves

    def body(self, data: bytes) -> bytes | None:
        """The body of a request with this head that is all of `data`; None: it has another head, or is not whole."""
        if not data.startswith(self._before):
            return None
        digits = len(self._before)
        end = data.find(b"\r", digits)
        start = end + len(self._after)
        if end < 0 or not data.startswith(self._after, end) or data[digits:end] != b"%d" % (len(data) - start):
            return None
        return data[start:]


class KnownHeads(Generic[Serves]):
    """Those of one connection, by their first lines."""

    __slots__ = ("_by_line", "_tries")

    def __init__(self) -> None:
        self._by_line: dict[bytes, KnownHead[Serves]] = {}
        self._tries = TRIES

    def remember(self, head: bytes, serves: Serves) -> None:
        """Remember a head, of which aiohttp's parser has let through one `Content-Length` at most."""
        if not self._tries:
            return
        self._tries -= 1
        found = _LENGTH.search(head)
        if found is None or len(head) > LONGEST:
            return
        if len(self._by_line) >= REMEMBERED:
            self._by_line.clear()
        known = KnownHead(head[: found.start(1)], head[found.start(2) :], serves)
        self._by_line[_line(head)] = known

    def find(self, data: bytes) -> tuple[Serves, bytes] | None:
        """Who serves a request with a known head that is all of `data`, and its body; None: it is to be parsed."""
        head = self._by_line.get(_line(data))
        body = None if head is None else head.body(data)
        if head is None or body is None:
            return None
        self._tries = TRIES
        return head.serves, body


def _line(data: bytes) -> bytes:
    return data[: data.find(b"\r")]
