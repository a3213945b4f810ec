"""Turns at something that is scarce, such as the check of a password: fair between addresses, few for each at a time.

    async with turns.turn(address, known=False):
        ...

Addresses that wait take turns, whatever number of attempts each of them has under way. Those where somebody has logged
in of late go before strangers, three times in four. What an address asks for beyond its share is refused at once, which
costs nothing: its protocol says "busy", and the client comes again.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

STRANGERS_EVERY: Final = 4  # of so many turns strangers have one while known addresses wait


class Busy(Exception):  # noqa: N818 - an answer, not an error of anybody
    """Too many attempts wait for a turn, of this address or of all; the client may come again."""


class Unavailable(Busy):
    """Whoever would have to say is away; the client may come again."""


class _Line(msgspec.Struct, eq=False):
    """The attempts of one address."""

    running: int = 0
    known: bool = False
    waiting: collections.deque[asyncio.Future[None]] = msgspec.field(default_factory=collections.deque)


class Turns:
    """The login attempts that are checked, and those that wait. An address has a line while it has an attempt."""

    def __init__(self, *, at_once: int, of_address: int, waiting_of_address: int, waiting: int) -> None:
        """Give `at_once` turns at a time, `of_address` of them to one address. So many attempts may wait."""
        self._free = at_once
        self._of_address = of_address
        self._waiting_of_address = waiting_of_address
        self._limit = waiting
        self._lines: dict[str, _Line] = {}
        self._known: collections.OrderedDict[str, None] = collections.OrderedDict()  # addresses that are due, in order
        self._strangers: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._given = 0
        self.waiting = 0
        self.running = 0

    @asynccontextmanager
    async def turn(self, address: str, *, known: bool) -> AsyncIterator[None]:
        """Wait for a turn, and have it; `known`: somebody has logged in from this address of late.

        Raises:
            Busy: too many wait already.
        """
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line()
        line.known = known
        try:
            await self._take(address, line)
        finally:
            self._forget(address, line)
        try:
            yield
        finally:
            self._free += 1
            self.running -= 1
            line.running -= 1
            self._queue(address, line)
            self._serve()
            self._forget(address, line)

    async def _take(self, address: str, line: _Line) -> None:
        if self.waiting >= self._limit or len(line.waiting) >= self._waiting_of_address:
            raise Busy("too many attempts wait for their turn")
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append(mine)
        self.waiting += 1
        self._queue(address, line)
        self._serve()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it was given, and nobody takes it
                self._free += 1
                self.running -= 1
                line.running -= 1
            else:
                line.waiting.remove(mine)
                self.waiting -= 1
            self._queue(address, line)
            self._serve()
            raise

    def _queue(self, address: str, line: _Line) -> None:
        """Put an address behind the others that are due, if it is and is not there."""
        due, other = (self._known, self._strangers) if line.known else (self._strangers, self._known)
        other.pop(address, None)
        if not line.waiting or line.running >= self._of_address:
            due.pop(address, None)
        elif address not in due:
            due[address] = None

    def _serve(self) -> None:
        while self._free and (self._known or self._strangers):
            first, then = self._known, self._strangers
            if self._given % STRANGERS_EVERY == STRANGERS_EVERY - 1:
                first, then = then, first
            due = first or then
            address, _ = due.popitem(last=False)
            line = self._lines[address]
            mine = line.waiting.popleft()
            self.waiting -= 1
            self._given += 1
            self._free -= 1
            self.running += 1
            line.running += 1
            mine.set_result(None)
            self._queue(address, line)

    def _forget(self, address: str, line: _Line) -> None:
        if not line.running and not line.waiting:
            self._lines.pop(address, None)
