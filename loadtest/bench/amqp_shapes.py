"""CPU time per message, incoming and outgoing, for messages as real AMQP clients send them.

    python -m loadtest.bench.amqp_shapes [--rounds 5] [NAME ...]

"In" is the path from a transfer's bytes to the record in a Kafka batch and the disposition, through the whole session
but without a socket and without Kafka. "Out" is the path from a record to a transfer's bytes. Values in parentheses are
for the mapping alone. The messages of a kind alternate, so that each differs from the previous one. All values are in
microseconds, the minimum over all rounds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence

from loadtest.bench.amqp_engine import outgoing, session, transfers
from loadtest.clients.amqp_messages import FORMS, encodings
from loadtest.clients.amqp_shapes import CAPTURED, shapes
from mapping.amqp._native import from_records, to_record
from mapping.amqp.incoming import AmqpDestination, gateway_headers
from mapping.record import Received

COUNT = 4_000  # messages per round

HERE = AmqpDestination("bench", b"bench", None, None, "anonymous", gateway_headers("bench"))


def least(rounds: int, make: Callable[[], Callable[[], None]]) -> float:
    """Return the minimum CPU time per message in microseconds. Each round uses a new connection."""
    found = []
    for _ in range(rounds):
        run = make()
        began = time.process_time()
        run()
        found.append((time.process_time() - began) / COUNT * 1e6)
    return min(found)


def map_in(messages: Sequence[bytes]) -> None:
    """Map messages to records."""
    for message in messages:
        to_record(message, HERE, CAPTURED)


def map_out(records: Sequence[Received]) -> None:
    """Map records to messages."""
    from_records(records, CAPTURED, 0, sys.maxsize)


def row(messages: Sequence[bytes], rounds: int) -> tuple[float, float, float, float]:
    """Measure the incoming path, its mapping, the outgoing path and its mapping."""
    many = list(itertools.islice(itertools.cycle(messages), COUNT))
    reads = transfers(many)
    records = []
    for offset, message in enumerate(many, 123_456):
        one = to_record(message, HERE, CAPTURED)
        records.append(Received("bench", one.key, one.value, one.headers, one.timestamp or CAPTURED, 0, offset))
    return (
        least(rounds, lambda: session(reads, HERE, CAPTURED)),
        least(rounds, lambda: lambda: map_in(many)),
        least(rounds, lambda: outgoing(records, CAPTURED)),
        least(rounds, lambda: lambda: map_out(records)),
    )


def main() -> None:
    """Run all measurements and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="kinds of messages (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per value")
    arguments = parser.parse_args()
    forms = {f"form-{number}": [encodings(number, b"x" * 100)] for number in range(FORMS)}
    for name, messages in (shapes() | forms).items():
        if not arguments.names or name in arguments.names:
            whole_in, mapped_in, whole_out, mapped_out = row(messages, arguments.rounds)
            print(f"{name:20} in {whole_in:5.1f} ({mapped_in:4.1f})   out {whole_out:5.1f} ({mapped_out:4.1f})")


if __name__ == "__main__":
    main()
