from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcontrol.checkpoint import Checkpoint, UntrackedOffsetError

OFFSETS = st.lists(st.integers(1, 50), min_size=1, max_size=60).map(
    lambda gaps: [sum(gaps[: n + 1]) - 1 for n in range(len(gaps))]
)


@given(st.data())
def test_commits_the_settled_prefix_and_nothing_else(data: st.DataObject) -> None:
    offsets = data.draw(OFFSETS)
    settling = data.draw(st.permutations(offsets))
    checkpoint = Checkpoint()
    for offset in offsets:
        checkpoint.track(offset)
    settled: set[int] = set()
    committed: int | None = None
    for offset in settling:
        settled.add(offset)
        told = checkpoint.settle(offset)
        prefix = [known for n, known in enumerate(offsets) if settled.issuperset(offsets[: n + 1])]
        expected = prefix[-1] + 1 if prefix else None
        assert told == (expected if expected != committed else None)
        committed = expected
        assert checkpoint.committable == committed
        assert checkpoint.outstanding == len(offsets) - len(settled)
    assert committed == offsets[-1] + 1


@given(OFFSETS, st.randoms(use_true_random=False))
def test_reading_goes_on_while_settling(offsets: list[int], random: object) -> None:
    checkpoint, waiting, told = Checkpoint(), [], [0]
    for offset in offsets:
        checkpoint.track(offset)
        waiting.append(offset)
        while waiting and random.random() < 0.6:  # type: ignore[attr-defined]
            commit = checkpoint.settle(waiting.pop(random.randrange(len(waiting))))  # type: ignore[attr-defined]
            if commit is not None:
                assert commit > told[-1]  # a commit never goes back
                assert all(commit <= open_offset for open_offset in waiting)  # and never covers what is open
                told.append(commit)
        assert checkpoint.outstanding == len(waiting)


def test_an_offset_settles_once_and_only_if_tracked() -> None:
    checkpoint = Checkpoint()
    for offset in (3, 7, 9):
        checkpoint.track(offset)
    assert checkpoint.settle(7) is None
    for wrong in (7, 8, 2):
        with pytest.raises(UntrackedOffsetError):
            checkpoint.settle(wrong)
    assert 7 not in checkpoint
    assert 9 in checkpoint
    assert (checkpoint.outstanding, checkpoint.span) == (2, 3)
    assert checkpoint.settle(3) == 8
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
    """The front is looked at in constant time however much was settled behind it."""
    checkpoint = Checkpoint()
    for offset in range(200_000):
        checkpoint.track(offset)
    for offset in range(1, 200_000):
        assert checkpoint.settle(offset) is None
    assert checkpoint.settle(0) == 200_000
    assert checkpoint.outstanding == 0


@given(st.data())
def test_many_are_settled_as_one_by_one(data: st.DataObject) -> None:
    offsets = data.draw(OFFSETS)
    order = data.draw(st.permutations(offsets))
    together, alone = Checkpoint(), Checkpoint()
    for offset in offsets:
        together.track(offset)
        alone.track(offset)
    while order:
        size = data.draw(st.integers(1, len(order)))
        run, order = order[:size], order[size:]
        told = [commit for offset in run if (commit := alone.settle(offset)) is not None]
        assert together.settle_all(run) == (told[-1] if told else None)
        assert (together.committable, together.span) == (alone.committable, alone.span)
        assert together.outstanding == len(order)


@pytest.mark.parametrize("wrong", [[3, 5], [3, 4], [8]])
def test_many_are_settled_all_or_none(wrong: list[int]) -> None:
    checkpoint = Checkpoint()
    for offset in (3, 4, 7):
        checkpoint.track(offset)
    assert checkpoint.settle(4) is None
    with pytest.raises(UntrackedOffsetError):
        checkpoint.settle_all(wrong)
    assert (checkpoint.committable, checkpoint.outstanding, checkpoint.span) == (None, 2, 3)
    assert checkpoint.settle_all([]) is None
    assert checkpoint.settle_all([7, 3]) == 8
