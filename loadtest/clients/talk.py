"""Plain connections whose packets are asked and awaited: MQTT by a packet's first byte, AMQP by its performative."""

from __future__ import annotations

import abc
import asyncio
import collections
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

from loadtest.beside import beside
from loadtest.clients import amqp_wire, mqtt_wire

CONNACK, PUBACK, PUBREC, PUBCOMP, SUBACK, PINGRESP, DISCONNECT = 0x20, 0x40, 0x50, 0x70, 0x90, 0xD0, 0xE0
WAIT_S: Final = 120.0
BATCH: Final = 200  # packets per write


class Talk(abc.ABC):
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._came: dict[int, collections.deque[Any]] = collections.defaultdict(collections.deque)

    @abc.abstractmethod
    def _split(self, data: bytes) -> Iterable[tuple[int, Any]]:
        """Return the kind and the content of each packet in these bytes."""

    @classmethod
    async def greet(cls, address: tuple[str, int], hello: bytes, kind: int, **options: Any) -> tuple[Self, Any]:
        """Connect, say hello, and return the connection and the answer; it is dropped if there is none."""
        talk = cls(*await asyncio.open_connection(*address, **options))
        try:
            (answer,) = await talk.ask([hello], kind)
        except BaseException:
            talk.drop()
            raise
        return talk, answer

    async def take(self, kind: int, count: int = 1) -> list[Any]:
        """Wait for packets of a kind, and return what they hold; others wait. ConnectionResetError at the end."""
        async with asyncio.timeout(WAIT_S):
            while len(self._came[kind]) < count:
                await self._read()
        return [self._came[kind].popleft() for _ in range(count)]

    async def first_of(self, kinds: Sequence[int]) -> Any:
        """Wait for a packet of one of these kinds, and return what it holds."""
        while not any(self._came[kind] for kind in kinds):
            await self._read()
        return next(self._came[kind].popleft() for kind in kinds if self._came[kind])

    async def _read(self) -> None:
        data = await self._reader.read(1 << 20)
        if not data:
            raise ConnectionResetError("the gateway closed the connection")
        for kind, content in self._split(data):
            self._came[kind].append(content)

    async def ask(self, packets: Sequence[bytes], kind: int) -> list[Any]:
        """Send packets and wait for an answer to each, concurrently as a client library does."""

        async def say() -> None:
            for first in range(0, len(packets), BATCH):
                self.writer.write(b"".join(packets[first : first + BATCH]))
                await self.writer.drain()

        async with beside(say()):
            return await self.take(kind, len(packets))

    def drop(self) -> None:
        """End the connection without any goodbye."""
        self.writer.transport.abort()


class MqttTalk(Talk):
    """An MQTT connection; an answer is a packet's body."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._splitter = mqtt_wire.Splitter()

    @classmethod
    async def open(cls, address: tuple[str, int], connect: bytes, **options: Any) -> Self:
        """Connect and wait for CONNACK; ConnectionRefusedError with its code, if it is none of success."""
        talk, body = await cls.greet(address, connect, CONNACK, **options)
        if body[1]:
            talk.drop()
            raise ConnectionRefusedError(f"0x{body[1]:02x}")
        return talk

    def _split(self, data: bytes) -> Iterable[tuple[int, Any]]:
        return self._splitter.feed(data)


class AmqpTalk(Talk):
    """An AMQP connection with one session; an answer is the list of a performative's fields."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._splitter = amqp_wire.Splitter()

    @classmethod
    async def open(cls, address: tuple[str, int], container: str) -> Self:
        """Connect, and open a session."""
        talk, _ = await cls.greet(address, amqp_wire.GREETING, amqp_wire.SASL_OUTCOME)
        talk.writer.write(amqp_wire.opening(container))
        return talk

    def _split(self, data: bytes) -> Iterable[tuple[int, Any]]:
        for body in self._splitter.feed(data):
            (code, fields), _ = amqp_wire.read_value(body, 0)
            yield code, fields


def reset(writer: asyncio.StreamWriter) -> None:
    """Have a connection's close be a reset."""
    own = writer.get_extra_info("socket")
    if own is not None and own.fileno() >= 0:  # the gateway may have closed already
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
