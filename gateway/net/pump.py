"""Drives a sans-io connection over an asyncio transport: reads, writes, runs its timers and closes it.

Each socket has one pump. A pump has no task: asyncio's callbacks call the pump, and the pump calls the session. Only a
session that must wait (for a password check, a topic look-up) uses a task. `ReadingHalf` has the reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, cast

from flowcontrol.budget import UNBOUNDED, UNCOUNTED, Budget
from gateway.net.alarms import WIDTH_S, Alarms
from gateway.net.proxied import ProxiedSource, certificate
from gateway.net.reading import NO_PAUSES, REPORTED, EventHandler, ReadingHalf
from gateway.net.strangers import Strangers
from gateway.net.unread import LOW, Unread
from gateway.net.writes import Writes
from gateway.runtime.failures import failures
from gateway.runtime.spawn import Spawn
from gateway.runtime.taps import taps
from gateway.security.entrance import Entrance
from gateway.security.throttle import address_of, peer_of
from gateway.views.pauses import SLOW_READER, pauses
from protocols.connection import Connection, ConnectionFailed

WRITE_HIGH: Final = 256 * 1024  # bytes of unsent data above which nothing more is sent, credit or not
LINGER_S: Final = 1.0  # how long input is drained after a close, so that no reset destroys our last bytes
UNREAD_S: Final = 30.0  # how long a closed peer may take to read its last bytes; over TLS uvloop has the same limit


class Handler(EventHandler, Protocol):
    """The session side of a pump."""

    def connected(self, pump: Pump) -> None:
        """The socket is open. Called once, before any event."""

    def writable(self) -> None:
        """The write buffer is below its low mark again: continue to send."""

    def disconnected(self, reason: str) -> None:
        """The socket is closed. Called once; no call follows."""


class _NoHandler:
    """The handler of a pump whose socket is closed."""

    def connected(self, pump: Pump) -> None: ...

    def handle(self, events: list[Any]) -> None: ...

    def writable(self) -> None: ...

    def disconnected(self, reason: str) -> None: ...

    subject = ""


NO_HANDLER: Final[Handler] = _NoHandler()


class Pump(ReadingHalf):
    """One socket with its sans-io connection and its session."""

    __slots__ = (
        "_alarms", "_lost", "_opened", "_outgoing", "_strangers", "_timer", "_timer_at", "_unread", "_writes",
        "entrance", "flushing", "peer", "source", "writable",
    )  # fmt: skip

    handler: Handler
    entrance: Entrance  # of the listener that accepted the socket; set before `connection_made`

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
        """Connect the parts. `lost` is called when the socket is closed, after the handler's `disconnected`.

        The pumps of one server share `writes` and `alarms`; with None this pump has its own. `strangers` counts
        received bytes until `identified`; None means that the peer has logged in. `outgoing` is the budget for data
        that slow peers have not read.
        """
        super().__init__(connection, handler, spawn, clock)
        self._lost = lost
        self._strangers = strangers
        self._writes = writes if writes is not None else Writes()
        self._alarms = alarms if alarms is not None else Alarms()
        self.peer = ""  # the peer's address, for logs
        self._opened = 0.0  # when the socket was opened, by the clock
        self.source: ProxiedSource | None = None  # see `gateway.net.proxied.Sourced`
        self.writable = True  # whether the write buffer is below its high mark and below the peer's share of the budget
        self._outgoing = outgoing
        self._unread: Unread | None = None  # while the peer reads slowly
        self.flushing = False  # whether a flush is scheduled
        self._timer: asyncio.TimerHandle | None = None  # for a near deadline; others use the alarms
        self._timer_at: float | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        transport = cast("asyncio.Transport", transport)  # uvloop's transport does not inherit from it
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
        except Exception as error:  # our bug: only this connection fails
            self.fail(error)

    def pause_writing(self) -> None:
        """The kernel's send buffer is full: count the unsent bytes from now on, and limit them."""
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
        """The peer has caught up with reading."""
        self._forget_unread()
        if not self.writable and not self._closed:
            self.writable = True
            try:
                self.handler.writable()
            except Exception as error:
                self.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed. The events of a client that has closed it while its session waits are handled first.

        Over TLS and WebSocket, nothing else keeps the socket open until then; see `eof_received`.
        """
        if self._closed:
            return
        if self._holding and exc is None and self._stranger is None and not self.lingering:
            self._eof = True
            self.writable = False
            self.transport = None
            return
        try:
            self._process_rest()
        except Exception as error:
            self.fail(error)
        self._closed = True
        if taps.watchers:
            taps.closed(self, str(exc) if exc is not None else "")
        self._events = None
        self._disarm()
        self.identified()
        self._forget_unread()
        pauses.end_all(self, *REPORTED)
        try:
            self.handler.disconnected(str(exc) if exc is not None else "closed")
        except Exception as error:
            self.fail(error)
        if self._lost is not None:
            self._lost(self)
        # Session and transport refer to the pump: without this the cycle would be left to the garbage collector.
        self.handler, self.transport = NO_HANDLER, None

    # the session's side

    @property
    def peercert(self) -> Mapping[str, Any] | None:
        """The client's verified certificate, in the form of `SSLObject.getpeercert`."""
        return certificate(self.source, self.transport)

    @property
    def closed(self) -> bool:
        """Whether the socket is closed."""
        return self._closed

    @property
    def age_s(self) -> float:
        """Seconds since the socket was opened."""
        return self._clock() - self._opened

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task of the application. If it fails, this connection is closed."""
        task = self._spawn(work)
        task.add_done_callback(self._spawned_ended)
        return task

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:  # `spawn` has logged it
            self.give_up()

    def fail(self, error: Exception) -> None:
        """Log our bug and close this connection, with its protocol's close if possible. Others are not affected."""
        failures.report("connection", error, self.peer)
        self.give_up()

    def give_up(self) -> None:
        """Send the protocol's close and close the socket; if that fails too, abort the socket."""
        transport = self.transport
        if transport is None or self._closed or self.lingering:
            self.abort()
            return
        try:
            self._events = None  # held events are dropped
            self.handler.handle(self.connection.give_up())
            transport.write(self.connection.data_to_send())
            self.close()
        except Exception as error:
            failures.report("connection", error, self.peer)
            self.abort()

    def flush(self) -> None:
        """Write what the connection has to send, re-arm its timer, and close the socket when it is closing."""
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
        # A deadline that moved to a later time needs nothing here: the timer fires early once and is set again.
        deadline = self.connection.next_deadline()
        if deadline is not None and (self._timer_at is None or deadline < self._timer_at):
            self._arm(deadline)

    def flush_soon(self) -> None:
        """Flush once at the end of this event loop iteration, or of a later one when many pumps have data."""
        if not self.flushing:
            self.flushing = True
            self._writes.add(self)

    def flush_now(self) -> None:
        """Flush a pump for which `flush_soon` was called. Called by `Writes`."""
        self.flushing = False
        try:
            self.flush()
        except Exception as error:
            self.fail(error)

    def wake(self) -> None:
        """The deadline is reached or near. Called by a timer or an alarm."""
        self._disarm()
        if self._closed or self.lingering:
            return
        try:
            events = self.connection.tick(self._clock())
            if any(type(event) is ConnectionFailed for event in events):
                self._holding = False  # a peer that timed out is closed even while the session waits
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
        """Send what is queued and half-close, then read and discard the peer's input for `LINGER_S` before closing.

        Closing a socket with unread input makes the kernel send a reset, which can destroy our last bytes in flight.
        """
        transport = self.transport
        if transport is None or self._closed or self.lingering:
            return
        self.lingering = True
        self._events = None
        self._disarm()
        if self._pauses:
            self._pauses = NO_PAUSES
            transport.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._end_linger, transport)
        else:
            transport.close()

    def _end_linger(self, transport: asyncio.Transport) -> None:
        """Close the socket, at the latest after `UNREAD_S`: a peer that reads nothing would keep it open for ever."""
        transport.close()
        self._timer = asyncio.get_running_loop().call_later(UNREAD_S, transport.abort)

    def abort(self) -> None:
        """Close immediately. Queued bytes are lost."""
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
