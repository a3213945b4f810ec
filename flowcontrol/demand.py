"""How those share records who would all take them: how many are wanted, whose turn it is, and who keeps what.

A record goes to one taker of a pool, to the one with capacity that has waited longest. A taker may be in several pools;
its turn is one, wherever it was served. What is kept to one taker (a partition, for the order of its records) is taken
from those that have more of it than an equal part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound="Taker[Any]")
P = TypeVar("P", bound="TakerPool[Any]")


class Taker(Generic[P]):
    """One that takes records of its pools, while it has capacity.

    Invariant: it is among `free` of each of its pools while it is not `full`, and else of none.

    Attributes:
        pools: whose records it gets.
        full: from "no capacity" until it is woken.
        served: the number of its last record; see `Turns`.
    """

    __slots__ = ("full", "pools", "served")

    def __init__(self) -> None:
        self.pools: list[P] = []
        self.full = False
        self.served = 0

    def selects(self, record: Any) -> bool:
        """Whether a record is for it, if it has capacity."""
        raise NotImplementedError

    def fill(self) -> None:
        """It has no capacity: it is not asked again before it is woken."""
        self.full = True
        for pool in self.pools:
            pool.free.pop(self, None)

    def wake(self) -> None:
        """It has capacity again, and comes behind those that have it already."""
        if self.full:
            self.full = False
            for pool in self.pools:
                pool.free[self] = None


class TakerPool(Generic[T]):
    """Takers of the same records.

    Invariant: `free` are those of `members` that are not full, in the order of their turn: who was served, came or was
    woken last is the last.
    """

    __slots__ = ("free", "members")

    def __init__(self) -> None:
        self.members: dict[T, None] = {}
        self.free: dict[T, None] = {}

    def join(self, taker: T) -> None:
        """A taker with capacity comes."""
        taker.pools.append(self)
        self.members[taker] = self.free[taker] = None

    def leave(self, taker: T) -> None:
        """It has left; the taker still names its pools."""
        del self.members[taker]
        self.free.pop(taker, None)

    def next(self, record: Any) -> T | None:
        """Whose turn it is among those that select a record; None: nobody's."""
        for taker in self.free:
            if taker.selects(record):
                return taker
        return None


class Turns(Generic[T]):
    """The turns of the takers of many pools.

    Invariant: `served` of the takers are the numbers of their last records, in one sequence: no two are equal but 0.
    While they have capacity and take everything, no taker of a pool gets two records before another has one.
    """

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def choose(self, pool: TakerPool[T], others: TakerPool[T] | None, record: Any) -> T | None:
        """The next taker for a record of `pool`, of `others` too: the one served longest ago. It counts as served."""
        found = pool.next(record)
        if others is not None:
            other = others.next(record)
            if other is not None and (found is None or other.served < found.served):
                found = other
        if found is not None:
            found.served = next(self._numbers)
            for one in found.pools:  # to the end of the turns
                del one.free[found]
                one.free[found] = None
        return found

    def serve(self, takers: Sequence[T], count: int) -> None:
        """Count takers of a pool whose turns are the next as served: `count` records in turn, one each at least."""
        turn = count % len(takers)
        for taker in (*takers[turn:], *takers[:turn]):
            taker.served = next(self._numbers)
            for one in taker.pools:
                del one.free[taker]
                one.free[taker] = None


def total_demand(pools: Iterable[TakerPool[T]], most: int, demand: Callable[[T], int | None]) -> int:
    """How many more records the takers would get together, at most `most`; one of many pools counts once.

    `demand`: of one taker; None: none of the records that are to come, though it has capacity. Those without any are
    full from now on: there may be thousands, and each is asked once.
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
    """Which of some things, each kept to a taker or to nobody, are above the equal part of theirs, by their positions.

    What is left to each of `takers` is at most one part in so many of all things, rounded up.
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
