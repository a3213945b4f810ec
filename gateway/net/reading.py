"""The reading half of a pump: bytes in pieces, pauses, and events that wait for the session.

A read may be ten thousand things to do. It is taken piece by piece, each as large as was little work so far; what is
left waits for the next turn of the loop, or for the end of the pauses that hold the peer back, and the socket is not
read meanwhile. While a session's own waiting runs, the events behind it are held, so that a client's packets are
handled in the order in which they came.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from gateway.flow import Flowing
from gateway.net.strangers import Stranger
from gateway.pauses import CONNECTION_BUDGET, PROCESS_BUDGET, RATES, SHARE, UNANSWERED, pauses
from gateway.spawn import Spawn
from gateway.turns import SLICE_S
from protocols.connection import Connection

AHEAD_BYTES: Final = 16 * 1024
"""What is read while a session waits: the events of it are held, which take some ten times as much."""
HELD: Final = "held"
SLICED: Final = "sliced"
PIECE: Final = 4 * 1024
"""Bytes of a read that are taken at once: 200 links detached, which is ten milliseconds."""
PIECE_MOST: Final = 4 * PIECE  # where the pieces before were little work
LITTLE_S: Final = SLICE_S / 16
"""A `PIECE` that takes less is little work."""
NOTHING: Final[frozenset[str]] = frozenset()
IN_TURN: Final = frozenset((SLICED,))
HOLD_BACK: Final = (PROCESS_BUDGET, CONNECTION_BUDGET, SHARE, *RATES)
"""Reasons for which what was read already waits as well."""
NOTED: Final = (CONNECTION_BUDGET, SHARE, UNANSWERED, *RATES)
"""Reasons not to read that are a connection's own; others are noted by what many wait for, or are over in a moment."""


class EventHandler(Flowing, Protocol):
    """A session, as far as it is told what a peer sends."""

    def handle(self, events: list[Any]) -> Awaitable[None] | None:
        """Act on events. An awaitable in return holds all later ones until it is done."""


class ReadingHalf(asyncio.Protocol, abc.ABC):
    """What a pump reads from its socket, until the session has it."""

    __slots__ = (
        "_ahead", "_clock", "_closed", "_eof", "_events", "_holding", "_pauses", "_piece", "_rest", "_spawn",
        "_stranger", "connection", "handler", "lingering", "transport",
    )  # fmt: skip

    def __init__(self, connection: Connection, handler: EventHandler, spawn: Spawn, clock: Callable[[], float]) -> None:
        self.connection = connection  # connection, handler: what the bytes and the events mean
        self.handler = handler
        self.transport: asyncio.Transport | None = None  # asyncio's; None before it is there, and when it is gone
        self.lingering = False  # whether what the peer still sends is thrown away
        self._stranger: Stranger | None = None  # counts what comes until the peer has logged in
        self._spawn = spawn
        self._clock = clock
        self._pauses: frozenset[str] = NOTHING  # most pumps never need one of their own; a set takes 216 bytes
        self._events: list[Any] | None = None  # that wait behind the session's own waiting; most pumps never have any
        self._ahead = 0  # bytes that may still be read meanwhile
        self._eof = False  # the peer has closed meanwhile
        self._rest = b""  # of a long read: bytes that wait for their turn, or for the end of a pause
        self._piece = PIECE  # bytes of a read that are taken at once, as much as was little work so far
        self._holding = False
        self._closed = False

    @abc.abstractmethod
    def flush(self) -> None:
        """Write what the connection has to say."""

    @abc.abstractmethod
    def close(self) -> None:
        """Send what is queued, then close."""

    @abc.abstractmethod
    def fail(self, error: Exception) -> None:
        """Our bug, on this connection: it ends."""

    # asyncio's side

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._closed or self.lingering:
            return
        if self._stranger is not None and not self._stranger.took(len(data)):
            return
        if self._rest:  # TLS may have had more
            self._rest += data
            return
        connection = self.connection
        if self._holding:
            self._ahead -= len(data)
            if self._ahead <= 0:
                self.pause_reading(HELD)
        try:
            events = connection.tick(self._clock())
            if events:
                self._dispatch(events)
            if len(data) <= self._piece:
                self._dispatch(connection.receive_data(data))
                self.flush()
            else:
                self._receive(data)
        except Exception as error:
            self.fail(error)

    def _receive(self, data: bytes) -> None:
        """Take a long read piece by piece: a quarter of a megabyte may be ten thousand things to do.

        What is left when others have waited long enough comes in the next turn; and what is left when the connection is
        paused comes when it goes on: else it had a quarter of a megabyte more than its share. The socket is not read
        until then.
        """
        began = now = time.perf_counter()
        at = 0
        while at < len(data):
            size = self._piece
            self._dispatch(self.connection.receive_data(data[at : at + size]))
            if self._closed or self.lingering or self.connection.closing:
                break
            at += size
            before, now = now, time.perf_counter()
            if at < len(data) and (now - began >= SLICE_S or self.is_held_back):
                self._rest = data[at:]
                if not self.is_held_back:
                    asyncio.get_running_loop().call_soon(self._go_on)
                self.pause_reading(SLICED)
                break
            if (now - before) * PIECE < LITTLE_S * size:
                self._piece = min(2 * size, PIECE_MOST)
            else:
                self._piece = max(size // 2, PIECE)
        self.flush()

    def _go_on(self) -> None:
        """The next turn of a long read."""
        if self.is_held_back or not self._rest:
            return
        rest, self._rest = self._rest, b""
        self.resume_reading(SLICED)
        if not self._closed and not self.lingering:
            try:
                self._receive(rest)
            except Exception as error:
                self.fail(error)

    def _take_rest(self) -> None:
        """The peer is gone: what it has sent before is taken now, paused or not."""
        rest, self._rest = self._rest, b""
        if rest and not self.lingering:
            self._dispatch(self.connection.receive_data(rest))

    def eof_received(self) -> bool:
        """The peer will send no more; the transport closes itself after our last bytes."""
        if self._holding:
            self._eof = True  # what it sent before is heard first
            return True
        if not self._closed and not self.lingering:
            try:
                self._take_rest()
                self._dispatch(self.connection.receive_eof())
                self.flush()
            except Exception as error:
                self.fail(error)
        return False

    # the session's side

    def identified(self) -> None:
        """The peer has logged in, or is gone: what it sends counts elsewhere."""
        if self._stranger is not None:
            self._stranger.leave()
            self._stranger = None

    def pause_reading(self, reason: str) -> None:
        """Stop reading the socket until `resume_reading` was called for every reason."""
        if self.lingering:
            return
        if not self._pauses and self.transport is not None and not self._closed:
            self.transport.pause_reading()
        self._pauses |= {reason}
        if reason in NOTED:
            pauses.begin(reason, self, self.handler.subject)

    def resume_reading(self, reason: str) -> None:
        """Take one reason back."""
        if reason in self._pauses:
            self._pauses = self._pauses - {reason} or NOTHING
            if reason in NOTED:
                pauses.end(reason, self)
            if self._rest and reason is not SLICED and not self.is_held_back:
                asyncio.get_running_loop().call_soon(self._go_on)
            if not self._pauses and self.transport is not None and not self._closed:
                self.transport.resume_reading()

    def read_ahead(self) -> None:
        """Read on while the session waits, and hold the events: the connection itself answers a ping, say.

        At most `AHEAD_BYTES`, however often, until all that is held was handed over. Called within the waiting.
        """
        if self._events is None:
            self._ahead = AHEAD_BYTES
            self.resume_reading(HELD)

    def is_paused_for(self, *reasons: str) -> bool:
        """Whether the socket is not read for one of these reasons."""
        return not self._pauses.isdisjoint(reasons)

    @property
    def is_held_back(self) -> bool:
        """Whether the peer has sent enough for now: also what was read already waits, and silence is not its fault."""
        return bool(self._pauses) and self.is_paused_for(*HOLD_BACK)

    @property
    def reading(self) -> bool:
        """Whether the socket is being read; what was read of it may be waiting for its turn."""
        return self._pauses <= IN_TURN

    # inside

    def _dispatch(self, events: list[Any]) -> None:
        if not events:
            return
        if self._holding:
            if self._events is None:
                self._events = events
            else:
                self._events += events
            return
        waiting = self.handler.handle(events)
        if waiting is not None:
            self._holding = True
            self.pause_reading(HELD)
            self._spawn(self._hold(waiting))

    async def _hold(self, waiting: Awaitable[None]) -> None:
        """Wait for the session, then hand over what came meanwhile, as long as it takes."""
        try:
            next_one: Awaitable[None] | None = waiting
            while next_one is not None:
                await next_one
                next_one = None
                if self._events is not None and not self._closed:
                    events, self._events = self._events, None
                    next_one = self.handler.handle(events)
        except Exception as error:
            self.fail(error)
        finally:
            self._holding = False
            self.resume_reading(HELD)
            try:
                self.flush()
                if self._eof and not self._closed and not self.lingering:
                    self.eof_received()
                    self.close()
            except Exception as error:
                self.fail(error)
