"""The reading half of a pump: parses reads in pieces, pauses reading, and holds events while the session waits.

One read may contain ten thousand packets. It is parsed piece by piece; the size of a piece adapts to how much work the
previous ones were. The rest waits for the next turn of the loop, or until the peer is no longer held back, and the
socket is not read meanwhile. While a session waits, later events are held, so that a client's packets are handled in
the order in which they came.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from gateway.net.strangers import Stranger
from gateway.runtime.spawn import Spawn
from gateway.runtime.turns import SLICE_S
from gateway.views.pauses import CONNECTION_BUDGET, PROCESS_BUDGET, RATES, SHARE, UNANSWERED, pauses
from protocols.connection import Connection

READ_AHEAD_BYTES: Final = 16 * 1024
"""Bytes that are read while a session waits. Their events are held and take about ten times as much memory."""
HELD: Final = "held"
SLICED: Final = "sliced"
PIECE: Final = 4 * 1024
"""Bytes of a read that are parsed without a break. The worst case, 200 detached links, takes ten milliseconds."""
PIECE_MOST: Final = 4 * PIECE  # when the previous pieces were little work
LITTLE_S: Final = SLICE_S / 16
"""A `PIECE` that takes less time is little work."""
NO_PAUSES: Final[frozenset[str]] = frozenset()
IN_TURN: Final = frozenset((SLICED,))
HOLD_BACK: Final = (PROCESS_BUDGET, CONNECTION_BUDGET, SHARE, *RATES)
"""Pause reasons that also stop the processing of bytes that were already read."""
REPORTED: Final = (CONNECTION_BUDGET, SHARE, UNANSWERED, *RATES)
"""Pause reasons that are reported per connection. Others are short, or reported by the resource that is waited for."""


class EventHandler(Protocol):
    """The part of a session that receives events."""

    @property
    def subject(self) -> str:
        """The connection's name in `gateway.views.pauses`."""
        ...

    def handle(self, events: list[Any]) -> Awaitable[None] | None:
        """Act on events. If it returns an awaitable, later events are held until that is done."""


class ReadingHalf(asyncio.Protocol, abc.ABC):
    """Reads from the socket and hands events to the session."""

    __slots__ = (
        "_ahead", "_clock", "_closed", "_eof", "_events", "_holding", "_pauses", "_piece", "_rest", "_spawn",
        "_stranger", "connection", "handler", "lingering", "transport",
    )  # fmt: skip

    def __init__(self, connection: Connection, handler: EventHandler, spawn: Spawn, clock: Callable[[], float]) -> None:
        self.connection = connection
        self.handler = handler
        self.transport: asyncio.Transport | None = None  # None before the socket is open and after it is closed
        self.lingering = False  # whether input is discarded because we have closed
        self._stranger: Stranger | None = None  # counts received bytes until the peer has logged in
        self._spawn = spawn
        self._clock = clock
        self._pauses: frozenset[str] = NO_PAUSES  # most pumps never need a set of their own, which takes 216 bytes
        self._events: list[Any] | None = None  # held while the session waits; most pumps never have any
        self._ahead = 0  # bytes that may still be read while the session waits
        self._eof = False  # the peer has closed while the session waited
        self._rest = b""  # of a long read: bytes that wait for the next turn, or for the end of a pause
        self._piece = PIECE  # bytes of a read to parse without a break; adapts to the work they are
        self._holding = False  # whether the session waits and events are held
        self._closed = False

    @abc.abstractmethod
    def flush(self) -> None:
        """Write what the connection has to send."""

    @abc.abstractmethod
    def close(self) -> None:
        """Send what is queued, then close."""

    @abc.abstractmethod
    def fail(self, error: Exception) -> None:
        """Log our bug and close this connection."""

    # asyncio's side

    def data_received(self, data: bytes) -> None:
        """Bytes were received."""
        if self._closed or self.lingering:
            return
        if self._stranger is not None and not self._stranger.received(len(data)):
            return
        if self._rest:  # reading is paused, but TLS may have had more decrypted
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
        """Process a long read piece by piece: a quarter of a megabyte may contain ten thousand packets.

        When the time slice is used up, the rest is processed in the next turn. When the connection is held back, the
        rest waits until it is not: else it would get a quarter of a megabyte more than its share. The socket is not
        read until then.
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
        """Continue a long read in a later turn."""
        if self.is_held_back or not self._rest:
            return
        rest, self._rest = self._rest, b""
        self.resume_reading(SLICED)
        if not self._closed and not self.lingering:
            try:
                self._receive(rest)
            except Exception as error:
                self.fail(error)

    def _process_rest(self) -> None:
        """Process what the peer sent before it closed, even if reading is paused."""
        rest, self._rest = self._rest, b""
        if rest and not self.lingering:
            self._dispatch(self.connection.receive_data(rest))

    def eof_received(self) -> bool:
        """The peer will send no more. The transport closes itself after our last bytes."""
        if self._holding:
            self._eof = True  # the events that are held are handled first
            return True
        if not self._closed and not self.lingering:
            try:
                self._process_rest()
                self._dispatch(self.connection.receive_eof())
                self.flush()
            except Exception as error:
                self.fail(error)
        return False

    # the session's side

    def identified(self) -> None:
        """Stop counting the peer as a stranger: it has logged in or disconnected."""
        if self._stranger is not None:
            self._stranger.leave()
            self._stranger = None

    def pause_reading(self, reason: str) -> None:
        """Stop reading the socket until `resume_reading` is called for every reason."""
        if self.lingering:
            return
        if not self._pauses and self.transport is not None and not self._closed:
            self.transport.pause_reading()
        self._pauses |= {reason}
        if reason in REPORTED:
            pauses.begin(reason, self, self.handler.subject)

    def resume_reading(self, reason: str) -> None:
        """Remove one reason to pause."""
        if reason in self._pauses:
            self._pauses = self._pauses - {reason} or NO_PAUSES
            if reason in REPORTED:
                pauses.end(reason, self)
            if self._rest and reason is not SLICED and not self.is_held_back:
                asyncio.get_running_loop().call_soon(self._go_on)
            if not self._pauses and self.transport is not None and not self._closed:
                self.transport.resume_reading()

    def read_ahead(self) -> None:
        """Continue to read while the session waits, so that the connection can answer a ping; events are held.

        Reads at most `READ_AHEAD_BYTES`, however often it is called, until all held events were handed over. To be
        called by the session while it waits.
        """
        if self._events is None:
            self._ahead = READ_AHEAD_BYTES
            self.resume_reading(HELD)

    def is_paused_for(self, *reasons: str) -> bool:
        """Whether reading is paused for one of these reasons."""
        return not self._pauses.isdisjoint(reasons)

    @property
    def is_held_back(self) -> bool:
        """Whether a limit holds the peer back: bytes that were already read wait too, and its silence is no fault."""
        return bool(self._pauses) and self.is_paused_for(*HOLD_BACK)

    @property
    def reading(self) -> bool:
        """Whether reading is not paused, except for the rest of a long read."""
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
        """Wait for the session, then hand over the held events, again and again until none are left."""
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
            if self._eof and self.transport is None:
                self.connection_lost(None)
