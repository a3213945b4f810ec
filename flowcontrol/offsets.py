"""A compact set of a partition's open (unsettled) offsets, and its text form for the metadata of a committed offset.

A queue's records settle in any order, and some may stay open for days. The set stores bitmaps for blocks of `BLOCK`
offsets, only for blocks that have an open one, so its size does not depend on the gaps between them.

`write_ledger` makes a short text of it (Kafka limits commit metadata to 4,096 bytes): the lengths of the alternating
runs of open and settled offsets, starting at the committed one, which is open (`numbers.pack`), prefixed with `LEDGER`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from flowcontrol.marks import MARKS
from flowcontrol.numbers import pack, unpack

BLOCK: Final = 1024
"""Offsets in a block: few enough that a block with one open offset costs some 250 bytes, many enough that a million
consecutive open ones cost a quarter of a megabyte."""

LEDGER: Final = "trivium-settled-1:"
LEDGER_LIMIT: Final = 4000
"""Largest length of a ledger in characters: below Kafka's default of `offset.metadata.max.bytes`, 4,096."""

EXACT: Final = 32_768  # runs written exactly; later offsets are rounded to whole blocks
BLOCKS_LIMIT: Final = 1 << 17  # more than any writer of a ledger keeps


@dataclass(slots=True, eq=False)
class OffsetSet:
    """A set of offsets from 0 on.

    Invariant: it contains what was added and not discarded since, and only blocks with at least one offset.
    """

    _blocks: dict[int, int] = field(default_factory=dict)  # by block number, a bit for each offset; never 0
    _count: int = 0

    def copy(self) -> OffsetSet:
        """Return another set with the same offsets."""
        return OffsetSet(self._blocks.copy(), self._count)

    def add(self, offset: int) -> None:
        """Add an offset, which may be in the set already."""
        self._put(offset // BLOCK, 1 << offset % BLOCK)

    def add_range(self, begin: int, end: int) -> None:
        """Add all offsets from `begin` to before `end`."""
        for key, mask in _masks(begin, end) if begin < end else ():
            self._put(key, mask)

    def discard(self, offset: int) -> bool:
        """Remove an offset. Returns whether it was in the set."""
        return self._take(offset // BLOCK, 1 << offset % BLOCK)

    def discard_range(self, begin: int, end: int) -> int:
        """Remove all offsets from `begin` to before `end`. Returns how many were in the set."""
        if begin >= end:
            return 0
        before = self._count
        first, last = begin // BLOCK, (end - 1) // BLOCK
        if last - first >= len(self._blocks):
            keys = [key for key in self._blocks if first <= key <= last]
        else:
            keys = [key for key in range(first, last + 1) if key in self._blocks]
        for key in keys:
            base = key * BLOCK
            self._take(key, _mask(max(begin - base, 0), min(end - base, BLOCK)))
        return before - self._count

    def __contains__(self, offset: int) -> bool:
        return bool(self._blocks.get(offset // BLOCK, 0) >> offset % BLOCK & 1)

    def __len__(self) -> int:
        return self._count

    @property
    def blocks(self) -> int:
        """Number of blocks, which determine the memory that the set takes."""
        return len(self._blocks)

    @property
    def first(self) -> int | None:
        """The lowest offset, or None when the set is empty; finding it takes time for each block."""
        key = min(self._blocks, default=None)
        return None if key is None else key * BLOCK + _lowest(self._blocks[key])

    def runs(self, *, exact: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the runs of consecutive offsets in order, as half-open ranges.

        Args:
            exact: how many runs are exact; later ones are rounded to whole blocks. None means that all are exact.
        """
        begin = end = -1
        count = 0
        for key in sorted(self._blocks):
            whole = exact is not None and count >= exact
            for left, right in ((0, BLOCK),) if whole else _runs_of(self._blocks[key]):
                if key * BLOCK + left == end:
                    end = key * BLOCK + right
                    continue
                if end >= 0:
                    yield begin, end
                begin, end = key * BLOCK + left, key * BLOCK + right
                count += 1
        if end >= 0:
            yield begin, end

    def _put(self, key: int, mask: int) -> None:
        bits = self._blocks.get(key, 0)
        self._blocks[key] = bits | mask
        self._count += (mask & ~bits).bit_count()

    def _take(self, key: int, mask: int) -> bool:
        bits = self._blocks.get(key, 0)
        low = bits & mask
        if low:
            self._count -= low.bit_count()
            if low == bits:
                del self._blocks[key]
            else:
                self._blocks[key] = bits ^ low
        return low != 0


class Ledger(NamedTuple):
    """Which offsets after a committed offset are settled.

    Attributes:
        open: the offsets that are not settled.
        end: all other offsets before this one are settled; nothing is known about later ones.
    """

    open: OffsetSet
    end: int


def write_ledger(opened: OffsetSet, end: int, limit: int = LEDGER_LIMIT) -> str:
    """Encode a ledger, which starts at the first open offset.

    If it is too long, it loses detail: first later open offsets are rounded to whole blocks, then its end is cut off.
    A reader then takes too many offsets for open, never too few.

    Args:
        opened: not empty.
        end: after all open offsets; everything before it that is not open is settled.
        limit: the largest length in characters.

    Returns:
        "" when no offset after the first open run is settled, or nothing of it fits.
    """
    exact = EXACT
    while True:
        lengths = _lengths(opened, end, exact)
        text = LEDGER + pack(lengths)
        if len(text) <= limit:
            return text if len(lengths) > 1 else ""
        if exact > 1:
            exact //= 2
            continue
        while len(text) > limit and lengths:
            lengths = lengths[: len(lengths) // 2]
            text = LEDGER + pack(lengths)
        return text if len(lengths) > 1 else ""


def read_ledger(first: int, text: str) -> Ledger | None:
    """Decode a text that was committed with offset `first`, perhaps with marks; None when it has no ledger."""
    if not text.startswith(LEDGER):
        return None
    lengths = unpack(text[len(LEDGER) :].partition(MARKS)[0])
    if lengths is None:
        return None
    opened = OffsetSet()
    at, is_open = first, True
    for length in lengths:
        if not 0 < length < 1 << 62:
            return None
        if is_open:
            if length // BLOCK + opened.blocks > BLOCKS_LIMIT:
                return None
            opened.add_range(at, at + length)
        at += length
        is_open = not is_open
    return Ledger(opened, at) if at > first else None


def _lengths(opened: OffsetSet, end: int, exact: int) -> list[int]:
    """Return the lengths of the alternating open and settled runs, up to `end`."""
    lengths: list[int] = []
    at = opened.first or 0
    for begin, until in opened.runs(exact=exact):
        if lengths:
            lengths.append(begin - at)
        start, at = max(begin, at), min(until, end)
        lengths.append(at - start)
    if at < end:
        lengths.append(end - at)
    return lengths


def _masks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for key in itertools.takewhile(lambda key: key * BLOCK < end, itertools.count(begin // BLOCK)):
        base = key * BLOCK
        yield key, _mask(max(begin - base, 0), min(end - base, BLOCK))


def _mask(begin: int, end: int) -> int:
    return (1 << end) - (1 << begin)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _runs_of(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of ones in a block, as half-open ranges."""
    at = 0
    while bits:
        skipped = _lowest(bits)
        bits >>= skipped
        ones = _lowest(~bits)
        at += skipped
        yield at, at + ones
        bits >>= ones
        at += ones
