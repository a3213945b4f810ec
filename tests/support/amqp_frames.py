"""Hand-packed AMQP frames, and a socket client that sends them."""

from __future__ import annotations

import asyncio
import struct

DATA = b"\x00\x53\x75\xa0\x03abc"
"""A message of one Data section."""


class Frames:
    """A client's performatives, packed without the gateway's encoder so that its mistakes are not repeated."""

    NULL, TRUE, FALSE = b"\x40", b"\x41", b"\x42"

    @staticmethod
    def string(text: str) -> bytes:
        return b"\xa1" + bytes([len(text.encode())]) + text.encode()

    @staticmethod
    def symbol(text: str) -> bytes:
        return b"\xa3" + bytes([len(text)]) + text.encode()

    @staticmethod
    def uint(value: int) -> bytes:
        return b"\x70" + struct.pack(">I", value)

    @staticmethod
    def binary(value: bytes) -> bytes:
        return b"\xb0" + struct.pack(">I", len(value)) + value

    @staticmethod
    def listed(*items: bytes) -> bytes:
        body = b"".join(items)
        return b"\xd0" + struct.pack(">II", len(body) + 4, len(items)) + body

    @classmethod
    def performative(cls, code: int, *items: bytes) -> bytes:
        return b"\x00\x53" + bytes([code]) + cls.listed(*items)

    @staticmethod
    def frame(body: bytes, channel: int = 0, kind: int = 0) -> bytes:
        return struct.pack(">IBBH", len(body) + 8, 2, kind, channel) + body

    HEADER = b"AMQP\x00\x01\x00\x00"

    @classmethod
    def begin(cls) -> bytes:
        """Return header, open and begin in one buffer."""
        return (
            cls.HEADER
            + cls.frame(cls.performative(0x10, cls.string("scripted"), cls.string("localhost"), cls.uint(65536)))
            + cls.frame(cls.performative(0x11, cls.NULL, b"\x43", cls.uint(1 << 20), cls.uint(1 << 20)))
        )

    @classmethod
    def attach(
        cls, name: str = "s", handle: int = 0, *, sending: bool = True, address: str = "t", coordinator: bool = False
    ) -> bytes:
        return cls.frame(
            cls.performative(
                0x12,
                cls.string(name),
                cls.uint(handle),
                cls.FALSE if sending else cls.TRUE,
                cls.NULL,
                cls.NULL,
                b"\x00\x53\x28" + cls.listed(cls.string(address)),
                b"\x00\x53\x30\x45" if coordinator else b"\x00\x53\x29" + cls.listed(cls.string(address)),
                cls.NULL,
                cls.NULL,
                b"\x43" if sending else cls.NULL,
            )
        )

    @classmethod
    def transfer(
        cls,
        number: int,
        payload: bytes,
        *,
        tag: bytes | None = None,
        more: bool = False,
        settled: bool = False,
        aborted: bool = False,
        handle: int = 0,
        first: bool = True,
        state: bytes = NULL,
    ) -> bytes:
        items = [
            cls.uint(handle),
            cls.uint(number) if first else cls.NULL,
            cls.binary(tag if tag is not None else b"t%d" % number) if first else cls.NULL,
            b"\x43" if first else cls.NULL,
            cls.TRUE if settled else cls.FALSE,
            cls.TRUE if more else cls.FALSE,
            cls.NULL,
            state,
            cls.NULL,
            cls.TRUE if aborted else cls.FALSE,
        ]
        return cls.frame(cls.performative(0x14, *items) + payload)

    @staticmethod
    def parse(data: bytes) -> list[tuple[int, bytes]]:
        """Return (descriptor, frame body) of each frame in a server's answer, without protocol headers."""
        found: list[tuple[int, bytes]] = []
        at = 0
        while at < len(data):
            if data[at : at + 4] == b"AMQP":
                at += 8
                continue
            size = struct.unpack_from(">I", data, at)[0]
            if size > 8:
                body = data[at + data[at + 4] * 4 : at + size]
                found.append((body[2], body))
            at += size
        return found


class WireClient:
    """A client that sends the frames of a test, and reads the gateway's one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> WireClient:
        """Connect a socket without sending anything."""
        return cls(*await asyncio.open_connection(*address))

    def say(self, data: bytes) -> None:
        """Write."""
        self._writer.write(data)

    async def header(self) -> bytes:
        """The next protocol header."""
        return await self._reader.readexactly(8)

    async def frame(self, *, empty: bool = False) -> tuple[int, bytes]:
        """Return the next frame as (descriptor, body); `empty` also returns empty frames, as (0, b"")."""
        while True:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            rest = await self._reader.readexactly(size - 4)
            body = rest[(rest[0] - 1) * 4 :]
            if body or empty:
                return (body[2] if body else 0), body

    async def until(self, code: int) -> bytes:
        """Skip to the next frame with this descriptor and return its body."""
        while True:
            found, body = await self.frame()
            if found == code:
                return body

    async def end(self) -> bytes:
        """Read until the connection is closed."""
        return await self._reader.read()

    async def close(self) -> None:
        """Close the socket."""
        self._writer.close()
        await self._writer.wait_closed()
