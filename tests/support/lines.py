"""A protocol of lines and a session that answers each line, to test the pump and its transports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import msgspec

from flowcontrol.budget import UNBOUNDED
from gateway.net.protocol_listener import ProtocolServer
from gateway.net.pump import Pump
from gateway.runtime.spawn import Spawn
from gateway.views.pauses import PROCESS_BUDGET
from protocols.connection import ConnectionFailed


class Lines:
    """A protocol of lines; `bye` closes it, and silence of `patience` seconds is a protocol error."""

    def __init__(self, patience: float | None = None) -> None:
        self.out = bytearray()
        self.closing = False
        self.now = 0.0
        self.heard = 0.0
        self.patience = patience
        self._buffer = b""

    def receive_data(self, data: bytes) -> list[Any]:
        self.heard = self.now
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return list(lines)

    def receive_eof(self) -> list[Any]:
        self.closing = True
        return [ConnectionFailed("eof", "")]

    def data_to_send(self) -> bytes:
        data, self.out = bytes(self.out), bytearray()
        return data

    def give_up(self) -> list[Any]:
        self.closing = True
        self.out += b"our fault\n"
        return [ConnectionFailed("our fault", "")]

    def next_deadline(self) -> float | None:
        return None if self.patience is None else self.heard + self.patience

    def tick(self, now: float) -> list[Any]:
        if not self.now:
            self.heard = now
        self.now = now
        deadline = self.next_deadline()
        if deadline is not None and now >= deadline and not self.closing:
            self.out += b"too quiet\n"
            self.closing = True
            return [ConnectionFailed("silent", "")]
        return []


class Echo:
    """Answers each line; `wait` holds later lines until `go` is set; `bye` closes; `boom` fails in a task.

    `full` pauses reading.
    """

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.go = asyncio.Event()
        self.seen: list[Any] = []
        self.gone: list[str] = []
        self.pump: Pump | None = None

    def connected(self, pump: Pump) -> None:
        self.pump = pump

    def handle(self, events: list[Any]) -> Awaitable[None] | None:
        for number, event in enumerate(events):
            self.seen.append(event)
            if event == b"wait":
                return self.hold(events[number + 1 :])
            if event == b"boom":
                return self.fail()
            if isinstance(event, bytes):
                self.lines.out += event + b"!\n"
            if event == b"full":
                assert self.pump is not None
                self.pump.pause_reading(PROCESS_BUDGET)
            if event == b"bye":
                self.lines.closing = True
                break
        return None

    async def hold(self, rest: list[Any]) -> None:
        await self.go.wait()
        self.handle(rest)

    async def fail(self) -> None:
        raise ArithmeticError("a bug of the session")

    def writable(self) -> None:
        self.seen.append("writable")

    def disconnected(self, reason: str) -> None:
        self.gone.append(reason)

    subject = "echo"


class EchoServer(ProtocolServer):
    """Serves connections of `Lines`, each with an `Echo`."""

    def __init__(self, spawn: Spawn, patience: float | None = None) -> None:
        super().__init__("mqtt", spawn, None, outgoing=UNBOUNDED)
        self.sessions: list[Echo] = []
        self._patience = patience

    def open(self) -> Any:
        lines = Lines(self._patience)
        self.sessions.append(Echo(lines))
        return lines, self.sessions[-1]

    def close_connections(self) -> None:
        """The pumps close the sockets."""

    def departing(self) -> tuple[()]:
        return ()

    def statistics(self) -> msgspec.Struct:
        raise NotImplementedError
