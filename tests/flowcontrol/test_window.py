"""The AMQP link window: random walks never leave the bounds and always recover."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcontrol.window import FIRST_MEAN, Window, WindowError


class Link:
    """A sender that obeys: it uses credit one message at a time."""

    def __init__(self, limit: int) -> None:
        self.window = Window(limit)
        self.credit = 0
        self.flows = 0

    def top_up(self, room: int) -> int:
        grant = self.window.top_up(self.credit, room)
        self.credit += grant
        self.flows += grant > 0
        return grant


steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 100_000)),
        st.tuples(st.just("settle"), st.integers(1, 50)),
        st.tuples(st.just("room"), st.integers(0, 8 << 20)),
    ),
    max_size=300,
)


@given(st.integers(1, 2000), steps)
def test_random_walks(limit: int, walk: list[tuple[str, int]]) -> None:
    link = Link(limit)
    room = 4 << 20
    for what, number in walk:
        before = link.credit
        if what == "send" and link.credit:
            link.credit -= 1
            link.window.arrive(number)
            before = link.credit
        elif what == "settle":
            link.window.settle(min(number, link.window.unsettled))
        elif what == "room":
            room = number
        grant = link.top_up(room)
        assert grant >= 0
        assert link.credit == before + grant  # never taken back
        if grant:
            assert link.credit + link.window.unsettled <= link.window.size(room) <= limit
    # Whatever happened: once everything is answered the sender has credit.
    link.window.settle(link.window.unsettled)
    link.top_up(room)
    assert link.credit >= 1


def test_the_formula() -> None:
    window = Window(1000)
    assert window.size(4 << 20) == 1000
    assert window.size(100 * 1024) == 100
    assert window.size(0) == 1
    for _ in range(200):
        window.arrive(65536)
        window.settle()
    assert 65000 < window.mean <= 65536
    assert window.size(4 << 20) == 64


def test_the_average_weighs_a_sixteenth() -> None:
    window = Window(10)
    window.arrive(1024 + 160)
    assert window.mean == FIRST_MEAN + 10


@pytest.mark.parametrize(
    ("credit", "unsettled", "grant"),
    [(0, 0, 100), (51, 0, 0), (50, 0, 50), (0, 99, 1), (1, 98, 0), (0, 100, 0), (0, 150, 0), (120, 0, 0)],
)
def test_grants_of_half_a_window_or_when_nothing_is_left(credit: int, unsettled: int, grant: int) -> None:
    window = Window(100)
    for _ in range(unsettled):
        window.arrive(1024)
    assert window.top_up(credit, 1 << 30) == grant


def test_steady_work_costs_two_flows_per_window() -> None:
    link = Link(1000)
    link.top_up(4 << 20)
    for _ in range(10_000):
        link.credit -= 1
        link.window.arrive(1024)
        link.window.settle()
        link.top_up(4 << 20)
    assert link.flows <= 21


def test_what_does_not_add_up_raises() -> None:
    window = Window(10)
    with pytest.raises(WindowError):
        window.settle(1)
    window.arrive(5)
    with pytest.raises(WindowError):
        window.settle(2)
    with pytest.raises(WindowError):
        window.settle(-1)
    with pytest.raises(WindowError):
        window.arrive(-1)
    with pytest.raises(WindowError):
        window.top_up(-1, 100)
    with pytest.raises(ValueError, match="window"):
        Window(0)
    assert window.unsettled == 1


@given(st.integers(1, 2000), st.integers(0, 100_000), st.integers(1, 300))
def test_a_run_counts_as_its_messages_would(before: int, size: int, count: int) -> None:
    together, one_by_one = Window(1000), Window(1000)
    for window in (together, one_by_one):
        window.arrive(before)
    together.arrive_run(count, count * size)
    for _ in range(count):
        one_by_one.arrive(size)
    assert together.unsettled == one_by_one.unsettled == count + 1
    assert together.mean == pytest.approx(one_by_one.mean, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("count", "size"), [(0, 10), (-1, 10), (1, -1)])
def test_a_run_that_does_not_add_up(count: int, size: int) -> None:
    with pytest.raises(WindowError):
        Window(10).arrive_run(count, size)
