"""Compares the C and Python mappings of HTTP bodies on randomly mutated bodies of the load tests.

    python -m loadtest.bench.http_mutated [--count 1000000] [--seed 1]

Stops at the first difference. Otherwise prints how many bodies were compared, how many could be decoded, and how many
records they became.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from loadtest.bench.amqp_mutated import damaged
from loadtest.numbering import Numbering
from loadtest.run.shapes import Shape, Template
from mapping.record import Record
from mapping.rest import _native
from mapping.rest.incoming import Target
from protocols.rest.errors import RestError
from protocols.rest.media import Format
from protocols.rest.requests import decode_json, decode_text

LIMIT: Final = 100
HEADERS: Final = (("gw.client", b"mutated"),)
KINDS: Final = {"minimal": Format.TEXT, "typical": Format.JSON, "jms": Format.BINARY}
SIGNIFICANT: Final = b'"\\{}[]:,= \t\n0129-+.eEntfuAab/_\xc3\xa9\xf0\x9f\x98\x80\xff'
VALUES: Final = (
    b"null", b"true", b"-0", b"1e400", b"12345678901234567890", b'""', b'"\\u00e9\\n"', b'"\\ud83d\\ude00"', b'"YQ=="',
    b'"YR=="', b'"a b"', b"[ ]", b'[1, "a", {"b" : null}]', b'{"a": {"a":1},"a":2}', b'"' + b"x" * 300 + b'"',
)  # fmt: skip

Fate = list[Record] | tuple[int, str]


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


def fate(records: Callable[..., list[Record]], *arguments: Any) -> Fate:
    """Map entries to records, or to the error's status and text."""
    try:
        return records(*arguments)
    except RestError as error:
        return error.status, str(error)


def in_python(record: Callable[[int, Any], Record], entries: Sequence[Any]) -> list[Record]:
    """Map all entries with a method of `Target`."""
    return [record(index, entry) for index, entry in enumerate(entries)]


def compare(count: int, seed: int) -> tuple[int, int]:
    """Compare `count` bodies; return how many could be decoded and how many records they became.

    Raises:
        AssertionError: the two mappings differ for a body.
    """
    rng = random.Random(seed)
    made = bodies(rng)
    decoded = records = 0
    for _ in range(count):
        form, body = next(made)
        try:
            entries = decode_json(body, LIMIT) if form is Format.JSON else decode_text(body, LIMIT, form)
        except RestError:
            continue
        decoded += 1
        target = Target("t", None, HEADERS, (), form)
        if form is Format.JSON:
            found = fate(_native.json_records, entries, "t", None, HEADERS, target.json_record)
            wanted = fate(in_python, target.json_record, entries)
        else:
            last = form is Format.BINARY
            found = fate(_native.text_records, entries, "t", None, HEADERS, target.text_record, last)
            wanted = fate(in_python, target.text_record, entries)
        assert found == wanted, f"{body!r} as {form}: {found}, in Python {wanted}"
        records += len(found) if isinstance(found, list) else 0
    return decoded, records


def main() -> None:
    """Run the comparison and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    decoded, records = compare(arguments.count, arguments.seed)
    print(f"{arguments.count} bodies, all equal: {decoded} could be decoded, {records} records")


if __name__ == "__main__":
    main()
