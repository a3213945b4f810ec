"""The AMQP link window: random walks never leave the bounds, and the sender always gets credit again."""

from __future__ import annotations

from collections import Counter, deque
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowcontrol.window import FIRST_MEAN, SHRINK, Window, WindowError


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
    # In any case: once everything is settled the sender has credit.
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
    together.arrive(count * size, count)
    for _ in range(count):
        one_by_one.arrive(size)
    assert together.unsettled == one_by_one.unsettled == count + 1
    assert together.mean == pytest.approx(one_by_one.mean, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("count", "size"), [(0, 10), (-1, 10), (1, -1)])
def test_a_run_that_does_not_add_up(count: int, size: int) -> None:
    with pytest.raises(WindowError):
        Window(10).arrive(size, count)


# The window that finds its size


class AnySender(RuleBasedStateMachine):
    """Any sender, any Kafka: the window stays within its bounds, and no more is granted than it allows."""

    @initialize(limit=st.integers(1, 2000), least=st.integers(1, 2000))
    def begin(self, limit: int, least: int) -> None:
        self.window = Window(limit, least)
        self.credit = 0
        self.room = 4 << 20

    @rule(room=st.integers(0, 8 << 20))
    def free(self, room: int) -> None:
        self.room = room

    @precondition(lambda self: self.credit)
    @rule(count=st.integers(1, 2000), size=st.integers(0, 5000))
    def send(self, count: int, size: int) -> None:
        count = min(count, self.credit)
        self.credit -= count
        self.window.arrive(count * size, count)

    @rule(count=st.integers(0, 2000), crowded=st.booleans())
    def settle(self, count: int, crowded: bool) -> None:
        before = self.window.most
        self.window.settle(min(count, self.window.unsettled), crowded=crowded)
        assert self.window.most >= before - before // SHRINK

    @rule()
    def top_up(self) -> None:
        grant = self.window.top_up(self.credit, self.room)
        self.credit += grant
        if grant:
            assert self.credit + self.window.unsettled <= self.window.size(self.room)
        assert self.credit + self.window.unsettled > 0, "whoever has nothing on the way may send"

    @invariant()
    def within_bounds(self) -> None:
        window = self.window
        assert 1 <= min(window.least, window.limit) <= window.most <= window.limit


TestAnySender = AnySender.TestCase
TestAnySender.settings = settings(max_examples=50)


def settle_round(window: Window, crowded: int) -> None:
    """Settle one round, a window of messages, the first `crowded` of them as crowded."""
    most = window.most
    window.arrive(most, most)
    window.settle(crowded, crowded=True)
    window.settle(most - crowded)


def test_a_window_grows_twofold_until_the_first_crowd_and_then_by_steps() -> None:
    window = Window(5000, 256)
    seen = [window.most]
    for crowded in (0, 0, 1, 1056, 792, 593, 0):
        settle_round(window, crowded)
        seen.append(window.most)
    assert seen == [256, 512, 1024, 1056, 792, 594, 626, 658]


def test_a_window_keeps_its_bounds() -> None:
    window = Window(300, 256)
    settle_round(window, 0)
    assert window.most == 300
    for _ in range(5):
        settle_round(window, window.most)
    assert window.most == 256
    fixed = Window(1000)
    settle_round(fixed, 1000)
    assert fixed.most == 1000
    assert Window(10, 256).most == 10


class Path:
    """Links that send all that they may to one partition: one batch is in flight, the others wait behind it."""

    def __init__(self, windows: list[Window], batch: int, late: int) -> None:
        self.windows = windows
        self.batch = batch
        self.credits = [0] * len(windows)
        self.settled = [0] * len(windows)
        self.waiting: deque[int] = deque()
        self.travelling: deque[list[int]] = deque(
            [[]] * late, maxlen=late + 1
        )  # what the links have sent, by when it arrives

    def answer(self) -> None:
        """Kafka has answered a batch."""
        batch = [self.waiting.popleft() for _ in range(min(self.batch, len(self.waiting)))]
        crowded = len(self.waiting) >= 2 * self.batch
        for link, count in Counter(batch).items():
            self.windows[link].settle(count, crowded=crowded)
            self.settled[link] += count
        sent: list[tuple[int, int]] = []
        for link, window in enumerate(self.windows):
            self.credits[link] += window.top_up(self.credits[link], 1 << 30)
            sent += [(number, link) for number in range(self.credits[link])]
            self.credits[link] = 0
        self.travelling.append([link for _, link in sorted(sent)])
        if len(self.travelling) == self.travelling.maxlen:
            for link in self.travelling.popleft():
                self.windows[link].arrive(100)
                self.waiting.append(link)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(("links", "batch"), [(1, 100), (1, 500), (3, 300), (4, 500), (12, 500)])
def test_links_that_share_a_partition_keep_it_busy_and_hardly_wait(links: int, batch: int, late: int) -> None:
    """Batches are full, only a few batches wait, and equal links get equal shares.

    Kafka's latency is the unit of time: one batch is on the way, whatever it takes. `late`: how many answers
    later what a link sends for one arrives.
    """
    least = 64
    path = Path([Window(20_000, least) for _ in range(links)], batch, late)
    for _ in range(300):
        path.answer()
    before = list(path.settled)
    waited = []
    for _ in range(200):
        path.answer()
        waited.append(len(path.waiting))
    shares = [now - then for now, then in zip(path.settled, before, strict=True)]
    assert sum(shares) >= 0.95 * 200 * batch, "as much as any window could bring"
    assert median(waited) <= 4 * batch
    assert sum(shares) ** 2 >= 0.98 * links * sum(share * share for share in shares), shares
