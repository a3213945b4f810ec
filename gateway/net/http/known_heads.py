"""A cache of request heads that a connection has sent before, so that they need not be parsed and checked again.

A client repeats itself on a connection: the same request line and fields with another body. Parsing and checking that
head again is more work than all the rest of a small request. So the code that serves a request may register a handler
for its head, and the next request with exactly the same bytes goes to that handler (ADR 0059). Only the number in
`Content-Length` may differ, and it must be the length of the received body.
"""

from __future__ import annotations

import re
from typing import Final, Generic, TypeVar

from flowcontrol.budget import Budget

Handler = TypeVar("Handler")  # the handler of requests with one head

MAX_HEADS: Final = 16
"""Heads to remember for one connection. A client that uses more has them parsed."""
MAX_HEAD_BYTES: Final = 4096
"""Bytes of the longest head to remember: heads contain long tokens, and there may be thousands of connections."""
TRIES: Final = 32
"""Heads to remember without a hit. After that the client's heads are taken to differ each time."""
BUDGET_BYTES: Final = 64 * 1024 * 1024
"""Memory for the heads of all connections: 20,000 usual ones. A head that does not fit is not remembered."""
_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]+)(\r\n)")


class KnownHead(Generic[Handler]):
    """One head without the number in its `Content-Length`."""

    __slots__ = ("_after", "_before", "handler", "size")

    def __init__(self, before: bytes, after: bytes, handler: Handler) -> None:
        self._before = before
        self._after = after
        self.handler = handler
        self.size = memory_of(before, after)

    def body(self, data: bytes) -> bytes | None:
        """Return the body if `data` is exactly one request with this head. None means another head, or not complete."""
        if not data.startswith(self._before):
            return None
        digits = len(self._before)
        end = data.find(b"\r", digits)
        start = end + len(self._after)
        if end < 0 or not data.startswith(self._after, end) or data[digits:end] != b"%d" % (len(data) - start):
            return None
        return data[start:]


class KnownHeads(Generic[Handler]):
    """The remembered heads of one connection, by request line. `clear` returns their memory to the budget."""

    __slots__ = ("_budget", "_by_line", "_bytes", "_tries")

    def __init__(self, budget: Budget) -> None:
        """`budget` counts the heads of all connections; one connection never holds more than is free."""
        self._budget = budget
        self._by_line: dict[bytes, KnownHead[Handler]] = {}
        self._bytes = 0
        self._tries = TRIES

    def remember(self, head: bytes, handler: Handler) -> None:
        """Remember a head. aiohttp's parser has made sure that it has at most one `Content-Length`."""
        if not self._tries:
            return
        self._tries -= 1
        match = _LENGTH.search(head)
        if match is None or len(head) > MAX_HEAD_BYTES:
            return
        if len(self._by_line) >= MAX_HEADS:
            self.clear()
        known = KnownHead(head[: match.start(1)], head[match.start(2) :], handler)
        line = _line(head)
        former = self._by_line.pop(line, None)
        if former is not None:
            self._count(-former.size)
        if self._budget.allows(self._bytes + known.size, 0):
            self._count(known.size)
            self._by_line[line] = known

    def clear(self) -> None:
        """Forget all heads."""
        self._by_line.clear()
        self._count(-self._bytes)

    def _count(self, size: int) -> None:
        self._bytes += size
        if size > 0:
            self._budget.take(size, 0)
        else:
            self._budget.give(-size, 0)

    def find(self, data: bytes) -> tuple[Handler, bytes] | None:
        """Return handler and body if `data` is exactly one request with a known head. None means: parse it."""
        head = self._by_line.get(_line(data))
        body = None if head is None else head.body(data)
        if head is None or body is None:
            return None
        self._tries = TRIES
        return head.handler, body


def memory_of(before: bytes, after: bytes) -> int:
    """Estimate the memory of a head and its handler: the bytes, its fields as bytes and as text, their objects."""
    return 512 + 3 * (len(before) + len(after)) + 200 * (before.count(b"\n") + after.count(b"\n"))


def _line(data: bytes) -> bytes:
    return data[: data.find(b"\r")]
