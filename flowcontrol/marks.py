"""What is known about the deliveries of a partition's open offsets, and its text form in a commit's metadata.

The numbers of attempts are kept for those that came back. For all others it is enough to know up to which offset
records were handed out: who finds this in the commit of an owner that did not give its records back in order (it
crashed) counts one more attempt for each open offset below.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final, NamedTuple

from flowcontrol.numbers import pack, unpack

Tries = tuple[int, int]  # attempts, and how many of them failed
UNTRIED: Final[Tries] = (0, 0)

MARKS: Final = ";"
"""Precedes the marks in a commit's metadata."""
MARKS_LIMIT: Final = 1000  # characters
TRIES_LIMIT: Final = 10_000
"""For how many offsets the numbers of attempts are kept."""
_HIGHEST: Final = 1 << 31  # attempts: AMQP's delivery-count has 32 bits
_FARTHEST: Final = 1 << 62  # offset


class Marks(NamedTuple):
    """The attempts at a partition's open offsets."""

    tries: Mapping[int, Tries]  # of offsets that came back
    begin: int = 0  # records from here ...
    end: int = 0  # ... to before here were handed out, and have not come back


def write_marks(first: int, marks: Marks, limit: int = MARKS_LIMIT) -> str:
    """Encode marks for a commit of offset `first`; those of the highest offsets are left out if they do not fit.

    Returns:
        "" when there are none from `first` on.
    """
    tries = [(offset, *marks.tries[offset]) for offset in sorted(marks.tries) if offset >= first]
    begin, end = max(marks.begin, first), max(marks.end, first)
    if not tries and begin >= end:
        return ""
    while True:
        numbers = [begin - first, max(end - begin, 0)]
        last = first
        for offset, attempts, failures in tries:
            numbers += (offset - last, attempts, failures)
            last = offset
        text = MARKS + pack(numbers)
        if len(text) <= limit or not tries:
            return text
        del tries[len(tries) // 2 :]


def read_marks(first: int, text: str) -> Marks:
    """Decode the marks in the metadata that was committed with offset `first`; without legal ones there are none."""
    _, mark, packed = text.partition(MARKS)
    numbers = unpack(packed) if mark else None
    if numbers is None:
        return Marks({})
    skipped, length = next(numbers, 0), next(numbers, 0)
    if not (0 <= skipped < _FARTHEST and 0 <= length < _FARTHEST):
        return Marks({})
    tries: dict[int, Tries] = {}
    offset = first
    for distance, attempts, failures in itertools.islice(zip(numbers, numbers, numbers, strict=False), TRIES_LIMIT):
        if not (0 <= distance < _FARTHEST and 0 <= failures <= attempts < _HIGHEST):
            break
        offset += distance
        tries[offset] = (attempts, failures)
    return Marks(tries, first + skipped, first + skipped + length)
