"""CPU time of an incoming AMQP transfer up to Kafka and of an outgoing delivery, compared with a lower bound.

    python -m loadtest.bench.amqp_engine

Each row is the median of several runs, in microseconds of CPU per message, for unsettled transfers with 100-byte bodies
in reads of 64 KiB, with a link credit of 1,000 and batched dispositions. A "minimal" message is one data section, a
"keyed" one adds the record key as an annotation, a "typical" one a header, six properties and three application
properties. All messages differ: there are 100 keys, and message-id, correlation-id, creation-time and two application
properties are unique. The lower bound ("floor") is proton's C engine called through cffi, which accepts each delivery
at once and checks nothing. No sockets are used.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import cproton
import proton

from gateway.amqp.connection import AmqpConnection
from gateway.amqp.links.incoming import IncomingLink
from gateway.amqp.links.outgoing import BURST
from gateway.amqp.services import AmqpServices
from gateway.kafka.contracts import Result
from gateway.kafka.publish.batch_format import Records
from gateway.kafka.publish.budgets import Budgets
from gateway.limits.limits import Limits
from gateway.security.identity import ANONYMOUS
from gateway.security.rights.authorization import AccessList
from gateway.settings.config import AmqpConfig, BudgetConfig, LimitsConfig
from loadtest.clients.amqp_messages import NOW, many_keys, minimal, typical
from mapping.amqp._native import from_records, to_record
from mapping.amqp.incoming import AmqpDestination, gateway_headers
from mapping.outcomes import Outcome
from mapping.record import Received, Record
from protocols.amqp.connection import Connection
from protocols.amqp.endpoints import EndpointLimits
from protocols.amqp.events import LinkRequested, TransfersReceived

WINDOW: Final = 1000
READ: Final = 65536
BATCH: Final = 65536
COUNT: Final = 20_000  # per run
RUNS: Final = 7


def _text(code: int, value: str) -> bytes:
    return bytes((code, len(value))) + value.encode()


def _list(*items: bytes) -> bytes:
    body = b"".join(items)
    return b"\xd0" + struct.pack(">II", len(body) + 4, len(items)) + body


def _frame(code: int, *items: bytes, payload: bytes = b"") -> bytes:
    body = b"\x00\x53" + bytes((code,)) + _list(*items) + payload
    return struct.pack(">IBBH", len(body) + 8, 2, 0, 0) + body


def _uint(value: int) -> bytes:
    return b"\x70" + struct.pack(">I", value)


NULL, ZERO, TRUE, FALSE = b"\x40", b"\x43", b"\x41", b"\x42"
BIG: Final = b"\x70\x7f\xff\xff\xff"


KINDS: Final = {"minimal": minimal, "keyed": many_keys, "typical": typical}


def preamble(*, sending: bool) -> bytes:
    """Encode a client's protocol header, open, begin and attach."""
    terminus = _list(_text(0xA1, "bench"))
    return (
        b"AMQP\x00\x01\x00\x00"
        + _frame(0x10, _text(0xA1, "bench"), _text(0xA1, "localhost"), b"\x70\x00\x01\x00\x00")
        + _frame(0x11, NULL, ZERO, BIG, BIG)
        + _frame(
            0x12, _text(0xA1, "link"), ZERO, FALSE if sending else TRUE, NULL, NULL, b"\x00\x53\x28" + terminus,
            b"\x00\x53\x29" + terminus, NULL, NULL, ZERO if sending else NULL,
        )
    )  # fmt: skip


def transfers(messages: Iterable[bytes]) -> list[bytes]:
    """Encode transfers and split them into reads."""
    data = b"".join(
        _frame(0x14, ZERO, _uint(number), b"\xa0\x08" + struct.pack(">Q", number), ZERO, FALSE, FALSE, payload=message)
        for number, message in enumerate(messages)
    )
    return [data[at : at + READ] for at in range(0, len(data), READ)]


def floor(reads: list[bytes]) -> Callable[[], None]:
    """Create a run of the lower bound: proton through cffi receives, accepts and settles."""
    lib, ffi = cproton.lib, cproton.ffi
    connection, collector = proton.Connection(), proton.Collector()
    connection.collect(collector)
    transport = proton.Transport(proton.Transport.SERVER)
    transport.max_frame_size = 65536
    transport.bind(connection)
    events, io = collector._impl, transport._impl
    scratch = ffi.new("char[]", 1 << 20)

    taken = 0
    kept: list[Any] = []  # proton's wrappers

    def drain() -> None:
        nonlocal taken
        while (event := lib.pn_collector_peek(events)) != ffi.NULL:
            if lib.pn_event_type(event) == lib.PN_DELIVERY:
                delivery = lib.pn_event_delivery(event)
                link = lib.pn_delivery_link(delivery)
                size = lib.pn_link_recv(link, scratch, 1 << 20)
                bytes(ffi.buffer(scratch, size))
                lib.pn_link_advance(link)
                lib.pn_delivery_update(delivery, lib.PN_ACCEPTED)
                lib.pn_delivery_settle(delivery)
                taken += 1
            else:
                found = proton.Event.wrap(event)  # type: ignore[no-untyped-call]
                if found is not None and found.type is proton.Event.CONNECTION_REMOTE_OPEN:
                    found.connection.open()
                elif found is not None and found.type is proton.Event.SESSION_REMOTE_OPEN:
                    found.session.open()
                elif found is not None and found.type is proton.Event.LINK_REMOTE_OPEN:
                    kept.append(found.link)
                    found.link.open()
                    found.link.flow(COUNT)
            lib.pn_collector_pop(events)

    def feed(data: bytes) -> None:
        base = ffi.from_buffer(data)
        at = 0
        while at < len(data):
            size = min(lib.pn_transport_capacity(io), len(data) - at)
            lib.pn_transport_push(io, base + at, size)
            at += size
            drain()
        while (size := lib.pn_transport_pending(io)) > 0:
            lib.pn_transport_peek(io, scratch, size)
            lib.pn_transport_pop(io, size)

    feed(preamble(sending=True))

    def run() -> None:
        for data in reads:
            feed(data)
        # The closure keeps proton's wrappers alive.
        assert taken == COUNT, (taken, connection.state, transport.condition, collector)

    return run


def accepted(connection: Connection, *, sending: bool) -> Any:
    """Open a connection and accept one link."""
    connection.tick(1.0)
    events = connection.receive_data(preamble(sending=sending))
    connection.open((), ())
    link = next(event.link for event in events if isinstance(event, LinkRequested))
    connection.engine.accept_link(link, max_message_bytes=1 << 20)
    connection.data_to_send()
    return link


def engine(reads: list[bytes], destination: AmqpDestination | None) -> Callable[[], None]:
    """Create a run of our protocol connection, which accepts in batches; with a destination it also maps messages."""
    connection = Connection("bench", EndpointLimits(session_window_bytes=1 << 30))
    link = accepted(connection, sending=True)

    def run() -> None:
        for data in reads:
            connection.engine.grant(link, max(0, WINDOW - link.credit))
            for event in connection.receive_data(data):
                if type(event) is TransfersReceived:
                    if destination is not None:
                        for message in event.messages:
                            to_record(message, destination, NOW)
                    connection.engine.accept_deliveries(event.link, event.deliveries)
            connection.data_to_send()

    return run


STORED: Final = Result(Outcome.STORED, 0)


class AnsweringPublisher:
    """Stands in for the publisher: writes records into a batch and keeps owners and tokens until `settle`."""

    def __init__(self) -> None:
        self._records = Records(BATCH)
        self.budgets = Budgets(BudgetConfig())
        self.budget = self.budgets.process
        self.gate = self.budget.gate
        self._held: list[tuple[Any, list[Any]]] = []

    def settle(self) -> None:
        """Settle everything as stored."""
        held, self._held = self._held, []
        for owner, tokens in held:
            owner.settle(tokens, range(len(tokens)), STORED)

    def submit(self, record: Record, owner: Any, token: Any, sender: Any = None) -> None:
        """Write the record and keep its token."""
        self._write(record)
        self._held.append((owner, [token]))

    def submit_run(self, records: list[Record], owner: Any, tokens: list[Any], sender: Any = None) -> None:
        """Write the records and keep their tokens."""
        for record in records:
            self._write(record)
        self._held.append((owner, tokens))

    def _write(self, record: Record) -> None:
        if not self._records.append(NOW, record.key, record.value, record.headers):
            self._records = Records(BATCH)
            self._records.append(NOW, record.key, record.value, record.headers)


class Socket:
    """Stands in for the pump."""

    writable = True
    closed = False
    transport = None
    peer = "bench"
    peercert = None

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.entrance = AnonymousEntrance()

    def flush(self) -> None:
        """Discard the pending output."""
        self.connection.data_to_send()

    def flush_soon(self) -> None:
        """Discard the pending output at once; there is no event loop."""
        self.connection.data_to_send()


class AnonymousEntrance:
    """Stands in for the entrance."""

    name = "bench"

    def place(self, identity: Any, peercert: Any) -> Any:
        """Return the identity unchanged; there are no tenants."""
        return identity

    def offers(self, *, certificate: bool = False) -> tuple[str, ...]:
        """The SASL mechanisms: ANONYMOUS only."""
        return ("ANONYMOUS",)

    def anonymous(self) -> Any:
        """The identity of an anonymous client."""
        return ANONYMOUS

    def identify_certificate(self, peercert: Any) -> Any:
        """Always None; no client has a certificate."""
        return None


def session(reads: list[bytes], destination: AmqpDestination, now_ms: int = NOW) -> Callable[[], None]:
    """Create a run of the whole incoming path without Kafka: events, mapping, submit, settle, credit, output."""
    publisher = AnsweringPublisher()
    services = AmqpServices(
        AmqpConfig(link_credit=WINDOW, link_credit_least=WINDOW),
        container_id="bench",
        publisher=cast("Any", publisher),
        live_reader=cast("Any", None),
        groups=cast("Any", None),
        names=cast("Any", None),
        transactions=cast("Any", None),
        access=AccessList(),
        limits=Limits(LimitsConfig(), time.monotonic, ()),
        wall_clock=lambda: now_ms,
        random_id=lambda: "name",
    )
    connection = Connection("bench", EndpointLimits(session_window_bytes=1 << 30))
    owner = AmqpConnection(services, connection, set())
    owner.connected(cast("Any", Socket(connection)))
    owner.identity, owner.principal = ANONYMOUS, ANONYMOUS.name
    link = accepted(connection, sending=True)
    link.context = IncomingLink(services.ingress, owner, link, destination, allowed=None)
    services.gates.senders = 1
    link.context.top_up()

    def run() -> None:
        for data in reads:
            owner.handle(connection.receive_data(data))
            publisher.settle()
        assert connection.engine.opened
        assert link.attached

    return run


def outgoing(records: Sequence[Received], now_ms: int = NOW) -> Callable[[], None]:
    """Create a run of the outgoing path without Kafka: from records to messages to settled transfer frames."""
    connection = Connection("bench", EndpointLimits(session_window_bytes=1 << 30))
    link = accepted(connection, sending=False)
    flow = _frame(0x13, ZERO, BIG, ZERO, BIG, ZERO, ZERO, _uint(COUNT))
    connection.receive_data(flow)

    def run() -> None:
        for place in range(0, len(records), BURST):
            if connection.engine.credit_of(link) > 0:
                messages = from_records(records[place : place + BURST], now_ms, 0, BATCH)
                connection.engine.send(link, cast("list[bytes]", messages), None)
            if place % (8 * BURST) == 0:
                connection.data_to_send()

    return run


def measure(make: Callable[[], Callable[[], None]]) -> float:
    """Return the median CPU time per message in microseconds. Each run uses a new connection."""
    found = []
    for _ in range(RUNS):
        run = make()
        began = time.process_time()
        run()
        found.append((time.process_time() - began) / COUNT * 1e6)
    return statistics.median(found)


def main() -> None:
    """Run all measurements and print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    destination = AmqpDestination("bench", b"bench", None, None, "anonymous", gateway_headers("bench"))
    print(f"{'us CPU per message':34}" + "".join(f"{name:>10}" for name in KINDS))
    messages = {name: [make(number, b"%0100d" % number) for number in range(COUNT)] for name, make in KINDS.items()}
    reads = {name: transfers(made) for name, made in messages.items()}
    rows: list[tuple[str, Callable[[list[bytes]], Callable[[], None]]]] = [
        ("in: floor (proton through cffi)", floor),
        ("in: connection", lambda data: engine(data, None)),
        ("in: connection and mapping", lambda data: engine(data, destination)),
        ("in: session and record batch", lambda data: session(data, destination)),
    ]
    for name, make in rows:
        print(f"{name:34}" + "".join(f"{measure(functools.partial(make, data)):10.2f}" for data in reads.values()))
    out = []
    for made in messages.values():
        mapped = [to_record(message, destination, NOW) for message in made]
        received = [
            Received("bench", record.key, record.value, record.headers, NOW, 0, offset)
            for offset, record in enumerate(mapped, 123_456)
        ]
        out.append(measure(functools.partial(outgoing, received)))
    print(f"{'out: mapping and connection':34}" + "".join(f"{value:10.2f}" for value in out))


if __name__ == "__main__":
    main()
