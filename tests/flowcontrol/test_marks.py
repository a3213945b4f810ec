"""Marks of open offsets in a commit's metadata."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcontrol.marks import MARKS, MARKS_LIMIT, UNTRIED, Marks, read_marks, write_marks
from flowcontrol.numbers import pack, unpack
from flowcontrol.offsets import LEDGER, OffsetSet, read_ledger, write_ledger

OFFSETS = st.integers(0, 1 << 60)
TRIES = st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(lambda pair: (max(pair), min(pair)))
FEW = st.dictionaries(OFFSETS, TRIES, max_size=20)


@given(st.lists(st.integers(0, (1 << 63) - 1)))
def test_numbers_survive(numbers: list[int]) -> None:
    found = unpack(pack(numbers))
    assert found is not None
    assert list(found) == numbers


@given(OFFSETS, FEW, OFFSETS, OFFSETS)
def test_marks_survive(first: int, tries: dict[int, tuple[int, int]], begin: int, end: int) -> None:
    """Those from the committed offset on."""
    text = write_marks(first, Marks(tries, begin, end))
    found = read_marks(first, text)
    assert len(text) <= MARKS_LIMIT
    assert found.tries == {offset: tried for offset, tried in tries.items() if offset >= first}
    marked = range(max(begin, first), end)
    assert range(found.begin, found.end) == marked or not marked


@given(st.dictionaries(st.integers(0, 1_000_000), TRIES, max_size=300), st.integers(20, 200))
def test_marks_that_do_not_fit_lose_the_highest_offsets(tries: dict[int, tuple[int, int]], limit: int) -> None:
    text = write_marks(0, Marks(tries, 0, 5), limit)
    assert len(text) <= limit
    found = read_marks(0, text)
    kept = sorted(tries)[: len(found.tries)]
    assert found.tries == {offset: tries[offset] for offset in kept}
    assert (found.begin, found.end) == (0, 5)


def test_ten_thousand_records_of_a_lost_receiver_fit() -> None:
    tries = dict.fromkeys(range(5, 10_005), (1, 1))
    assert read_marks(3, write_marks(3, Marks(tries))).tries == tries


@given(st.sets(st.integers(0, 5000), min_size=1), FEW, st.integers(0, 5000))
def test_ledger_and_marks_do_not_disturb_each_other(
    opened: set[int], tries: dict[int, tuple[int, int]], end: int
) -> None:
    first, offsets = min(opened), OffsetSet()
    for offset in opened:
        offsets.add(offset)
    ledger, marks = write_ledger(offsets, 6000), write_marks(first, Marks(tries, 0, end))
    both = (ledger or LEDGER) + marks
    alone, together = read_ledger(first, ledger), read_ledger(first, both)
    assert (alone is None) == (together is None)
    assert (
        alone is None
        or together is None
        or (list(alone.open.runs()), alone.end)
        == (
            list(together.open.runs()),
            together.end,
        )
    )
    assert read_marks(first, both) == read_marks(first, marks)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mine",
        MARKS,
        MARKS + "!!!",
        MARKS + "é",
        LEDGER + MARKS,
        MARKS + pack([1 << 70]),
        MARKS + pack([0, 1 << 62]),
    ],
)
def test_what_others_commit_has_no_marks(text: str) -> None:
    assert read_marks(7, text).tries == {}
    assert read_marks(7, text).end <= 7


def test_impossible_attempts_end_the_list() -> None:
    """A delivery-count has 32 bits, and no more attempts can fail than were made."""
    good = [0, 0, 1, 2, 1]
    for bad in ([1, 1 << 31, 0], [1, 1, 2], [1 << 62, 1, 1]):
        assert read_marks(0, MARKS + pack([*good, *bad, 1, 1, 1])).tries == {1: (2, 1)}
    assert UNTRIED == (0, 0)
