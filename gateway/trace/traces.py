"""Traces of the traffic of one client, one topic or one address (ADR 0081).

A trace is bounded in time, lines, lines a second, connections, and bytes that its reader has not read. What exceeds the
bounds is counted and reported at the end. Connections that are not traced have no overhead.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any, Final, Protocol

import msgspec

from flowcontrol.bucket import Bucket
from gateway.net.pump import Pump
from gateway.runtime.taps import taps
from gateway.runtime.turns import in_turns
from gateway.security.throttle import host_of
from gateway.trace.amqp import AmqpDecoder
from gateway.trace.http import HttpDecoder
from gateway.trace.mqtt import MqttDecoder, described
from gateway.trace.shown import Line
from gateway.trace.streams import EventDecoder, WebSocketDecoder
from gateway.trace.tapped import Tapped, TappedConnection, install_tap, remove_tap
from gateway.views.clients import Connected, matches_id
from protocols.amqp.connection import Connection as AmqpConnection
from protocols.mqtt.connection import Connection as MqttConnection
from protocols.rest.streams.event_connection import EventConnection

AT_ONCE: Final = 8  # traces
LONGEST_S: Final = 600.0
MOST_LINES: Final = 10_000
RATE: Final = 1_000  # lines a second; the burst is one second's worth
UNREAD: Final = 1024 * 1024  # bytes of lines waiting for the reader
LARGEST_LINE: Final = 16 * 1024
CONNECTIONS: Final = 10_000
MOST_PAYLOAD: Final = 1024

CONSUMER: Final = "http/consumer/"

encode = msgspec.json.encode


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A requested trace: exactly one of the first three fields, and the bounds."""

    client: str = ""  # an id (`gateway.views.clients`)
    topic: str = ""  # an MQTT or Kafka topic; includes the topics below it
    address: str = ""  # `host` or `host:port`
    seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)] = 30.0
    lines: Annotated[int, msgspec.Meta(ge=1, le=MOST_LINES)] = MOST_LINES
    payload: Annotated[int, msgspec.Meta(ge=0, le=MOST_PAYLOAD)] = 64  # bytes shown of each payload

    def __post_init__(self) -> None:
        """Raise ValueError if not exactly one object is named, or one without its own connection."""
        if sum(map(bool, (self.client, self.topic, self.address))) != 1:
            raise ValueError("exactly one of client, topic and address is needed")
        if self.client.startswith(CONSUMER):
            raise ValueError("a consumer has no connection: trace its client's address")


class TraceDecoder(Protocol):
    """Decodes the bytes of one connection."""

    def units(self, data: bytes, *, sent: bool) -> Iterator[Any]:
        """Yield the units (packets, frames, heads) that are complete with these bytes."""
        ...

    def concerns(self, unit: Any, topic: bytes) -> bool:
        """Return whether a unit concerns a topic."""
        ...

    def line(self, unit: Any, *, sent: bool) -> Line:
        """Return the unit's trace line."""
        ...


class _Tap:
    """One trace's tap on one connection."""

    __slots__ = ("_decoder", "_topic", "_trace", "address", "client", "tapped")

    def __init__(self, trace: Trace, decoder: TraceDecoder, client: str, address: str, topic: bytes) -> None:
        self._trace = trace
        self._decoder = decoder
        self._topic = topic
        self.client = client
        self.address = address
        self.tapped: Tapped | None = None

    def take(self, data: bytes, *, sent: bool) -> None:
        """Show the units of a read or a write that the trace is for."""
        decoder, trace, topic = self._decoder, self._trace, self._topic
        for unit in decoder.units(data, sent=sent):
            if (not topic or decoder.concerns(unit, topic)) and trace.has_room():
                self.add(decoder.line(unit, sent=sent), "out" if sent else "in")

    def add(self, line: Line, direction: str = "") -> None:
        """Add a line about this connection. `direction` is "in" (from the client) or "out"."""
        head = {"at": time.time(), "client": self.client, "address": self.address}
        self._trace.add({**head, **({"dir": direction} if direction else {}), **line})


class Trace:
    """One trace; a `gateway.runtime.taps.Watcher`."""

    def __init__(self, wanted: TraceRequest) -> None:
        """Prepare a trace; `begin` starts it, and whoever calls that must call `end`."""
        self._wanted = wanted
        self._topic = wanted.topic.encode("utf-8", "surrogatepass")
        self._taps: dict[Any, _Tap] = {}
        self._lines: deque[bytes] = deque()
        self._unread = 0
        self._written = 0
        self._dropped = 0
        self._left_out = 0
        self._connections = 0
        self._bucket = Bucket(RATE, RATE, time.monotonic())
        self._news = asyncio.Event()
        self._why = ""  # why the trace has ended

    # which connections

    def begin(self) -> None:
        """Start watching new connections."""
        taps.watchers = (*taps.watchers, self)

    def attach(self, client: Connected) -> None:
        """Trace an existing connection if it matches."""
        socket = client.socket
        if socket is None or self._why:
            return
        wanted, identifier = self._wanted, client.identifier
        if wanted.client and not matches_id(wanted.client, identifier):
            return
        if wanted.address and not self._is_from(socket.peer):
            return
        self._add(socket, identifier, socket.peer, fresh=False)

    def opened(self, socket: Any) -> None:
        """Trace a new connection that a trace is for. Except for HTTP, a client's id is known only later (`named`)."""
        address = socket.peer
        by_address = self._wanted.address and self._is_from(address)
        if self._topic or by_address or self._wanted.client == f"http/{address}":
            connection = socket.connection if isinstance(socket, Pump) else None
            logs_in = isinstance(connection, MqttConnection | AmqpConnection)
            self._add(socket, "" if logs_in else f"http/{address}", address, fresh=True)

    def named(self, socket: Any, identifier: str) -> None:
        """Note the client's id, and trace the connection if a trace is for it."""
        tap = self._taps.get(socket)
        if tap is not None:
            tap.client = identifier
        elif self._wanted.client and matches_id(self._wanted.client, identifier):
            tap = self._add(socket, identifier, socket.peer, fresh=False)
            connection = socket.connection.inner if tap is not None else None
            if tap is not None and isinstance(connection, MqttConnection) and connection.connect is not None:
                tap.add(described(connection.connect, self._wanted.payload), "in")

    def closed(self, socket: Any, reason: str) -> None:
        """End the tap of a closed connection with a last line."""
        tap = self._taps.pop(socket, None)
        if tap is not None:
            if self.has_room():
                tap.add({"connection": "closed", "reason": reason} if reason else {"connection": "closed"})
            _end(socket, tap)

    def _is_from(self, address: str) -> bool:
        return self._wanted.address in {address, host_of(address)}

    def _add(self, socket: Any, identifier: str, address: str, *, fresh: bool) -> _Tap | None:
        if self._why or socket in self._taps:
            return None
        if len(self._taps) >= CONNECTIONS:
            self._left_out += 1
            return None
        decoder = _decoder(socket, self._wanted.payload, fresh=fresh)
        tap = _Tap(self, decoder, identifier, address, self._topic)
        tap.tapped = install_tap(socket, tap)
        if tap.tapped is None:
            return None
        self._taps[socket] = tap
        self._connections += 1
        if not self._topic and self.has_room():
            tap.add({"connection": "opened" if fresh else "traced"})
        return tap

    # its lines

    def has_room(self) -> bool:
        """Return whether one more line may be added; counts a line that may not."""
        if self._written >= self._wanted.lines:
            self.end("lines")
            return False
        if self._why or self._unread >= UNREAD or self._bucket.level(time.monotonic()) < 1:
            self._dropped += 1
            return False
        return True

    def add(self, line: Line) -> None:
        """Add a line after `has_room` has returned True."""
        data = encode(line)
        if len(data) > LARGEST_LINE:
            data = encode({name: line[name] for name in list(line)[:5]} | {"note": "too long to be shown"})
        self._bucket.spend(1, time.monotonic())
        self._written += 1
        self._lines.append(data + b"\n")
        self._unread += len(data)
        self._news.set()

    async def read(self, timeout: float) -> bytes | None:
        """Return the waiting lines, b"" if none came within the time-out, or None at the end of the trace."""
        if not self._lines and not self._why:
            try:
                await asyncio.wait_for(self._news.wait(), timeout)
            except TimeoutError:
                return b""
        self._news.clear()
        if not self._lines:
            return None if self._why else b""
        data = b"".join(self._lines)
        self._lines.clear()
        self._unread = 0
        return data

    # its end

    def end(self, why: str) -> None:
        """Stop tracing and remove all taps. Only the first call has an effect."""
        if self._why:
            return
        self._why = why
        self._news.set()
        taps.watchers = tuple(watcher for watcher in taps.watchers if watcher is not self)
        ended, self._taps = self._taps, {}
        in_turns(itertools.starmap(_end, ended.items()))

    def summary(self) -> bytes:
        """Return the last line: why the trace ended, and what was left out."""
        counts = {"lines": self._written, "dropped": self._dropped, "connections": self._connections}
        left_out = {"connections_left_out": self._left_out} if self._left_out else {}
        return encode({"at": time.time(), "end": self._why, **counts, **left_out}) + b"\n"


def _end(socket: Any, tap: _Tap) -> None:
    if tap.tapped is not None:
        remove_tap(socket, tap.tapped, tap)
        tap.tapped = None


def _decoder(socket: Any, payload: int, *, fresh: bool) -> TraceDecoder:
    """Return a decoder for a connection's bytes from here on."""
    if not isinstance(socket, Pump):
        return HttpDecoder()
    connection: Any = socket.connection
    if isinstance(connection, TappedConnection):
        connection = connection.inner
    if isinstance(connection, MqttConnection):
        return MqttDecoder(connection.version, connection.unparsed, payload)
    if isinstance(connection, AmqpConnection):
        return AmqpDecoder(payload, fresh=fresh)
    if isinstance(connection, EventConnection):
        return EventDecoder(payload)
    return WebSocketDecoder(connection.frames, payload)  # a live WebSocket, an optional part itself
