"""What messages cost as real AMQP clients send them: in, and out again, in microseconds of CPU for each.

    python -m loadtest.bench.amqp_shapes [--rounds 5] [NAME ...]

In: from the bytes of a transfer to the record in Kafka's batch and the disposition, the whole session, but no socket
and no Kafka. Out: from the record to the bytes of a transfer. In brackets: the mapping alone, without proton, session
and batch. The messages of a kind come in turn, so that none is like the one before. The least of all rounds.
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
from mapping.amqp.incoming import Destination, gateway_headers, to_record
from mapping.amqp.mapper import Mapper, from_records
from mapping.record import Received

COUNT = 4_000  # messages in a round

HERE = Destination("bench", b"bench", None, None, "anonymous", gateway_headers("bench"))


def least(rounds: int, make: Callable[[], Callable[[], None]]) -> float:
    """Microseconds of CPU per message; each round has a connection of its own."""
    found = []
    for _ in range(rounds):
        run = make()
        began = time.process_time()
        run()
        found.append((time.process_time() - began) / COUNT * 1e6)
    return min(found)


def map_in(messages: Sequence[bytes]) -> None:
    """The mapping alone."""
    record = Mapper(HERE).record
    for message in messages:
        record(message, CAPTURED)


def map_out(records: Sequence[Received]) -> None:
    """The mapping alone."""
    from_records(records, CAPTURED, 0, sys.maxsize)


def row(messages: Sequence[bytes], rounds: int) -> tuple[float, float, float, float]:
    """Whole way in, its mapping, whole way out, its mapping."""
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
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="kinds of messages; all")
    parser.add_argument("--rounds", type=int, default=5, help="rounds for each figure")
    arguments = parser.parse_args()
    forms = {f"form-{number}": [encodings(number, b"x" * 100)] for number in range(FORMS)}
    for name, messages in (shapes() | forms).items():
        if not arguments.names or name in arguments.names:
            whole_in, mapped_in, whole_out, mapped_out = row(messages, arguments.rounds)
            print(f"{name:20} in {whole_in:5.1f} ({mapped_in:4.1f})   out {whole_out:5.1f} ({mapped_out:4.1f})")


if __name__ == "__main__":
    main()
