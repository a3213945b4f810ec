"""Devices that know which of their connections is open."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Final

from aiokafka import AIOKafkaConsumer

from loadtest.clients.connection import Connection, join
from loadtest.clients.mqtt import DISCONNECT
from loadtest.clients.mqtt_wire import Splitter, connect_packet

ANSWER_S: Final = 15.0  # timeout of CONNACK
EXPIRY_S: Final = 600


class Socket(Connection):
    """One connection of a device.

    Attributes:
        address: of the client's end.
        server: the gateway's address.
        answered: CONNACK's reason code; None if the connection ended before.
        code: reason code of the server's DISCONNECT; None without one.
        closed_at: when it ended; None while it is open.
    """

    closing = DISCONNECT

    def __init__(self, greeting: bytes, server: tuple[str, int]) -> None:
        super().__init__()
        self.greeting = greeting
        self.address = ""
        self.server = server
        self.answered = self.promise()
        self.code: int | None = None
        self.closed_at: float | None = None
        self._splitter = Splitter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send CONNECT."""
        super().connection_made(transport)
        host, port = transport.get_extra_info("sockname")[:2]
        self.address = f"{host}:{port}"

    def data_received(self, data: bytes) -> None:
        """Handle CONNACK and DISCONNECT."""
        for first, body in self._splitter.feed(data):
            if first == 0x20 and not self.answered.done():
                self.answered.set_result(body[1])
            elif first == 0xE0:
                self.code = body[0] if body else 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the connection."""
        self.closed_at = time.monotonic()
        if not self.answered.done():
            self.answered.set_result(None)

    @property
    def is_served(self) -> bool:
        """Whether the client was accepted and the connection is open."""
        return self.closed_at is None and self.answered.done() and self.answered.result() == 0

    def end(self, *, properly: bool) -> None:
        """Close with DISCONNECT, or abort."""
        if self._transport is not None and self.closed_at is None:
            (self.close if properly else self.drop)()
            self.closed_at = time.monotonic()


class Device:
    """A client id and its connections; at most one is open in the end."""

    def __init__(self, client_id: str, *, kept: bool) -> None:
        self.client_id = client_id
        self.sockets: list[Socket] = []
        self.moves: list[tuple[Socket, float]] = []  # connections replaced by one at another gateway, and when
        self.busy = False
        self._greeting = connect_packet(
            client_id, clean_start=not kept, session_expiry_s=EXPIRY_S if kept else 0, keep_alive_s=0
        )

    @property
    def open(self) -> list[Socket]:
        """The open connections."""
        self.sockets = [one for one in self.sockets if one.closed_at is None]
        return [one for one in self.sockets if one.is_served]

    async def connect(self, address: tuple[str, int]) -> bool:
        """Connect, even if there is a connection; False if the gateway is down or refuses."""
        former = self.open
        socket = Socket(self._greeting, address)
        try:
            async with asyncio.timeout(ANSWER_S):
                accepted = await (await join(socket, address)).answered == 0
        except (OSError, TimeoutError):
            accepted = False
        if not accepted:
            socket.end(properly=False)
            return False
        self.sockets.append(socket)
        self.moves += [(one, time.monotonic()) for one in former if one.server != socket.server]
        return True


class PresenceTopic:
    """The presence topic as read by a plain consumer that compares epochs."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.right: dict[str, dict[str, Any]] = {}
        self.last: dict[str, dict[str, Any]] = {}
        self.records = self.stale = 0
        self._bootstrap = bootstrap
        self._name = name

    async def follow(self) -> None:
        """Read forever."""
        options = {"bootstrap_servers": self._bootstrap, "auto_offset_reset": "earliest"}
        async with AIOKafkaConsumer(self._name, **options) as consumer:
            async for record in consumer:
                self.take(record.key.decode(), json.loads(record.value or b"null"))

    def take(self, key: str, state: dict[str, Any] | None) -> None:
        """Take the state of a client, None for a deleted one."""
        self.records += 1
        if state is None:
            self.right.pop(key, None)
            self.last.pop(key, None)
            return
        self.last[key] = state
        if key in self.right and state["epoch"] < self.right[key]["epoch"]:
            self.stale += 1
        else:
            self.right[key] = state
