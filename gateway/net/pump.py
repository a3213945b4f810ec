"""Drives any sans-io connection over an asyncio transport: reads, writes, tells the time, closes.

One pump is one socket. It holds no task: asyncio's callbacks call it, and it calls the session. Only a session's
own waiting (a password check, a topic look-up) is a task. How it reads is its `ReadingHalf`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, cast

from flowcontrol.budget import UNBOUNDED, UNCOUNTED, Budget
from gateway.clients import ClientView, Connected
from gateway.failures import failures
from gateway.net.alarms import WIDTH_S, Alarms
from gateway.net.proxied import Source, certificate
from gateway.net.reading import NOTED, NOTHING, EventHandler, ReadingHalf
from gateway.net.strangers import Strangers
from gateway.net.unread import LOW, Unread
from gateway.net.writes import Writes
from gateway.pauses import SLOW_READER, pauses
from gateway.security.entrance import Entrance
from gateway.security.throttle import address_of, peer_of
from gateway.spawn import Spawn
from gateway.taps import taps
from protocols.connection import Connection, ConnectionFailed

WRITE_HIGH: Final = 256 * 1024  # stop producing above it, credit or not (flow control, part 2)
LINGER_S: Final = 1.0  # how long a closed connection is drained, so that its last bytes are not lost in a reset


class Handler(EventHandler, Connected, Protocol):
    """What a session does with a connection's events."""

    def connected(self, pump: Pump) -> None:
        """The socket is open; called once, before any event."""

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
    identifier = ""
    principal = None
    socket = None

    def flow(self) -> None: ...

    def view(self, *, whole: bool) -> ClientView:
        raise AssertionError("nobody is asked who is gone")

    def kick(self) -> None: ...


NOBODY: Final[Handler] = _Nobody()


class Pump(ReadingHalf):
    """One socket with one sans-io connection and the session that gives it meaning."""

    __slots__ = (
        "_alarms", "_lost", "_opened", "_outgoing", "_strangers", "_timer", "_timer_at", "_unread", "_writes",
        "entrance", "flushing", "peer", "source", "writable",
    )  # fmt: skip

    handler: Handler
    entrance: Entrance  # the listener that it came through; set before `connection_made`

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
        super().__init__(connection, handler, spawn, clock)
        self._lost = lost
        self._strangers = strangers
        self._writes = writes if writes is not None else Writes()
        self._alarms = alarms if alarms is not None else Alarms()
        self.peer = ""  # its address, for logs
        self._opened = 0.0  # when, by the clock
        self.source: Source | None = None  # see `gateway.net.proxied.Sourced`
        self.writable = True  # whether the write buffer is below its mark, and its reader's share
        self._outgoing = outgoing
        self._unread: Unread | None = None  # while the reader is slow
        self.flushing = False  # whether a flush is to come: something was written in this turn of the loop
        self._timer: asyncio.TimerHandle | None = None  # for a deadline that is near; others are among the alarms
        self._timer_at: float | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so
        self.transport = transport
        transport.set_write_buffer_limits(high=UNCOUNTED, low=LOW)
        peer = transport.get_extra_info("peername") if self.source is None else self.source.peername
        self.peer = peer_of(peer)
        if self._strangers is not None:
            self._stranger = self._strangers.enter(address_of(self.peer), self.abort)
            self._strangers = None
        if taps.watchers:
            taps.opened(self)
        now = self._opened = self._clock()
        try:
            self.handler.connected(self)
            self._dispatch(self.connection.tick(now))
            self.flush()
        except Exception as error:  # our bug: contained in this connection
            self.fail(error)

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
        if taps.watchers:
            taps.closed(self, str(exc) if exc is not None else "")
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
    def peercert(self) -> Mapping[str, Any] | None:
        """What is known of the client's verified certificate, as of `SSLObject.getpeercert`."""
        return certificate(self.source, self.transport)

    @property
    def closed(self) -> bool:
        """Whether the socket is gone."""
        return self._closed

    @property
    def age_s(self) -> float:
        """For how long the socket has been open."""
        return self._clock() - self._opened

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

    @property
    def unwritten(self) -> int:
        """Bytes in the write buffer."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

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
