"""Share records among takers: how many records they want, whose turn it is, and which takers keep too much.

A record goes to one taker of a pool: to the one with capacity that has waited longest. A taker may be in several pools,
but has a single turn. If things are bound to one taker each (partitions, for the order of their records), takers that
have more than an equal part lose the surplus.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound="Taker[Any]")
P = TypeVar("P", bound="TakerPool[Any]")


class Taker(Generic[P]):
    """Takes records of its pools while it has capacity.

    Invariant: it is in `free` of all of its pools while it is not `full`, else in none.

    Attributes:
        pools: the pools from which it gets records.
        full: has no capacity, until `wake`.
        served: the number of its last record; see `Turns`.
    """

    __slots__ = ("full", "pools", "served")

    def __init__(self) -> None:
        self.pools: list[P] = []
        self.full = False
        self.served = 0

    def selects(self, record: Any) -> bool:
        """Whether the taker wants this record, if it has capacity."""
        raise NotImplementedError

    def fill(self) -> None:
        """Mark the taker as without capacity; it gets no records until `wake`."""
        self.full = True
        for pool in self.pools:
            pool.free.pop(self, None)

    def wake(self) -> None:
        """Mark the taker as having capacity again, after all that have it already."""
        if self.full:
            self.full = False
            for pool in self.pools:
                pool.free[self] = None


class TakerPool(Generic[T]):
    """Takers of the same records.

    Invariant: `free` are those of `members` that are not full, in the order of their turns: the one that joined, was
    served or was woken last comes last.
    """

    __slots__ = ("free", "members")

    def __init__(self) -> None:
        self.members: dict[T, None] = {}
        self.free: dict[T, None] = {}

    def join(self, taker: T) -> None:
        """Add a taker that has capacity."""
        taker.pools.append(self)
        self.members[taker] = self.free[taker] = None

    def leave(self, taker: T) -> None:
        """Remove a taker; its `pools` do not change."""
        del self.members[taker]
        self.free.pop(taker, None)

    def next(self, record: Any) -> T | None:
        """Return the taker whose turn it is among those that select the record, or None."""
        for taker in self.free:
            if taker.selects(record):
                return taker
        return None


class Turns(Generic[T]):
    """The turns of the takers of many pools.

    Invariant: `served` of each taker is the number of its last record in one sequence, so no two are equal except 0.
    While all have capacity and select everything, no taker of a pool gets two records before another gets one.
    """

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def choose(self, pool: TakerPool[T], others: TakerPool[T] | None, record: Any) -> T | None:
        """Choose the taker of `pool` or `others` that was served longest ago, and count it as served."""
        found = pool.next(record)
        if others is not None:
            other = others.next(record)
            if other is not None and (found is None or other.served < found.served):
                found = other
        if found is not None:
            found.served = next(self._numbers)
            for one in found.pools:  # move it to the end
                del one.free[found]
                one.free[found] = None
        return found

    def serve(self, takers: Sequence[T], count: int) -> None:
        """Count the pool's next takers as served with `count` records in turn, at least one each."""
        turn = count % len(takers)
        for taker in (*takers[turn:], *takers[:turn]):
            taker.served = next(self._numbers)
            for one in taker.pools:
                del one.free[taker]
                one.free[taker] = None


def total_demand(pools: Iterable[TakerPool[T]], most: int, demand: Callable[[T], int | None]) -> int:
    """Return how many more records all takers want, at most `most`. A taker of several pools counts once.

    `demand` returns how many a taker wants, or None if it has capacity but wants none of the coming records. A taker
    with a demand of 0 is marked full: there may be thousands, and each is asked only once.
    """
    total = 0
    for pool in pools:
        without: list[T] = []
        for taker in pool.free:
            if taker.pools[0] is not pool:
                continue
            wanted = demand(taker)
            if wanted is None:
                continue
            if wanted <= 0:
                without.append(taker)
                continue
            total += wanted
            if total >= most:
                break
        for taker in without:
            taker.fill()
        if total >= most:
            return most
    return total


def surplus(keepers: Sequence[T | None], takers: int) -> list[int]:
    """Return the positions of the things that their keepers have beyond an equal part.

    `keepers` has the taker that each thing is bound to, or None. An equal part is 1 / `takers` of all things, rounded
    up.
    """
    share = -(-len(keepers) // takers)
    kept: dict[T, int] = {}
    found: list[int] = []
    for position, keeper in enumerate(keepers):
        if keeper is not None:
            count = kept[keeper] = kept.get(keeper, 0) + 1
            if count > share:
                found.append(position)
    return found
