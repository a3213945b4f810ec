"""Two peers for the engine: proton itself, joined in memory, and hand-packed frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from proton import Collector, Event, Transport
from proton import Connection as ProtonConnection

from protocols.amqp.connection import Connection
from protocols.amqp.endpoints import EndpointLimits
from protocols.amqp.events import ConnectionOpened, LinkRequested, SaslInitReceived, TransfersReceived
from protocols.amqp.links import Link
from protocols.amqp.sasl import SaslCode
from tests.support.amqp_frames import DATA, Frames

Split = Callable[[bytes], Iterable[bytes]]


class Transfer(NamedTuple):
    """One of the messages of a `TransfersReceived`."""

    link: Link
    delivery: Any
    data: bytes


class Server:
    """Our side with a minimal handler: it accepts every login and every link, and keeps the events."""

    def __init__(
        self, *, credit: int = 10, limit: int = 1000, limits: EndpointLimits | None = None, **options: Any
    ) -> None:
        self.connection = Connection("server", limits or EndpointLimits(), **options)
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

    @property
    def is_empty_of_links(self) -> bool:
        """Whether the engine has no link left, not even a detached one with deliveries in use."""
        return not self.engine._links and not self.engine._sent

    @property
    def received(self) -> list[Transfer]:
        """The received messages, in runs of any length."""
        return [
            Transfer(event.link, delivery, data)
            for event in self.of(TransfersReceived)
            for delivery, data in zip(event.deliveries, event.messages, strict=True)
        ]

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

    @staticmethod
    def sender(session: Any, name: str = "s") -> Any:
        """Open a sending link to the address "t"."""
        link = session.sender(name)
        link.target.address = "t"
        link.open()
        return link

    @staticmethod
    def transfer(link: Any, tag: str, message: bytes = DATA) -> Any:
        """Send one message, and return its delivery."""
        delivery = link.delivery(tag)
        link.send(message)
        link.advance()
        return delivery

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


@pytest.fixture
def make_server() -> type[Server]:
    return Server


@pytest.fixture
def make_peer() -> type[ProtonPeer]:
    return ProtonPeer


@pytest.fixture
def frames() -> type[Frames]:
    return Frames
