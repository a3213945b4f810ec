"""Scenario `memory --protocol amqp`: measures the gateway's resident memory per idle AMQP connection.

All connections of all kinds stay open to the end, so that none reuses the freed memory of another.
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

from loadtest.beside import AT_ONCE, in_turn
from loadtest.clients.amqp_wire import (
    ATTACH,
    BEGIN,
    CLOSE,
    GREETING,
    SASL_OUTCOME,
    Splitter,
    attach_receiver,
    attach_sender,
    credit,
    opening,
    read_value,
)
from loadtest.clients.joining import join
from loadtest.clients.topics import create_topic
from loadtest.gateway import process_resident
from loadtest.numbering import Numbering
from loadtest.scenarios.memory import STEP_S, Scales

SETTINGS: Final = {"TRIVIUM_AMQP__IDLE_TIMEOUT_S": "1800"}
"""The gateway's settings: the connections are silent while they are measured."""

_UPGRADE: Final = (
    b"GET /amqp HTTP/1.1\r\nHost: gateway\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: amqp\r\n\r\n"
)


class Crowd(NamedTuple):
    """The number of connections of each kind; `settle` is the pause in seconds before a measurement.

    `warm_up` connections of each kind are opened before the first measurement, `at_once` at the same time.
    """

    connections: int = 2_000
    settle: float = 2.0
    warm_up: int = 300
    at_once: int = AT_ONCE


class Kind(NamedTuple):
    """A kind of connection: the link it attaches, and whether it uses a WebSocket."""

    name: str
    attach: Callable[[str], bytes] | None
    receives: bool = False
    websocket: bool = False


class Idle(asyncio.Protocol):
    """Opens a connection with a session and at most one link, and is silent afterwards.

    `done` is set after the last response.
    """

    def __init__(self, container: str, attach: bytes, kind: Kind) -> None:
        self._container = container
        self._attach = attach
        self._kind = kind
        self._splitter = Splitter()
        self._upgraded = not kind.websocket
        self._buffer = b""
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Request the WebSocket, or start AMQP."""
        self.transport = cast("asyncio.Transport", transport)
        if self._upgraded:
            self._write(GREETING)
        else:
            self.transport.write(_UPGRADE)

    def _write(self, data: bytes) -> None:
        assert self.transport is not None
        if self._kind.websocket:  # one binary message; a mask of zeros changes nothing (RFC 6455, 5.3)
            size = bytes((0x80 | len(data),)) if len(data) < 126 else b"\xfe" + struct.pack(">H", len(data))
            data = b"\x82" + size + bytes(4) + data
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Handle the upgrade response, messages and frames."""
        if not self._upgraded:
            self._buffer += data
            head, end, data = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            if b" 101 " not in head:
                self._end(ConnectionRefusedError(head.decode(errors="replace")))
                return
            self._upgraded, self._buffer = True, b""
            self._write(GREETING)
        for frame in self._splitter.feed(self._messages(data) if self._kind.websocket else data):
            (code, fields), _ = read_value(frame, 0)
            self._received(code, fields)

    def _messages(self, data: bytes) -> bytes:
        """Return the content of complete WebSocket messages."""
        buffer = self._buffer + data
        out = bytearray()
        while len(buffer) >= 4:
            size, at = buffer[1], 2
            if size == 126:
                size, at = struct.unpack_from(">H", buffer, 2)[0], 4
            if len(buffer) < at + size:
                break
            out += buffer[at : at + size]
            buffer = buffer[at + size :]
        self._buffer = buffer
        return bytes(out)

    def _received(self, code: int, fields: list[Any]) -> None:
        if code == SASL_OUTCOME:
            self._write(opening(self._container) + self._attach)
        elif code == ATTACH or (code == BEGIN and not self._attach):
            if self._kind.receives:
                self._write(credit(0, 0, 100))
            self._end(None)
        elif ATTACH < code <= CLOSE and fields and isinstance(fields[-1], tuple):
            self._end(ConnectionAbortedError(f"the gateway said 0x{code:02x}: {fields}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail `done`, if it is pending."""
        self._end(exc or ConnectionResetError("closed too early"))

    def _end(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


async def weigh_amqp(
    gateway: Scales, http: tuple[str, int], crowd: Crowd, say: Callable[[str], None]
) -> dict[str, float]:
    """Return the bytes per connection by kind.

    Args:
        gateway: the gateway, with its AMQP address, started with `SETTINGS` after `allow_files`.
        http: the address of its WebSockets.
        crowd: the number of connections.
        say: called with each figure.
    """
    run = Numbering().run
    topic = f"memory-{run}"
    await create_topic(gateway.kafka, topic)
    opened: list[Idle] = []

    def sending(container: str) -> bytes:
        return attach_sender("idle", container, topic)

    def receiving(container: str) -> bytes:
        return attach_receiver("idle", container, topic)

    async def connect(kind: Kind, number: int) -> None:
        container = f"{run}-{kind.name}-{number}"
        idle = Idle(container, kind.attach(container) if kind.attach else b"", kind)
        async with asyncio.timeout(STEP_S):
            await (await join(idle, http if kind.websocket else gateway.address)).done
        opened.append(idle)

    kinds = (
        Kind("session alone", None),
        Kind("session and sender", sending),
        Kind("session and receiver", receiving, receives=True),
        Kind("session and sender, WebSocket", sending, websocket=True),
    )
    found: dict[str, float] = {}
    try:
        for kind in kinds:
            await in_turn(range(crowd.warm_up), functools.partial(connect, kind), crowd.at_once)
        for kind in kinds:
            await asyncio.sleep(crowd.settle)
            before = process_resident(gateway.pid)
            await in_turn(
                range(crowd.warm_up, crowd.warm_up + crowd.connections), functools.partial(connect, kind), crowd.at_once
            )
            await asyncio.sleep(crowd.settle)
            found[kind.name] = (process_resident(gateway.pid) - before) / max(1, crowd.connections)
            say(f"{kind.name}: {found[kind.name]:.0f} bytes")
    finally:
        for idle in opened:
            if idle.transport is not None:
                idle.transport.abort()
    return found
