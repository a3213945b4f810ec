"""Traces: what one client, or all about one topic or from one address, and the gateway say to each other (ADR 0081).

A trace is bounded in time, lines, lines a second, connections, and bytes that its reader has not taken; what is beyond
is counted and told at its end. Nothing is done for it on connections that it is not about.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any, Final, Protocol

import msgspec

from flowcontrol.bucket import Bucket
from gateway.clients import Connected, is_meant
from gateway.net.pump import Pump
from gateway.security.throttle import host_of
from gateway.taps import taps
from gateway.trace.amqp import AmqpDecoder
from gateway.trace.http import HttpDecoder
from gateway.trace.mqtt import MqttDecoder, described
from gateway.trace.shown import Line
from gateway.trace.tapped import Tapped, TappedConnection, put_in, take_out
from gateway.trace.websocket import WebSocketDecoder
from gateway.turns import in_turns
from protocols.amqp.connection import Connection as AmqpConnection
from protocols.mqtt.connection import Connection as MqttConnection
from protocols.rest.live_connection import LiveConnection

AT_ONCE: Final = 8  # traces
LONGEST_S: Final = 600.0
MOST_LINES: Final = 10_000
RATE: Final = 1_000  # lines a second; a second's worth may come at once
UNREAD: Final = 1024 * 1024  # bytes of lines that wait for the reader
LARGEST_LINE: Final = 16 * 1024
CONNECTIONS: Final = 10_000
MOST_PAYLOAD: Final = 1024

CONSUMER: Final = "http/consumer/"

encode = msgspec.json.encode


class TraceError(Exception):
    """A trace that cannot be made; the text says why."""


class TooManyTracesError(TraceError):
    """Later it can."""


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which trace: one of the first three, and its bounds."""

    client: str = ""  # an id (`gateway.clients`)
    topic: str = ""  # of MQTT, or of Kafka; what is below it too
    address: str = ""  # `host` or `host:port`
    seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)] = 30.0
    lines: Annotated[int, msgspec.Meta(ge=1, le=MOST_LINES)] = MOST_LINES
    payload: Annotated[int, msgspec.Meta(ge=0, le=MOST_PAYLOAD)] = 64  # bytes of each that are shown

    def check(self) -> None:
        """TraceError: it is not one thing that is traced, or a thing that has no connection."""
        if sum(map(bool, (self.client, self.topic, self.address))) != 1:
            raise TraceError("one of client, topic and address is needed")
        if self.client.startswith(CONSUMER):
            raise TraceError("a consumer has no connection of its own: trace its client's address")


class Decoder(Protocol):
    """Finds what a protocol's bytes say on one connection."""

    def units(self, data: bytes, *, sent: bool) -> Iterator[Any]:
        """What is whole with these bytes: packets, frames, heads."""
        ...

    def concerns(self, unit: Any, topic: bytes) -> bool:
        """Whether it has to do with a topic."""
        ...

    def line(self, unit: Any, *, sent: bool) -> Line:
        """What is told of it."""
        ...


class _Tap:
    """A trace of one connection."""

    __slots__ = ("_decoder", "_topic", "_trace", "address", "client", "tapped")

    def __init__(self, trace: Trace, decoder: Decoder, client: str, address: str, topic: bytes) -> None:
        self._trace = trace
        self._decoder = decoder
        self._topic = topic
        self.client = client
        self.address = address
        self.tapped: Tapped | None = None

    def take(self, data: bytes, *, sent: bool) -> None:
        """See `gateway.trace.tapped.Tap`."""
        decoder, trace, topic = self._decoder, self._trace, self._topic
        for unit in decoder.units(data, sent=sent):
            if (not topic or decoder.concerns(unit, topic)) and trace.has_room():
                self.tell(decoder.line(unit, sent=sent), "out" if sent else "in")

    def tell(self, line: Line, direction: str = "") -> None:
        """Tell a line of this connection; `direction`: in from the client, out to it."""
        head = {"at": time.time(), "client": self.client, "address": self.address}
        self._trace.tell({**head, **({"dir": direction} if direction else {}), **line})


class Trace:
    """One trace; a `gateway.taps.Watcher`."""

    def __init__(self, wanted: Wanted) -> None:
        """Nothing is looked at before `begin`."""
        self._wanted = wanted
        self._topic = wanted.topic.encode("utf-8", "surrogatepass")
        self._taps: dict[Any, _Tap] = {}
        self._lines: deque[bytes] = deque()
        self._unread = 0
        self._told = 0
        self._dropped = 0
        self._left_out = 0
        self._connections = 0
        self._bucket = Bucket(RATE, RATE, time.monotonic())
        self._news = asyncio.Event()
        self._why = ""  # it is over

    # which connections

    def begin(self) -> None:
        """Look at who comes from now on."""
        taps.watchers = (*taps.watchers, self)

    def look_at(self, client: Connected) -> None:
        """Look at a connection that is there, if it is one of those."""
        socket = client.socket
        if socket is None or self._why:
            return
        wanted, identifier = self._wanted, client.identifier
        address = _peer(socket) or (client.view(whole=False).address if identifier else "")
        if wanted.client and not is_meant(wanted.client, identifier):
            return
        if wanted.address and not self._is_from(address):
            return
        self._add(socket, identifier, address, fresh=False)

    def opened(self, socket: Any) -> None:
        """See `gateway.taps.Watcher`; a client that is wanted by its id is known later, but for HTTP's."""
        address = _peer(socket)
        by_address = self._wanted.address and self._is_from(address)
        if self._topic or by_address or self._wanted.client == f"http/{address}":
            self._add(socket, "" if isinstance(socket, Pump) else f"http/{address}", address, fresh=True)

    def named(self, socket: Any, identifier: str) -> None:
        """See `gateway.taps.Watcher`."""
        tap = self._taps.get(socket)
        if tap is not None:
            tap.client = identifier
        elif self._wanted.client and is_meant(self._wanted.client, identifier):
            tap = self._add(socket, identifier, _peer(socket), fresh=False)
            connection = socket.connection.inner if tap is not None else None
            if tap is not None and isinstance(connection, MqttConnection) and connection.connect is not None:
                tap.tell(described(connection.connect, self._wanted.payload), "in")

    def closed(self, socket: Any, reason: str) -> None:
        """See `gateway.taps.Watcher`."""
        tap = self._taps.pop(socket, None)
        if tap is not None:
            if self.has_room():
                tap.tell({"connection": "closed", "reason": reason} if reason else {"connection": "closed"})
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
        tap.tapped = put_in(socket, tap)
        if tap.tapped is None:
            return None
        self._taps[socket] = tap
        self._connections += 1
        if not self._topic and self.has_room():
            tap.tell({"connection": "opened" if fresh else "traced"})
        return tap

    # its lines

    def has_room(self) -> bool:
        """Whether one more line may be told; counts one that may not."""
        if self._told >= self._wanted.lines:
            self.end("lines")
            return False
        if self._why or self._unread >= UNREAD or self._bucket.level(time.monotonic()) < 1:
            self._dropped += 1
            return False
        return True

    def tell(self, line: Line) -> None:
        """Tell a line; `has_room` has said yes."""
        data = encode(line)
        if len(data) > LARGEST_LINE:
            data = encode({name: line[name] for name in list(line)[:5]} | {"note": "too long to be shown"})
        self._bucket.spend(1, time.monotonic())
        self._told += 1
        self._lines.append(data + b"\n")
        self._unread += len(data)
        self._news.set()

    async def read(self, timeout: float) -> bytes | None:
        """The lines that wait, b"" when there are none for so long; None: it is over."""
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
        """Look at nothing any more: connections are as before. Without effect after the first time."""
        if self._why:
            return
        self._why = why
        self._news.set()
        taps.watchers = tuple(watcher for watcher in taps.watchers if watcher is not self)
        ended, self._taps = self._taps, {}
        in_turns(_all(ended))

    def summary(self) -> bytes:
        """The last line: why it is over, and what was not told."""
        counts = {"lines": self._told, "dropped": self._dropped, "connections": self._connections}
        left_out = {"connections_left_out": self._left_out} if self._left_out else {}
        return encode({"at": time.time(), "end": self._why, **counts, **left_out}) + b"\n"


def _all(ended: dict[Any, _Tap]) -> Iterator[None]:
    for socket, tap in ended.items():
        _end(socket, tap)
        yield


def _end(socket: Any, tap: _Tap) -> None:
    if tap.tapped is not None:
        take_out(socket, tap.tapped, tap)
        tap.tapped = None


def _peer(socket: Any) -> str:
    return str(getattr(socket, "peer", ""))


def _decoder(socket: Any, payload: int, *, fresh: bool) -> Decoder:
    """What understands a connection's bytes from here on."""
    if not isinstance(socket, Pump):
        return HttpDecoder(payload, streams=not hasattr(socket, "peer"))
    connection: Any = socket.connection
    if isinstance(connection, TappedConnection):
        connection = connection.inner
    if isinstance(connection, MqttConnection):
        return MqttDecoder(connection.version, connection.begun, payload)
    if isinstance(connection, AmqpConnection):
        return AmqpDecoder(payload, fresh=fresh)
    assert isinstance(connection, LiveConnection)
    return WebSocketDecoder(connection.frames, payload)


class Traces:
    """Those that go on."""

    def __init__(self) -> None:
        self._running: set[Trace] = set()

    def begin(self, wanted: Wanted) -> Trace:
        """A new one, which is to be ended by `end`; TraceError."""
        wanted.check()
        if len(self._running) >= AT_ONCE:
            raise TooManyTracesError(f"{AT_ONCE} traces are under way, which is the most: wait for the end of one")
        trace = Trace(wanted)
        self._running.add(trace)
        trace.begin()
        return trace

    def end(self, trace: Trace, why: str) -> None:
        """One is over."""
        trace.end(why)
        self._running.discard(trace)

    def stop(self) -> None:
        """The gateway stops: all are over."""
        for trace in tuple(self._running):
            self.end(trace, "the gateway stops")
