"""Connections that say what they must to be served, and are silent then: cheap, so that there can be 50,000."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from loadtest.clients import amqp_wire, mqtt_wire
from loadtest.clients.connection import Connection, join

LIMIT_S: Final = 60.0
_UPGRADE: Final = (
    "GET /{0} HTTP/1.1\r\nHost: gateway\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: {0}\r\n\r\n"
)


class Step(NamedTuple):
    """Bytes to send, and the kinds of packet to wait for: first bytes of MQTT, performatives of AMQP."""

    data: bytes
    wanted: Sequence[int] = ()


class Opening(Connection):
    """Takes its steps one after the other; `done` is set after the last one."""

    def __init__(self, protocol: str, steps: Sequence[Step], *, websocket: bool = False) -> None:
        super().__init__()
        self.done = self.promise()
        self._protocol = protocol
        self._steps = list(steps)
        self._wanted: list[int] = []
        self._websocket = websocket
        self._upgraded = not websocket
        self._buffer = b""
        self._splitter: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Request the WebSocket, or take the first step."""
        super().connection_made(transport)
        self._splitter = mqtt_wire.Splitter() if self._protocol == "mqtt" else amqp_wire.Splitter()
        if self._upgraded:
            self._go_on()
        else:
            super().write(_UPGRADE.format(self._protocol).encode())

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes, in a WebSocket in one message; a mask of zeros changes nothing (RFC 6455, 5.3)."""
        if self._websocket and data:
            size = bytes((0x80 | len(data),)) if len(data) < 126 else b"\xfe" + struct.pack(">H", len(data))
            data = b"\x82" + size + bytes(4) + data
        super().write(data)

    def data_received(self, data: bytes) -> None:
        """Handle the upgrade's response, then packets."""
        if self._splitter is None:  # PINGRESP: it is open
            return
        if not self._upgraded:
            self._buffer += data
            head, end, data = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            if b" 101 " not in head:
                self.fail(ConnectionRefusedError(head.decode(errors="replace")))
                return
            self._upgraded, self._buffer = True, b""
            self._go_on()
        for kind, refused in self._packets(self._messages(data) if self._websocket else data):
            if refused:
                self.fail(ConnectionRefusedError(f"packet 0x{kind:02x}"))
            elif self._wanted and kind == self._wanted[0]:
                self._wanted.pop(0)
                if not self._wanted:
                    self._go_on()

    def _packets(self, data: bytes) -> Iterable[tuple[int, bool]]:
        """Return each packet's kind, and whether it refuses."""
        if self._protocol == "mqtt":
            for first, body in self._splitter.feed(data):
                yield first, first == 0x20 and body[1] > 0
            return
        for frame in self._splitter.feed(data):
            (code, _), _ = amqp_wire.read_value(frame, 0)
            yield code, code in (amqp_wire.DETACH, amqp_wire.END, amqp_wire.CLOSE)

    def _messages(self, data: bytes) -> bytes:
        """Return the content of complete WebSocket messages."""
        buffer, out = self._buffer + data, bytearray()
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

    def _go_on(self) -> None:
        """Take the next steps, up to one that waits."""
        while self._steps and not self._wanted:
            step = self._steps.pop(0)
            self._wanted = list(step.wanted)
            self.write(step.data)
        if not self._wanted and not self.done.done():
            self.done.set_result(None)
            self._splitter = None


async def opened(opening: Opening, address: tuple[str, int], **options: Any) -> Opening:
    """Connect, and wait until it is open; `options` are those of `create_connection`."""
    async with asyncio.timeout(LIMIT_S):
        await join(opening, address, **options)
        await opening.done
    return opening
