"""Sets of open offsets, and their text form."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowcontrol.offsets import BLOCK, LEDGER, LEDGER_LIMIT, OffsetSet, read_ledger, write_ledger

OFFSETS = st.one_of(st.integers(0, 3000), st.integers(0, 1 << 50))


def set_of(*offsets: int) -> OffsetSet:
    opened = OffsetSet()
    for offset in offsets:
        opened.add(offset)
    return opened


def offsets_of(opened: OffsetSet) -> set[int]:
    return {offset for begin, end in opened.runs() for offset in range(begin, end)}


class Queue(RuleBasedStateMachine):
    """Offsets that are opened and settled, singly and in ranges; the model is a Python set."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = OffsetSet()
        self.model: set[int] = set()
        self.earlier: tuple[OffsetSet, set[int]] = (OffsetSet(), set())

    @rule(offset=OFFSETS)
    def add(self, offset: int) -> None:
        self.opened.add(offset)
        self.model.add(offset)
        assert offset in self.opened

    @rule(offset=OFFSETS)
    def discard(self, offset: int) -> None:
        assert self.opened.discard(offset) == (offset in self.model)
        self.model.discard(offset)
        assert offset not in self.opened

    @rule(offset=OFFSETS, length=st.integers(0, 2500))
    def add_range(self, offset: int, length: int) -> None:
        self.opened.add_range(offset, offset + length)
        self.model.update(range(offset, offset + length))

    @rule(offset=OFFSETS, length=st.integers(0, 2500))
    def discard_range(self, offset: int, length: int) -> None:
        many = range(offset, offset + length)
        assert self.opened.discard_range(offset, offset + length) == len(self.model.intersection(many))
        self.model.difference_update(many)

    @rule()
    def copy(self) -> None:
        """Continue with a copy: later changes must not affect the original."""
        opened, model = self.earlier
        assert offsets_of(opened) == model
        self.earlier = (self.opened.copy(), self.model.copy())

    @rule(behind=st.integers(1, 5000))
    @precondition(lambda self: self.model)
    def write_down_and_go_on(self, behind: int) -> None:
        """Another reader of the ledger has the same set."""
        first, end = min(self.model), max(self.model) + behind
        ledger = read_ledger(first, write_ledger(self.opened, end))
        if ledger is not None:  # else nothing is settled behind the first
            assert ledger.end == end
            self.opened = ledger.open
        else:
            assert len(self.model) == end - first

    @invariant()
    def is_as_the_model(self) -> None:
        opened, model = self.opened, self.model
        assert len(opened) == len(model)
        assert opened.first == min(model, default=None)
        assert opened.blocks == len({offset // BLOCK for offset in model})

    def teardown(self) -> None:
        assert offsets_of(self.opened) == self.model
        runs = list(self.opened.runs())
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(runs))


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@given(st.sets(OFFSETS, min_size=1, max_size=200), st.integers(1, 5000))
def test_a_ledger_says_what_is_open(offsets: set[int], behind: int) -> None:
    end = max(offsets) + behind
    text = write_ledger(set_of(*offsets), end)
    assert len(text) <= LEDGER_LIMIT
    ledger = read_ledger(min(offsets), text)
    if ledger is None:
        assert text == ""
        assert len(offsets) == end - min(offsets)  # nothing is settled behind the first
        return
    assert offsets_of(ledger.open) == offsets
    assert ledger.end == end


@given(st.sets(st.integers(0, 100_000), min_size=1), st.integers(20, 200))
def test_a_ledger_that_does_not_fit_says_that_more_is_open(offsets: set[int], limit: int) -> None:
    """Then too many offsets are open, never too few."""
    text = write_ledger(set_of(*offsets), 200_000, limit)
    assert len(text) <= limit
    ledger = read_ledger(min(offsets), text)
    if ledger is not None:
        assert {offset for offset in offsets if offset < ledger.end} <= offsets_of(ledger.open)


@pytest.mark.parametrize(
    ("opened", "again"),
    [
        (range(0, 60_000, 2), 0),  # every other one
        (range(0, 50_000_000, 10_007), 0),
        (range(0, 10_000_000, 1003), 0),
        (10_000, 0),
        (1_000_000, 500_000),  # all but the first ones
    ],
    ids=["alternating", "rare", "often", "random", "too much"],
)
def test_how_much_a_ledger_remembers(opened: range | int, again: int) -> None:
    """The bounds in docs/amqp.md: how many settled offsets are read again. An int means a random half of as many."""
    if isinstance(opened, int):
        opened = random.Random(1).sample(range(opened), opened // 2)
    chosen = set_of(*opened)
    end = max(opened) + 1000
    ledger = read_ledger(min(opened), write_ledger(chosen, end))
    assert ledger is not None
    assert len(ledger.open) + end - ledger.end - len(chosen) <= again
    assert ledger.end <= end


@pytest.mark.parametrize(
    "text",
    ["", "mine", LEDGER, LEDGER + "!!!", LEDGER + "AAAA", LEDGER + "é", LEDGER + write_ledger(set_of(0), 9)[5:]],
)
def test_what_others_commit_is_no_ledger(text: str) -> None:
    assert read_ledger(7, text) is None


def test_a_ledger_that_claims_too_much_is_none() -> None:
    huge = OffsetSet()
    huge.add(0)
    text = write_ledger(huge, 1 << 61)
    assert read_ledger(0, text) is not None  # a long settled run costs nothing
    many = OffsetSet()
    many.add_range(0, BLOCK * ((1 << 17) + 2))
    assert read_ledger(0, write_ledger(many, BLOCK * (1 << 18))) is None
