"""Open offsets, and the text that says which they are."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcontrol.offsets import BLOCK, LEDGER, LEDGER_LIMIT, OffsetSet, read_ledger, write_ledger

OFFSETS = st.one_of(st.integers(0, 3000), st.integers(0, 1 << 50))
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "discard"]), OFFSETS, st.just(1)),
        st.tuples(st.sampled_from(["add_range", "discard_range"]), OFFSETS, st.integers(0, 2500)),
    )
)


def set_of(*offsets: int) -> OffsetSet:
    opened = OffsetSet()
    for offset in offsets:
        opened.add(offset)
    return opened


def offsets_of(opened: OffsetSet) -> set[int]:
    return {offset for begin, end in opened.runs() for offset in range(begin, end)}


@given(CHANGES)
def test_a_set_of_offsets_is_a_set(changes: list[tuple[str, int, int]]) -> None:
    opened, model = OffsetSet(), set[int]()
    for change, offset, length in changes:
        many = range(offset, offset + length)
        if change == "add":
            opened.add(offset)
            model.add(offset)
        elif change == "discard":
            assert opened.discard(offset) == (offset in model)
            model.discard(offset)
        elif change == "add_range":
            opened.add_range(offset, offset + length)
            model.update(many)
        else:
            assert opened.discard_range(offset, offset + length) == len(model.intersection(many))
            model.difference_update(many)
        assert len(opened) == len(model)
        assert opened.first == min(model, default=None)
        assert offset in opened or offset not in model
    assert offsets_of(opened) == model
    assert opened.blocks == len({offset // BLOCK for offset in model})
    twin = opened.copy()
    twin.add(1 << 51)
    assert offsets_of(opened) == model


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
    """Too much is done again then; never is anything lost."""
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
    """The bounds that docs/amqp.md states: how many settled offsets come again. A number: any half of so many."""
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
