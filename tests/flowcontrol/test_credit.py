from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcontrol.credit import Inflight, WindowError


def test_counts() -> None:
    window = Inflight(3)
    window.take(2)
    assert (window.used, window.free) == (2, 1)
    window.release()
    assert (window.used, window.free) == (1, 2)


def test_neither_end_is_clamped() -> None:
    window = Inflight(2)
    window.take(2)
    with pytest.raises(WindowError):
        window.take()
    assert window.used == 2
    window.release(2)
    with pytest.raises(WindowError):
        window.release()
    assert window.used == 0


@pytest.mark.parametrize("count", [-1, -5])
def test_a_negative_count_is_not_the_other_direction(count: int) -> None:
    window = Inflight(10)
    window.take(5)
    with pytest.raises(WindowError):
        window.take(count)
    with pytest.raises(WindowError):
        window.release(count)
    assert window.used == 5


def test_needs_room_for_one() -> None:
    with pytest.raises(ValueError, match="at least"):
        Inflight(0)


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 6))))
def test_stays_within_its_bounds_on_any_walk(limit: int, steps: list[tuple[bool, int]]) -> None:
    window = Inflight(limit)
    used = 0
    for taking, count in steps:
        fits = used + count <= limit if taking else count <= used
        try:
            (window.take if taking else window.release)(count)
        except WindowError:
            assert not fits
        else:
            assert fits
            used += count if taking else -count
        assert window.used == used
        assert window.used + window.free == limit
