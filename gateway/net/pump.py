"""Drives any sans-io connection over an asyncio transport: reads, writes, tells the time, closes.

One pump is one socket. It holds no task: asyncio's callbacks call it, and it calls the session. Only a session's
own waiting (a password check, a topic look-up) is a task, and while it runs the pump hands over no further events,
so that a client's packets are handled in the order in which they came. The socket is read on a little, if the session
says so: then the connection answers by itself what needs no session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, cast

from flowcontrol.budget import UNBOUNDED, UNCOUNTED, Budget
from gateway.failures import failures
from gateway.flow import Flowing
from gateway.net.alarms import WIDTH_S, Alarms
from gateway.net.strangers import Stranger, Strangers
from gateway.net.unread import LOW, Unread
from gateway.net.writes import Writes
from gateway.pauses import CONNECTION_BUDGET, PROCESS_BUDGET, RATES, SHARE, SLOW_READER, UNANSWERED, pauses
from gateway.security.throttle import address_of
from gateway.spawn import Spawn
from gateway.turns import SLICE_S
from protocols.connection import Connection, ConnectionFailed

WRITE_HIGH: Final = 256 * 1024  # stop producing above it, credit or not (flow control, part 2)
LINGER_S: Final = 1.0  # how long a closed connection is drained, so that its last bytes are not lost in a reset
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


class Handler(Flowing, Protocol):
    """What a session does with a connection's events."""

    def connected(self, pump: Pump) -> None:
        """The socket is open; called once, before any event."""

    def handle(self, events: list[Any]) -> Awaitable[None] | None:
        """Act on events. An awaitable in return holds all later ones until it is done."""

    def writable(self) -> None:
        """The write buffer is below its low mark again: go on sending."""

    def disconnected(self, reason: str) -> None:
        """The socket is gone; called once, the last call."""


class _Nobody:
    """The handler of a pump whose socket is gone."""

    def connected(self, pump: Pump) -> None: ...

    def handle(self, events: list[Any]) -> None: ...

    def writable(self) -> None: ...

    def disconnected(self, reason: str) -> None: ...

    subject = ""
    load = 0

    def flow(self) -> None: ...


NOBODY: Final[Handler] = _Nobody()


class Pump(asyncio.Protocol):
    """One socket with one sans-io connection and the session that gives it meaning."""

    __slots__ = (
        "_ahead", "_alarms", "_clock", "_closed", "_eof", "_events", "_holding", "_lost", "_outgoing", "_pauses",
        "_piece", "_rest", "_spawn", "_stranger", "_strangers", "_timer", "_timer_at", "_unread", "_writes",
        "connection", "flushing", "handler", "lingering", "peer", "transport", "writable",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        handler: Handler,
        spawn: Spawn,
        clock: Callable[[], float],
        lost: Callable[[Pump], None] | None = None,
        *,
        writes: Writes | None = None,
        alarms: Alarms | None = None,
        strangers: Strangers | None = None,
        outgoing: Budget = UNBOUNDED,
    ) -> None:
        """Join the parts; `lost` is told when the socket is gone, after the handler.

        `writes` and `alarms` are shared by the pumps of one listener (None: this one has its own); `strangers` counts
        what comes until `identified` (None: the peer has logged in); `outgoing` what slow readers have not read.
        """
        self._lost = lost
        self._strangers = strangers
        self._stranger: Stranger | None = None
        self._writes = writes if writes is not None else Writes()
        self._alarms = alarms if alarms is not None else Alarms()
        self.connection = connection  # connection, handler: what the bytes and the events mean
        self.handler = handler
        self.transport: asyncio.Transport | None = None  # asyncio's; None before it is there, and when it is gone
        self.peer = ""  # its address, for logs
        self.writable = True  # whether the write buffer is below its mark, and its reader's share
        self.lingering = False  # whether what the peer still sends is thrown away
        self._outgoing = outgoing
        self._unread: Unread | None = None  # while the reader is slow
        self._spawn = spawn
        self._clock = clock
        self._pauses: frozenset[str] = NOTHING  # most pumps never need one of their own; a set takes 216 bytes
        self._events: list[Any] | None = None  # that wait behind the session's own waiting; most pumps never have any
        self._ahead = 0  # bytes that may still be read meanwhile
        self._eof = False  # the peer has closed meanwhile
        self._rest = b""  # of a long read: bytes that wait for their turn, or for the end of a pause
        self._piece = PIECE  # bytes of a read that are taken at once, as much as was little work so far
        self._holding = False
        self.flushing = False  # whether a flush is to come: something was written in this turn of the loop
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None  # for a deadline that is near; others are among the alarms
        self._timer_at: float | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so
        self.transport = transport
        transport.set_write_buffer_limits(high=UNCOUNTED, low=LOW)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unknown"  # gone already
        if self._strangers is not None:
            self._stranger = self._strangers.enter(address_of(self.peer), self.abort)
            self._strangers = None
        try:
            self.handler.connected(self)
            self._dispatch(self.connection.tick(self._clock()))
            self.flush()
        except Exception as error:  # our bug: contained in this connection
            self.fail(error)

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

    def pause_writing(self) -> None:
        """The kernel takes no more: from now on what is unread is counted, and has its bounds."""
        self._unread = Unread(self._outgoing, WRITE_HIGH)
        self._count_unread(self._unread)

    def _count_unread(self, unread: Unread) -> None:
        if not unread.count(self.unwritten) and self.writable:
            self.writable = False
            pauses.begin(SLOW_READER, self, self.handler.subject)

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.count(0)
            self._unread = None
            pauses.end(SLOW_READER, self)

    def resume_writing(self) -> None:
        """The reader has caught up."""
        self._forget_unread()
        if not self.writable and not self._closed:
            self.writable = True
            try:
                self.handler.writable()
            except Exception as error:
                self.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        if self._closed:
            return
        try:
            self._take_rest()
        except Exception as error:
            self.fail(error)
        self._closed = True
        self._events = None
        self._disarm()
        self.identified()
        self._forget_unread()
        pauses.end_all(self, *NOTED)
        try:
            self.handler.disconnected(str(exc) if exc is not None else "closed")
        except Exception as error:
            self.fail(error)
        if self._lost is not None:
            self._lost(self)
        # Session and transport know the pump: were they kept here, all three would be left to the collector.
        self.handler, self.transport = NOBODY, None

    # the session's side

    @property
    def closed(self) -> bool:
        """Whether the socket is gone."""
        return self._closed

    def identified(self) -> None:
        """The peer has logged in, or is gone: what it sends counts elsewhere."""
        if self._stranger is not None:
            self._stranger.leave()
            self._stranger = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task of the application; its failure ends this connection."""
        task = self._spawn(work)
        task.add_done_callback(self._spawned_ended)
        return task

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:  # told at the door of tasks
            self.give_up()

    def fail(self, error: Exception) -> None:
        """Our bug, on this connection: it ends, with its protocol's close if that can be sent; the others live on."""
        failures.tell("connection", error, self.peer)
        self.give_up()

    def give_up(self) -> None:
        """Say that we cannot go on, and close. What failed may fail in this too: then it ends without a word."""
        transport = self.transport
        if transport is None or self._closed or self.lingering:
            self.abort()
            return
        try:
            self._events = None  # nothing is answered any more
            self.handler.handle(self.connection.give_up())
            transport.write(self.connection.data_to_send())
            self.close()
        except Exception as error:
            failures.tell("connection", error, self.peer)
            self.abort()

    def flush(self) -> None:
        """Write what the connection has to say, re-arm its timer, close it when it is done."""
        transport = self.transport
        if transport is None or self._closed:
            return
        data = self.connection.data_to_send()
        if data:
            transport.write(data)
            if self._unread is not None:
                self._count_unread(self._unread)
        if self.connection.closing:
            self.close()
            return
        # A deadline that moved back costs nothing here: the timer fires early once, asks again and is set anew.
        deadline = self.connection.next_deadline()
        if deadline is not None and (self._timer_at is None or deadline < self._timer_at):
            self._arm(deadline)

    def flush_soon(self) -> None:
        """Flush once at the end of this iteration of the event loop, or of a later one when there is much to write."""
        if not self.flushing:
            self.flushing = True
            self._writes.add(self)

    def flush_now(self) -> None:
        """The turn of a pump that waited: called by its `Writes`."""
        self.flushing = False
        try:
            self.flush()
        except Exception as error:
            self.fail(error)

    def wake(self) -> None:
        """The time that was asked for has come, or soon will: a timer's or an alarm's call."""
        self._disarm()
        if self._closed or self.lingering:
            return
        try:
            events = self.connection.tick(self._clock())
            if any(type(event) is ConnectionFailed for event in events):
                self._holding = False  # a peer that fell silent is not kept for the sake of our own waiting
                self._events = None
            self._dispatch(events)
            self.flush()
        except Exception as error:
            self.fail(error)

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
    def unwritten(self) -> int:
        """Bytes in the write buffer."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    @property
    def reading(self) -> bool:
        """Whether the socket is being read; what was read of it may be waiting for its turn."""
        return self._pauses <= IN_TURN

    def close(self) -> None:
        """Send what is queued, then close; what the peer still sends is read and thrown away for a moment.

        Closing a socket with unread input makes the kernel send a reset, which can destroy the last bytes on their way.
        """
        transport = self.transport
        if transport is None or self._closed or self.lingering:
            return
        self.lingering = True
        self._events = None
        self._disarm()
        if self._pauses:
            self._pauses = NOTHING
            transport.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, transport.close)
        else:
            transport.close()

    def abort(self) -> None:
        """Close at once; queued bytes are lost."""
        if self.transport is not None:
            self.transport.abort()

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

    def _arm(self, deadline: float) -> None:
        self._disarm()
        self._timer_at = deadline
        delay = deadline - self._clock()
        if delay < 2 * WIDTH_S:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, delay), self.wake)
        else:
            self._alarms.set(deadline, self)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif self._timer_at is not None:
            self._alarms.cancel(self._timer_at, self)
        self._timer_at = None
