"""Compares the mapping of plain HTTP records with that of any, on randomly mutated bodies of the load tests.

    python -m tests.support.http_mutated [--count 1000000] [--seed 1]

Stops at the first difference. Otherwise prints how many bodies were compared, how many had only plain records, and how
many records they became.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Final

from loadtest.numbering import Numbering
from loadtest.run.shapes import Shape, Template
from mapping.record import Record
from mapping.rest.incoming import Target
from protocols.rest.errors import RestError
from protocols.rest.media import Format
from tests.support.amqp_mutated import damaged

LIMIT: Final = 100
HEADERS: Final = (("gw.client", b"mutated"),)
KINDS: Final = {"minimal": Format.TEXT, "typical": Format.JSON, "jms": Format.BINARY}
SIGNIFICANT: Final = b'"\\{}[]:,= \t\n0129-+.eEntfuAab/_\xc3\xa9\xf0\x9f\x98\x80\xff'
VALUES: Final = (
    b"null", b"true", b"-0", b"1e400", b"12345678901234567890", b'""', b'"\\u00e9\\n"', b'"\\ud83d\\ude00"', b'"YQ=="',
    b'"YR=="', b'"a b"', b"[ ]", b'[1, "a", {"b" : null}]', b'{"a": {"a":1},"a":2}', b'"' + b"x" * 300 + b'"',
)  # fmt: skip

Fate = list[Record] | tuple[int, str] | None


def bodies(rng: random.Random) -> Iterator[tuple[Format, bytes]]:
    """Yield bodies with their format, endlessly."""
    whole = {
        form: [Template(pieces).write(number, 0.0) for pieces in shape.templates() for number in range(20)]
        for kind, form in KINDS.items()
        for shape in (Shape("http", kind, "t", 64, 5, Numbering(), 1),)
    }
    while True:
        form = rng.choice(list(KINDS.values()))
        records = rng.choices(whole[form], k=rng.randint(0, 3))
        for _ in range(rng.randint(0, 2)):
            value, key = rng.choices(VALUES, k=2)
            records.append(b'{"value":%b,"key" : %b}' % (value, key) if rng.random() < 0.5 else b'{"value":%b}' % value)
        rng.shuffle(records)
        if records and rng.random() < 0.8:
            place = rng.randrange(len(records))
            records[place] = damaged(rng, records[place], SIGNIFICANT)
        yield form, b'{"records":[' + b",".join(records) + b"]}"


def agrees(target: Target, body: bytes, limit: int = LIMIT) -> int | None:
    """Return how many plain records a body has; None if it has others or is not valid.

    Raises:
        AssertionError: They differ from what the mapping of any record makes of them.
    """
    found: Fate
    wanted: Fate
    try:
        found = target.plain_records(body, limit)
    except RestError as error:
        found = (error.status, str(error))
    if found is None:
        return None
    try:
        wanted = target.any_records(body, limit)
    except RestError as error:
        wanted = (error.status, str(error))
    assert found == wanted, f"{body!r} as {target.embedded}: {found}, not {wanted}"
    return len(found) if isinstance(found, list) else None


def compare(count: int, seed: int) -> tuple[int, int]:
    """Compare `count` bodies; return how many had only plain records, and how many records they became.

    Raises:
        AssertionError: the two mappings differ for a body.
    """
    made = bodies(random.Random(seed))
    plain = records = 0
    for _ in range(count):
        form, body = next(made)
        found = agrees(Target("t", None, HEADERS, (), form), body)
        if found is not None:
            plain += 1
            records += found
    return plain, records


def main() -> None:
    """Run the comparison and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    plain, records = compare(arguments.count, arguments.seed)
    print(f"{arguments.count} bodies, all equal: {plain} had only plain records, {records} in all")


if __name__ == "__main__":
    main()
