"""Offsets of a partition that are still open, however far apart they lie, and how to write down which they are.

A queue's records settle in any order, and some nobody may want for days. Which of them are open is kept in blocks of
`BLOCK` offsets, only those in which one is, so that what it costs depends on the blocks and not on what lies between.

`write_ledger` makes a short text of it, for the metadata of a committed offset (Kafka takes 4,096 bytes): the lengths
of the runs of open and settled offsets in turn, beginning with the committed one, which is open. Each is a varint
(LEB128), all of them raw deflate, and that base64url without padding, behind `LEDGER`.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

BLOCK: Final = 1024
"""Offsets of a block: few enough that a block with one open offset costs some 250 bytes, many enough that a million
open ones in a row cost a quarter of a megabyte."""

LEDGER: Final = "trivium-settled-1:"
LEDGER_LIMIT: Final = 4000
"""Characters of a ledger: below Kafka's default of `offset.metadata.max.bytes`, 4,096."""

EXACT: Final = 32_768  # runs written as they are; what is behind them is written in whole blocks
RUNS_LIMIT: Final = 1 << 19
BLOCKS_LIMIT: Final = 1 << 17  # nobody who writes a ledger keeps that many


class OffsetSet:
    """A set of offsets from 0 on.

    Invariant: what was added and not discarded since; it has as many blocks as have an offset in them.
    """

    __slots__ = ("_blocks", "_count", "_keys", "_queued")

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}  # by number of the block, a bit for each offset; never 0
        self._keys: list[int] = []  # a heap of all its keys, and of some that are no more
        self._queued: set[int] = set()  # what is in the heap
        self._count = 0

    def copy(self) -> OffsetSet:
        """Another set with the same offsets."""
        twin = OffsetSet()
        twin._blocks = self._blocks.copy()
        twin._keys = self._keys.copy()
        twin._queued = self._queued.copy()
        twin._count = self._count
        return twin

    def add(self, offset: int) -> None:
        """Add an offset that may be there already."""
        self._put(offset // BLOCK, 1 << offset % BLOCK)

    def add_range(self, begin: int, end: int) -> None:
        """Add all offsets from `begin` to before `end`."""
        for key, mask in _masks(begin, end) if begin < end else ():
            self._put(key, mask)

    def discard(self, offset: int) -> bool:
        """Remove an offset; whether it was there."""
        return self._take(offset // BLOCK, 1 << offset % BLOCK)

    def discard_range(self, begin: int, end: int) -> int:
        """Remove all offsets from `begin` to before `end`; how many there were."""
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
        """How many blocks there are: what the set costs."""
        return len(self._blocks)

    @property
    def first(self) -> int | None:
        """The lowest offset; None when there is none."""
        keys, blocks = self._keys, self._blocks
        while keys:
            key = keys[0]
            if key in blocks:
                return key * BLOCK + _lowest(blocks[key])
            self._queued.remove(heapq.heappop(keys))
        return None

    def runs(self, *, exact: int | None = None) -> Iterator[tuple[int, int]]:
        """The runs of offsets in order, each from where to before which.

        Args:
            exact: after so many runs, whole blocks in which there is an offset; None is never.
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
        bits = self._blocks.get(key)
        if bits is None:
            bits = 0
            if key not in self._queued:
                self._queued.add(key)
                heapq.heappush(self._keys, key)
        self._blocks[key] = bits | mask
        self._count += (mask & ~bits).bit_count()

    def _take(self, key: int, mask: int) -> bool:
        bits = self._blocks.get(key, 0)
        found = bits & mask
        if found:
            self._count -= found.bit_count()
            if found == bits:
                del self._blocks[key]
            else:
                self._blocks[key] = bits ^ found
        return found != 0


class Ledger(NamedTuple):
    """What is settled behind a committed offset.

    Attributes:
        open: the offsets that are not settled.
        end: of the offsets before this one all others are; about later ones it says nothing.
    """

    open: OffsetSet
    end: int


def write_ledger(opened: OffsetSet, end: int, limit: int = LEDGER_LIMIT) -> str:
    """The text of a ledger that begins at the first open offset.

    When it does not fit, it says less: first that whole blocks are open in which some offset is, then nothing about
    the end. Whoever reads it takes too many offsets for open then, never too few.

    Args:
        opened: not empty.
        end: behind all of them; everything before it that is not open is settled.
        limit: the most characters.

    Returns:
        "" when there is nothing to say.
    """
    exact = EXACT
    while True:
        lengths = _lengths(opened, end, exact)
        text = _pack(lengths)
        if len(text) <= limit:
            return text if len(lengths) > 1 else ""
        if exact > 1:
            exact //= 2
            continue
        while len(text) > limit and lengths:
            lengths = lengths[: len(lengths) // 2]
            text = _pack(lengths)
        return text if len(lengths) > 1 else ""


def read_ledger(first: int, text: str) -> Ledger | None:
    """What a text says that was committed with offset `first`; None when it is not a ledger."""
    if not text.startswith(LEDGER):
        return None
    packed = text[len(LEDGER) :]
    try:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        data = inflate.decompress(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)), RUNS_LIMIT)
    except (zlib.error, binascii.Error, ValueError):
        return None
    opened = OffsetSet()
    at, is_open = first, True
    for length in _varints(data):
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
    """The lengths of the runs, open and settled in turn, up to `end`."""
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


def _pack(lengths: Iterable[int]) -> str:
    data = bytearray()
    for length in lengths:
        rest = length
        while rest > 0x7F:
            data.append(rest & 0x7F | 0x80)
            rest >>= 7
        data.append(rest)
    deflate = zlib.compressobj(4, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = deflate.compress(bytes(data)) + deflate.flush()
    return LEDGER + base64.urlsafe_b64encode(packed).rstrip(b"=").decode()


def _varints(data: bytes) -> Iterator[int]:
    """The numbers; one that is cut off is left out."""
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value
            value = shift = 0
        elif shift > 63:
            yield -1
            return


def _masks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for key in itertools.takewhile(lambda key: key * BLOCK < end, itertools.count(begin // BLOCK)):
        base = key * BLOCK
        yield key, _mask(max(begin - base, 0), min(end - base, BLOCK))


def _mask(begin: int, end: int) -> int:
    return (1 << end) - (1 << begin)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _runs_of(bits: int) -> Iterator[tuple[int, int]]:
    """The runs of ones in a block."""
    at = 0
    while bits:
        skipped = _lowest(bits)
        bits >>= skipped
        ones = _lowest(~bits)
        at += skipped
        yield at, at + ones
        bits >>= ones
        at += ones
