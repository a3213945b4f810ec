"""Two peers for the engine: proton itself, joined in memory, and a script of hand-packed frames."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from proton import Collector, Event, Transport
from proton import Connection as ProtonConnection

from protocols.amqp.connection import Connection
from protocols.amqp.endpoints import Limits
from protocols.amqp.events import ConnectionOpened, LinkRequested, SaslInitReceived
from protocols.amqp.links import Link
from protocols.amqp.sasl import SaslCode

Split = Callable[[bytes], Iterable[bytes]]


class Server:
    """Our side with the least of a session: log everybody in, accept every link, remember the events."""

    def __init__(self, *, credit: int = 10, limit: int = 1000, limits: Limits | None = None, **options: Any) -> None:
        self.connection = Connection("server", limits or Limits(), **options)
        self.connection.tick(1000.0)
        self.events: list[Any] = []
        self.links: dict[str, Link] = {}
        self.credit = credit
        self.limit = limit
        self.answers = True
        self.on_event: Callable[[Any], None] = lambda event: None

    @property
    def engine(self) -> Any:
        return self.connection.engine

    def feed(self, data: bytes) -> list[Any]:
        events = self.connection.receive_data(data)
        self.take(events)
        return events

    def take(self, events: list[Any]) -> None:
        for event in events:
            self.events.append(event)
            if not self.answers:
                continue
            match event:
                case SaslInitReceived():
                    self.take(self.connection.sasl_outcome(SaslCode.OK))
                case ConnectionOpened():
                    self.connection.open((), (("product", "test"),))
                case LinkRequested(link=link):
                    self.links[link.name] = link
                    self.engine.accept_link(link, max_message_bytes=self.limit)
                    if link.incoming:
                        self.engine.grant(link, self.credit)
            self.on_event(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class ProtonPeer:
    """proton as the client of a `Server`, in memory; its bytes may be split anywhere."""

    def __init__(self, server: Server, split: Split | None = None, *, sasl: str | None = "ANONYMOUS") -> None:
        self.server = server
        self.split = split or (lambda data: (data,))
        self.connection = ProtonConnection()
        self.collector = Collector()
        self.connection.collect(self.collector)
        self.connection.container = "client"
        self.transport = Transport()
        if sasl is not None:
            self.transport.sasl().allowed_mechs(sasl)
        self.transport.bind(self.connection)
        self.received: list[bytes] = []
        self.deliveries: list[Any] = []  # beside `received`
        self.outcomes: list[tuple[str, int]] = []
        self.answer: int | None = None
        self.from_server = bytearray()
        self.to_server = bytearray()

    def open(self) -> Any:
        self.connection.open()
        session = self.connection.session()
        session.open()
        self.run()
        return session

    def run(self) -> None:
        """Exchange bytes until both are quiet."""
        while True:
            moved = 0
            while (size := self.transport.pending()) > 0:
                data = bytes(self.transport.peek(size))
                self.transport.pop(size)
                self.to_server += data
                moved += size
                for part in self.split(data):
                    self.server.feed(part)
            data = self.server.connection.data_to_send()
            self.from_server += data
            moved += len(data)
            while data and (room := self.transport.capacity()) > 0:
                self.transport.push(data[:room])
                data = data[room:]
            self._drain()
            if not moved:
                return

    def _drain(self) -> None:
        while (event := self.collector.peek()) is not None:
            if event.type is Event.DELIVERY:
                delivery = event.delivery
                if delivery.link.is_receiver and delivery.readable and not delivery.partial:
                    self.received.append(bytes(delivery.link.recv(1 << 24) or b""))
                    self.deliveries.append(delivery)
                    delivery.link.advance()
                    if self.answer is not None:
                        delivery.update(self.answer)
                        delivery.settle()
                elif delivery.link.is_sender and delivery.settled:
                    self.outcomes.append((delivery.tag, int(delivery.remote_state)))
                    delivery.settle()
            self.collector.pop()


class Frames:
    """A client by hand: performatives packed here, so that a mistake of ours is not made twice."""

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
        """Header, open and begin, all at once."""
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
        """(descriptor, frame body) of each frame of a server's answer, headers left out."""
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


@pytest.fixture
def make_server() -> type[Server]:
    return Server


@pytest.fixture
def make_peer() -> type[ProtonPeer]:
    return ProtonPeer


@pytest.fixture
def frames() -> type[Frames]:
    return Frames
