from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowcontrol.checkpoint import Checkpoint, UntrackedOffsetError


class Partition(RuleBasedStateMachine):
    """Offsets that are read with gaps, and settled in any order, one or several per call. The model lists all."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint = Checkpoint()
        self.read: list[int] = []
        self.open: set[int] = set()

    @property
    def prefix(self) -> int:
        """Return how many offsets from the first on are settled without a gap."""
        return next((at for at, offset in enumerate(self.read) if offset in self.open), len(self.read))

    @property
    def committable(self) -> int | None:
        return self.read[self.prefix - 1] + 1 if self.prefix else None

    @rule(gaps=st.lists(st.integers(1, 5), max_size=6))
    def track(self, gaps: list[int]) -> None:
        offsets, at = [], self.read[-1] if self.read else -1
        for gap in gaps:
            at += gap
            offsets.append(at)
        self.checkpoint.track(*offsets)
        self.read += offsets
        self.open.update(offsets)

    @rule(back=st.integers(0, 3), ahead=st.integers(1, 3))
    @precondition(lambda self: self.read)
    def track_backwards(self, back: int, ahead: int) -> None:
        last = self.read[-1]
        for offsets in ((last - back,), (last + ahead, last + ahead)):
            with pytest.raises(ValueError, match="tracked after"):
                self.checkpoint.track(*offsets)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def settle(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.open)))
        self.open.remove(offset)
        self.checkpoint.settle(offset)

    @rule(data=st.data())
    def settle_all(self, data: st.DataObject) -> None:
        offsets = data.draw(st.permutations(sorted(self.open)))[: data.draw(st.integers(0, 5))]
        self.open.difference_update(offsets)
        self.checkpoint.settle_all(offsets)

    @rule(offset=st.integers(0, 60))
    def settle_what_is_not_open(self, offset: int) -> None:
        if offset not in self.open:
            with pytest.raises(UntrackedOffsetError):
                self.checkpoint.settle(offset)
            with pytest.raises(UntrackedOffsetError):
                self.checkpoint.settle_all([*self.open, offset])

    @invariant()
    def is_as_the_model(self) -> None:
        checkpoint = self.checkpoint
        assert checkpoint.committable == self.committable
        assert set(checkpoint.open) == self.open
        assert checkpoint.outstanding == len(self.open)
        assert checkpoint.span == len(self.read) - self.prefix
        assert checkpoint.end == (self.read[-1] + 1 if self.read else 0)


TestPartition = Partition.TestCase
TestPartition.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_an_offset_settles_once_and_only_if_tracked() -> None:
    checkpoint = Checkpoint()
    for offset in (3, 7, 9):
        checkpoint.track(offset)
    checkpoint.settle(7)
    assert checkpoint.committable is None
    for wrong in (7, 8, 2):
        with pytest.raises(UntrackedOffsetError):
            checkpoint.settle(wrong)
    assert set(checkpoint.open) == {3, 9}
    assert (checkpoint.outstanding, checkpoint.span) == (2, 3)
    checkpoint.settle(3)
    assert checkpoint.committable == 8
    with pytest.raises(UntrackedOffsetError):
        checkpoint.settle(3)


@pytest.mark.parametrize("offset", [4, 5])
def test_tracking_goes_forward_only(offset: int) -> None:
    checkpoint = Checkpoint()
    checkpoint.track(5)
    with pytest.raises(ValueError, match="tracked after"):
        checkpoint.track(offset)
    checkpoint.settle(5)
    with pytest.raises(ValueError, match="tracked after"):
        checkpoint.track(offset)
    checkpoint.track(6)


def test_a_long_open_head_costs_no_time() -> None:
    """Settling takes constant time however many offsets are settled after an open one."""
    checkpoint = Checkpoint()
    for offset in range(200_000):
        checkpoint.track(offset)
    for offset in range(1, 200_000):
        checkpoint.settle(offset)
        assert checkpoint.committable is None
    checkpoint.settle(0)
    assert checkpoint.committable == 200_000
    assert checkpoint.outstanding == 0


@pytest.mark.parametrize("wrong", [[3, 5], [3, 4], [8]])
def test_many_are_settled_all_or_none(wrong: list[int]) -> None:
    checkpoint = Checkpoint()
    for offset in (3, 4, 7):
        checkpoint.track(offset)
    checkpoint.settle(4)
    with pytest.raises(UntrackedOffsetError):
        checkpoint.settle_all(wrong)
    assert (checkpoint.committable, checkpoint.outstanding, checkpoint.span) == (None, 2, 3)
    checkpoint.settle_all([])
    assert checkpoint.committable is None
    checkpoint.settle_all([7, 3])
    assert checkpoint.committable == 8
