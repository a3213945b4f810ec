"""Current pauses and past episodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from flowcontrol.budget import Budget
from gateway.views.pauses import (
    APART_S,
    CONNECTION_BUDGET,
    KEPT,
    PROCESS,
    PROCESS_BUDGET,
    SHORTEST_S,
    SLOW_READER,
    Pause,
    Pauses,
)

EPOCH = 1_700_000_000.0


class Clock:
    """A monotonic and a wall clock, which the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return EPOCH + self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pauses(clock: Clock) -> Pauses:
    return Pauses(clock.monotonic, clock.wall)


Wait = Callable[[float], None]


@pytest.fixture
def lasts(clock: Clock, pauses: Pauses) -> Callable[..., None]:
    def pause(seconds: float, subject: str = "mqtt a", reason: str = SLOW_READER, then: float = 0.0) -> None:
        pauses.begin(reason, subject, subject)
        clock.now += seconds
        pauses.end(reason, subject)
        clock.now += then

    return pause


def test_a_pause_says_since_when_and_an_episode_for_how_long(clock: Clock, pauses: Pauses) -> None:
    clock.now = 3.0
    pauses.begin(SLOW_READER, "pump", "mqtt a")
    pauses.begin(SLOW_READER, "pump", "mqtt a")  # it is so already
    pauses.begin(CONNECTION_BUDGET, "pump", "mqtt a")
    clock.now = 5.0
    assert pauses.open() == {"mqtt a": [Pause(SLOW_READER, EPOCH + 3), Pause(CONNECTION_BUDGET, EPOCH + 3)]}
    assert pauses.since(SLOW_READER, "pump") == Pause(SLOW_READER, EPOCH + 3)
    assert pauses.episodes() == []
    pauses.end(SLOW_READER, "pump")
    pauses.end(SLOW_READER, "pump")
    (episode,) = pauses.episodes()
    assert (episode.subject, episode.reason) == ("mqtt a", SLOW_READER)
    assert (episode.began, episode.ended, episode.paused_s, episode.times) == (EPOCH + 3, EPOCH + 5, 2.0, 1)
    statistics = pauses.statistics()
    assert (statistics.pauses_total, statistics.paused_s_total) == ({SLOW_READER: 1}, {SLOW_READER: 2.0})
    assert (statistics.paused[CONNECTION_BUDGET], statistics.paused[SLOW_READER]) == (1, 0)
    pauses.end_all("pump", SLOW_READER, CONNECTION_BUDGET)
    assert pauses.open() == {}
    assert pauses.since(CONNECTION_BUDGET, "pump") is None


def test_what_flaps_is_one_episode_and_what_is_over_at_once_is_only_counted(
    pauses: Pauses, lasts: Callable[..., None]
) -> None:
    for _ in range(50):
        lasts(0.1, then=APART_S / 2)
    lasts(SHORTEST_S / 2)
    (episode,) = pauses.episodes()
    assert episode.times == 50
    assert episode.paused_s == pytest.approx(5.0)
    assert pauses.statistics().pauses_total == {SLOW_READER: 51}
    lasts(0.1, subject="mqtt b", then=2 * APART_S)
    lasts(0.1)
    assert [episode.subject for episode in pauses.episodes()] == ["mqtt a", "mqtt b", "mqtt a"]


def test_the_last_thousand_are_kept(pauses: Pauses, lasts: Callable[..., None]) -> None:
    for number in range(KEPT + 5):
        lasts(1.0, subject=f"mqtt {number}")
    episodes = pauses.episodes()
    assert len(episodes) == KEPT
    assert (episodes[0].subject, episodes[-1].subject) == ("mqtt 5", f"mqtt {KEPT + 4}")
    lasts(1.0, subject="mqtt 0")  # of which nothing is known any more
    assert pauses.episodes()[-1].times == 1


def test_a_budget_that_many_share_is_one_pause(clock: Clock, pauses: Pauses) -> None:
    budget = Budget(100, 10)
    budget.gate.subscribe(partial(pauses.gate_changed, PROCESS_BUDGET, PROCESS))
    budget.take(100)
    budget.take(100)
    clock.now = 4.0
    assert pauses.open() == {PROCESS: [Pause(PROCESS_BUDGET, EPOCH)]}
    budget.give(150, 2)
    assert [(episode.subject, episode.paused_s) for episode in pauses.episodes()] == [(PROCESS, 4.0)]
