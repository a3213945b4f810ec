"""Heads of requests that their connection has sent before: what was read of one, and judged, holds for the next.

A client says the same again and again on a connection: the same line, the same fields, another body. Parsing and
judging that head anew is more work than the whole rest of a small request. So what serves a request may leave behind
what its head came to, and the next request with the very same bytes is given to that (ADR 0059). Only the number in
`Content-Length` may differ, and it must be what is there.
"""

from __future__ import annotations

import re
from typing import Final, Generic, TypeVar

from flowcontrol.budget import Budget

Serves = TypeVar("Serves")  # what serves the requests that have one head

REMEMBERED: Final = 16
"""Heads of one connection: a client that has more is served all the same, by their words."""
LONGEST: Final = 4096
"""Bytes of a head that is remembered: a long token is in it, and there may be thousands of connections."""
TRIES: Final = 32
"""Heads that are remembered without one that comes again: then its client says something else each time."""
BUDGET_BYTES: Final = 64 * 1024 * 1024
"""Memory for the heads of all connections: 20,000 usual ones. Nothing waits for it: what has no place is parsed."""
_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]+)(\r\n)")


class KnownHead(Generic[Serves]):
    """One head, but for the number in its `Content-Length`."""

    __slots__ = ("_after", "_before", "serves", "size")

    def __init__(self, before: bytes, after: bytes, serves: Serves) -> None:
        self._before = before
        self._after = after
        self.serves = serves
        self.size = memory_of(before, after)

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
    """Those of one connection, by their first lines; `clear` gives back what they take of the budget."""

    __slots__ = ("_budget", "_by_line", "_bytes", "_tries")

    def __init__(self, budget: Budget) -> None:
        """None yet. `budget` counts those of all connections, of which none has more than is free."""
        self._budget = budget
        self._by_line: dict[bytes, KnownHead[Serves]] = {}
        self._bytes = 0
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
            self.clear()
        known = KnownHead(head[: found.start(1)], head[found.start(2) :], serves)
        line = _line(head)
        former = self._by_line.pop(line, None)
        if former is not None:
            self._count(-former.size)
        if self._budget.allows(self._bytes + known.size, 0):
            self._count(known.size)
            self._by_line[line] = known

    def clear(self) -> None:
        """Forget all."""
        self._by_line.clear()
        self._count(-self._bytes)

    def _count(self, size: int) -> None:
        self._bytes += size
        if size > 0:
            self._budget.take(size, 0)
        else:
            self._budget.give(-size, 0)

    def find(self, data: bytes) -> tuple[Serves, bytes] | None:
        """Who serves a request with a known head that is all of `data`, and its body; None: it is to be parsed."""
        head = self._by_line.get(_line(data))
        body = None if head is None else head.body(data)
        if head is None or body is None:
            return None
        self._tries = TRIES
        return head.serves, body


def memory_of(before: bytes, after: bytes) -> int:
    """About what a head takes, with what it came to: itself, its fields as bytes and as text, their objects."""
    return 512 + 3 * (len(before) + len(after)) + 200 * (before.count(b"\n") + after.count(b"\n"))


def _line(data: bytes) -> bytes:
    return data[: data.find(b"\r")]
