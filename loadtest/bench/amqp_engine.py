"""CPU time per AMQP message, in and out, for messages in several forms and as real clients send them.

    python -m loadtest.bench.amqp_engine [--rounds 7] [NAME ...]

"In" is the path from a transfer's bytes in reads of 64 KiB to the record in a Kafka batch and the disposition, through
the whole session but without a socket and without Kafka. "Out" is the path from a record to a transfer's bytes. Values
in parentheses are for the mapping alone. All values are in microseconds, the least of all rounds. A "minimal" message
is one data section, a "keyed" one adds the record key as an annotation, a "typical" one a header, six properties and
three application properties; the others are those of `loadtest/clients/amqp_shapes.json` and every form of encoding.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

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
from loadtest.clients.amqp_messages import FORMS, NOW, encodings, many_keys, minimal, typical
from loadtest.clients.amqp_shapes import CAPTURED, shapes
from loadtest.clients.amqp_wire import attach_receiver, attach_sender, credit, opening, transfer
from mapping.amqp._native import from_records, to_record
from mapping.amqp.incoming import AmqpDestination, gateway_headers
from mapping.outcomes import Outcome
from mapping.record import Received, Record
from protocols.amqp.connection import Connection
from protocols.amqp.endpoints import EndpointLimits
from protocols.amqp.events import LinkRequested

WINDOW: Final = 1000
READ: Final = 65536
BATCH: Final = 65536
COUNT: Final = 10_000  # messages per round
HERE: Final = AmqpDestination("bench", b"bench", None, None, "anonymous", gateway_headers("bench"))


def transfers(messages: Iterable[bytes]) -> list[bytes]:
    """Encode transfers and split them into reads."""
    data = b"".join(transfer(number, b"%08d" % number, message) for number, message in enumerate(messages))
    return [data[at : at + READ] for at in range(0, len(data), READ)]


def accepted(connection: Connection, *, sending: bool) -> Any:
    """Open a connection and accept one link."""
    connection.tick(1.0)
    attach = attach_sender if sending else attach_receiver
    events = connection.receive_data(opening("bench") + attach("link", "bench", "bench"))
    connection.open((), ())
    link = next(event.link for event in events if isinstance(event, LinkRequested))
    connection.engine.accept_link(link, max_message_bytes=1 << 20)
    connection.data_to_send()
    return link


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
    connection.receive_data(credit(0, 0, COUNT))

    def run() -> None:
        for place in range(0, len(records), BURST):
            if connection.engine.credit_of(link) > 0:
                messages = from_records(records[place : place + BURST], now_ms, 0, BATCH)
                connection.engine.send(link, cast("list[bytes]", messages), None)
            if place % (8 * BURST) == 0:
                connection.data_to_send()

    return run


def least(rounds: int, count: int, make: Callable[[], Callable[[], object]]) -> float:
    """Return the minimum CPU time per message in microseconds. Each round uses a new connection."""
    found = []
    for _ in range(rounds):
        run = make()
        began = time.process_time()
        run()
        found.append((time.process_time() - began) / count * 1e6)
    return min(found)


def row(messages: Sequence[bytes], rounds: int, now_ms: int) -> str:
    """Measure the incoming path, its mapping, the outgoing path and its mapping."""
    many = list(itertools.islice(itertools.cycle(messages), COUNT))
    reads = transfers(many)
    records = []
    for offset, message in enumerate(many, 123_456):
        one = to_record(message, HERE, now_ms)
        records.append(Received("bench", one.key, one.value, one.headers, one.timestamp or now_ms, 0, offset))
    found = (
        least(rounds, COUNT, lambda: session(reads, HERE, now_ms)),
        least(rounds, COUNT, lambda: lambda: [to_record(message, HERE, now_ms) for message in many]),
        least(rounds, COUNT, lambda: outgoing(records, now_ms)),
        least(rounds, COUNT, lambda: lambda: from_records(records, now_ms, 0, sys.maxsize)),
    )
    return "in {:5.2f} ({:4.2f})   out {:5.2f} ({:4.2f})".format(*found)


def main() -> None:
    """Run all measurements and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="forms of messages (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds per value")
    options = parser.parse_args()
    payloads = [b"%0100d" % number for number in range(COUNT)]
    forms: dict[str, tuple[Sequence[bytes], int]] = {
        name: ([kind(number, payload) for number, payload in enumerate(payloads)], NOW)
        for name, kind in (("minimal", minimal), ("keyed", many_keys), ("typical", typical))
    }
    forms |= {name: (messages, CAPTURED) for name, messages in shapes().items()}
    forms |= {f"form-{number}": ([encodings(number, b"x" * 100)], CAPTURED) for number in range(FORMS)}
    for name, (messages, now_ms) in forms.items():
        if not options.names or name in options.names:
            print(f"{name:20} {row(messages, options.rounds, now_ms)}", flush=True)


if __name__ == "__main__":
    main()
