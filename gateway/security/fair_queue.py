"""A fair queue for expensive work such as password checks: fair between addresses, with a limit for each.

    async with turns.turn(address, known=False):
        ...

Waiting addresses are served in turn, however many attempts each has. Three of four turns go to addresses with a recent
successful login while any of them wait. Attempts beyond an address's share are refused immediately, which costs
nothing: the protocol answers "busy" and the client tries again.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

STRANGERS_EVERY: Final = 4  # unknown addresses get one turn in this many while known ones wait


class Busy(Exception):  # noqa: N818 - an answer, not a failure
    """Too many attempts are waiting, from this address or in total. The client may try again."""


class Unavailable(Busy):
    """The service that would decide is not reachable. The client may try again."""


class _Line(msgspec.Struct, eq=False):
    """The attempts of one address."""

    running: int = 0
    known: bool = False
    waiting: collections.deque[asyncio.Future[None]] = msgspec.field(default_factory=collections.deque)


class FairQueue:
    """The login attempts that are being checked or waiting. An address has a line while it has an attempt."""

    def __init__(self, *, at_once: int, of_address: int, waiting_of_address: int, waiting: int) -> None:
        """Allow `at_once` concurrent turns, `of_address` of them per address, and the given numbers of waiters."""
        self._at_once = at_once
        self._of_address = of_address
        self._waiting_of_address = waiting_of_address
        self._limit = waiting
        self._lines: dict[str, _Line] = {}
        self._known: collections.OrderedDict[str, None] = collections.OrderedDict()  # eligible addresses, in order
        self._strangers: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._given = 0
        self.waiting = 0
        self.running = 0

    @asynccontextmanager
    async def turn(self, address: str, *, known: bool) -> AsyncIterator[None]:
        """Wait for a turn and hold it; raises Busy if too many attempts are waiting.

        `known`: the address has had a recent successful login.
        """
        line = self._lines.get(address) or _Line()
        if self.waiting >= self._limit or len(line.waiting) >= self._waiting_of_address:
            raise Busy("too many login attempts are waiting")
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines[address] = line
        line.known = known
        line.waiting.append(mine)
        self.waiting += 1
        self._queue(address, line)
        self._serve()
        try:
            await mine
            yield
        finally:
            if mine in line.waiting:  # cancelled before its turn
                line.waiting.remove(mine)
                self.waiting -= 1
            else:
                self.running -= 1
                line.running -= 1
            self._queue(address, line)
            self._serve()
            if not line.running and not line.waiting:
                del self._lines[address]

    def _queue(self, address: str, line: _Line) -> None:
        """Add an address behind the other eligible ones, or remove it if it is no longer eligible."""
        due, other = (self._known, self._strangers) if line.known else (self._strangers, self._known)
        other.pop(address, None)
        if not line.waiting or line.running >= self._of_address:
            due.pop(address, None)
        elif address not in due:
            due[address] = None

    def _serve(self) -> None:
        while self.running < self._at_once and (self._known or self._strangers):
            first, then = self._known, self._strangers
            if self._given % STRANGERS_EVERY == STRANGERS_EVERY - 1:
                first, then = then, first
            due = first or then
            address, _ = due.popitem(last=False)
            line = self._lines[address]
            mine = line.waiting.popleft()
            self.waiting -= 1
            self._given += 1
            self.running += 1
            line.running += 1
            if not mine.cancelled():  # otherwise its attempt ends, and gives the turn back, in a moment
                mine.set_result(None)
            self._queue(address, line)
