"""Compares the C and Python mappings of AMQP messages on randomly mutated messages of real clients.

    python -m tests.support.amqp_mutated [--count 1000000] [--seed 1]

Stops at the first difference. Otherwise prints how many messages were compared, how many became records, and how many
of these were mapped in C.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from loadtest.clients.amqp_messages import CAPTURED, many_keys, shapes, typical
from mapping.amqp import incoming
from mapping.amqp._native import to_record
from mapping.amqp.incoming import AmqpDestination, Unmappable, gateway_headers
from mapping.outcomes import Outcome
from mapping.record import Record
from protocols.amqp import primitives
from protocols.amqp.sections import scan

DESTINATIONS: Final = (
    AmqpDestination("t", b"t", None, None, "anonymous", gateway_headers("client-1"), partitions=4),
    AmqpDestination("t", b"other", 2, b"key", "ann", (), partitions=4),
)
SIGNIFICANT: Final = bytes.fromhex(
    "00 01 40 41 42 43 44 45 50 51 52 53 54 55 56 60 61 70 71 72 73 74 75 76 77 78 80 81 82 83 84 98 a0 a1 a3 b0 b1 b3"
    "c0 c1 c2 d0 d1 e0 ed f0 f4 ff"
)
"""Constructor and descriptor codes, and boundary values of UTF-8 bytes."""


def _simple() -> Iterator[bytes]:
    """Yield a value of each primitive type, and some outside the type's valid range."""
    yield from (primitives.NULL, primitives.TRUE, primitives.FALSE, b"\x56\x00", b"\x56\x01", b"\x43", b"\x44")
    for width, codes in ((1, b"\x50\x51\x52\x53\x54\x55"), (2, b"\x60\x61"), (4, b"\x70\x71\x72\x73\x74")):
        for code in codes:
            yield from (bytes((code,)) + bytes((fill,)) * width for fill in (0x00, 0x01, 0x7F, 0x80, 0xFF))
    for code in b"\x80\x81\x82\x83\x84":
        yield from (bytes((code,)) + bytes((fill,)) * 8 for fill in (0x00, 0x01, 0x3F, 0x40, 0x7F, 0x80, 0xFF))
    yield b"\x98" + bytes(range(16))
    for text in ("", "AMQP_BINARY:00", "x" * 300, "\x7f\u00e9\u20ac\U0001f600", "anonymous", "t", "ann"):
        raw = text.encode()
        for code in (0xA0, 0xA1, 0xA3):
            if len(raw) < 256:
                yield bytes((code, len(raw))) + raw
            yield bytes((code + 0x10,)) + len(raw).to_bytes(4, "big") + raw


def _section(code: int, value: bytes, *, wide: bool) -> bytes:
    return (b"\x00\x80" + bytes(7) if wide else b"\x00\x53") + bytes((code,)) + value


def _made(rng: random.Random, values: list[bytes]) -> bytes:
    """Build a message with random simple values in random places, most of them not allowed there."""
    names = [*map(primitives.symbol, ("x-opt-bridge.key", "x-opt-partition-key", "x-opt-bridge.partition", "x-opt-a"))]
    wide = rng.random() < 0.2
    parts = []
    if rng.random() < 0.5:
        parts.append(_section(0x70, primitives.list_of(rng.choices(values, k=rng.randint(0, 3))), wide=wide))
    if rng.random() < 0.4:
        pairs = [item for _ in range(rng.randint(1, 3)) for item in (rng.choice(names), rng.choice(values))]
        parts.append(_section(0x72, primitives.map_of(pairs), wide=wide))
    if rng.random() < 0.4:
        items = [rng.choice(values) if rng.random() < 0.2 else primitives.NULL for _ in range(rng.randint(0, 14))]
        parts.append(_section(0x73, primitives.list_of(items), wide=wide))
    if rng.random() < 0.6:
        pairs = [
            item
            for number in range(rng.randint(0, 4))
            for item in (primitives.string(rng.choice(("a", "to", "cloudEvents:id", f"n{number}"))), rng.choice(values))
        ]
        parts.append(_section(0x74, primitives.map_of(pairs), wide=wide))
    parts.append(_section(rng.choice((0x75, 0x77)), rng.choice(values), wide=wide))
    return b"".join(parts)


def damaged(rng: random.Random, message: bytes, significant: bytes = SIGNIFICANT) -> bytes:
    """Mutate a message in up to three places; `significant` are byte values with a meaning in the format."""
    data = bytearray(message)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes((rng.choice(significant),))
            case 1:
                data[at : at + 1] = bytes((rng.randrange(256),))
            case 2:
                data[at : at + 1] = bytes((((data[at] if data else 0) + rng.choice((-1, 1))) % 256,))
            case 3:
                del data[at : at + rng.randint(1, 4)]
            case 4:
                data[at:at] = bytes((rng.choice(significant),)) * rng.randint(1, 3)
            case _:
                del data[at:]
    return bytes(data)


def messages(rng: random.Random) -> Iterator[bytes]:
    """Yield messages endlessly."""
    whole = [message for found in shapes().values() for message in found]
    whole += [kind(number, b"payload") for kind in (typical, many_keys) for number in range(3)]
    pieces = sorted({data[start:end] for data in whole for _, start, _, end in scan(data)})
    values = list(_simple())
    while True:
        match rng.randrange(4):
            case 0:
                chosen: list[bytes] = rng.choices(pieces, k=rng.randint(1, 5))
                chosen.sort(key=operator.itemgetter(2))  # mostly by descriptor
                yield damaged(rng, b"".join(chosen))
            case 1:
                made = _made(rng, values)
                yield damaged(rng, made) if rng.random() < 0.3 else made
            case _:
                yield damaged(rng, rng.choice(whole))


T = TypeVar("T")


def fate(mapping: Callable[..., T], *arguments: Any) -> T | tuple[Outcome, str]:
    """Return what `mapping` makes of a message, or the outcome and reason its sender gets."""
    try:
        return mapping(*arguments)
    except Unmappable as unmappable:
        return unmappable.outcome, unmappable.reason


@contextlib.contextmanager
def mapped_in_python() -> Iterator[list[bytes]]:
    """Note the messages that the reference maps, also those that the mapping in C leaves to it."""
    noted: list[bytes] = []
    reference = incoming._to_record

    def noting(data: bytes, destination: AmqpDestination, now_ms: int) -> Record:
        noted.append(data)
        return reference(data, destination, now_ms)

    incoming._to_record = noting
    try:
        yield noted
    finally:
        incoming._to_record = reference


def compare(count: int, seed: int) -> tuple[int, int]:
    """Compare `count` messages; return how many became records and how many were mapped in C.

    Raises:
        AssertionError: the two mappings differ for a message.
    """
    rng = random.Random(seed)
    made = messages(rng)
    records = taken = 0
    for _ in range(count):
        data = next(made)
        now_ms = CAPTURED + rng.choice((0, 0, 30_000, -86_400_000, 1 << 45))
        destination = rng.choice(DESTINATIONS)
        with mapped_in_python() as left:
            found = fate(to_record, data, destination, now_ms)
        wanted = fate(incoming.to_record, data, destination, now_ms)
        assert found == wanted, f"{data.hex()} at {now_ms} to {destination}: {found}, in Python {wanted}"
        records += type(found) is Record
        taken += not left
    return records, taken


def main() -> None:
    """Run the comparison and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    records, taken = compare(arguments.count, arguments.seed)
    print(f"{arguments.count} messages, all equal: {records} records, {taken} of them mapped in C")


if __name__ == "__main__":
    main()
