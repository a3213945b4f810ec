"""The pauses of all four kinds go through every cell of their table, and are in the queues and reports it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowcontrol.bucket import RateLimit
from gateway.limits.brakes import Brake, Pace
from gateway.limits.rate_pauses import (
    TABLE,
    CreditPause,
    PauseEvent,
    PauseState,
    RatePause,
    ReadingPause,
    SendingPause,
    TaskPause,
)
from gateway.views.pauses import OUTGOING_RATES, RATES, pauses
from tests.support.limit_time import Time, limits_at

KINDS = ("reading", "task", "credit", "sending")


class Party:
    """One client with its pause, what it was told, and the questions that make it wait."""

    def __init__(self, kind: str, number: int, brakes: tuple[Brake, ...], time: Time) -> None:
        self.kind = kind
        self.name = f"{kind} {number}"
        self.reading: list[str] = []  # reasons for which it is not read
        self.resumed = 0
        pace = Pace(brakes, time)
        self.pause: RatePause
        if kind == "reading":
            self.pause = ReadingPause(pace, self.reading.append, self.reading.remove)
        elif kind == "task":
            self.pause = TaskPause(pace, self.name)
        elif kind == "credit":
            self.pause = CreditPause(pace, self.name)
        else:
            self.pause = SendingPause(pace, self.name, self._resumed)

    def _resumed(self) -> None:
        self.resumed += 1

    def ask(self) -> None:
        if isinstance(self.pause, CreditPause):
            self.pause.grant(3, 10.0, self._resumed, 0)
        else:
            self.pause.must_wait()

    @property
    def reasons(self) -> list[str]:
        """For which it is reported as paused."""
        reported = [pause.reason for pause in pauses.open().get(self.name, ())]
        return reported + self.reading


def brake(reason: str, time: Time) -> Brake:
    return Brake(RateLimit(10, 0, 1.0, time.now), reason, 0.2, time)


class Walk(RuleBasedStateMachine):
    """Clients of all kinds at one or two limits."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.time = limits_at(self.patch)
        self.brakes = (brake(RATES[0], self.time), brake(RATES[1], self.time))
        limits = (self.brakes[:1], self.brakes[1:], self.brakes)
        self.parties = [Party(kind, number, which, self.time) for kind in KINDS for number, which in enumerate(limits)]

    @rule(which=st.integers(0, 11), messages=st.integers(1, 30))
    def spend(self, which: int, messages: int) -> None:
        party = self.parties[which]
        if party.pause.state is not PauseState.ENDED:
            party.pause.spend(messages, 10 * messages)

    @rule(which=st.integers(0, 11))
    def ask(self, which: int) -> None:
        self.parties[which].ask()

    @rule(seconds=st.floats(0.01, 3.0))
    def let_time_pass(self, seconds: float) -> None:
        self.time.pass_to(self.time.now + seconds)

    @rule(which=st.integers(0, 11))
    def end(self, which: int) -> None:
        self.parties[which].pause.end()

    @invariant()
    def queues_and_reports_are_those_of_the_state(self) -> None:
        for party in self.parties:
            waits = [each.reason for each in self.brakes if party.pause in each._waiting]
            expected = [party.pause.reason] if party.pause.state is PauseState.WAITING else []
            assert waits == party.reasons == expected, party.name

    def teardown(self) -> None:
        self.time.pass_to(self.time.now + 1000.0)
        left = [party.name for party in self.parties if party.pause.state is PauseState.WAITING]
        for party in self.parties:
            party.pause.end()
        self.queues_and_reports_are_those_of_the_state()
        self.patch.undo()
        assert not left, "who waits gets a turn"
        assert not self.time.waits


TestWalk: Any = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def _indebted(party: Party) -> None:
    party.pause.spend(25, 0)
    party.ask()


REACH: dict[PauseState, Callable[[Party], None]] = {
    PauseState.FREE: lambda _: None,
    PauseState.WAITING: _indebted,
    PauseState.ENDED: lambda party: party.pause.end(),
}
EVENTS: dict[PauseEvent, Callable[[Party, Time], None]] = {
    PauseEvent.BLOCKED: lambda party, _: _indebted(party),
    PauseEvent.TURN: lambda _, time: time.pass_to(60.0),
    PauseEvent.END: lambda party, _: party.pause.end(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("state", "event"), [(state, event) for state, row in TABLE.items() for event in row])
def test_every_cell(kind: str, state: PauseState, event: PauseEvent, monkeypatch: pytest.MonkeyPatch) -> None:
    time = limits_at(monkeypatch)
    party = Party(kind, 0, (brake(OUTGOING_RATES[0], time),), time)
    REACH[state](party)
    assert party.pause.state is state
    EVENTS[event](party, time)
    assert party.pause.state is TABLE[state][event]
    assert party.reasons == ([OUTGOING_RATES[0]] if party.pause.state is PauseState.WAITING else [])
    party.pause.end()


def test_a_closed_connection_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What still comes for it, such as events that were held, must not put it into a queue again."""
    time = limits_at(monkeypatch)
    shared = brake(RATES[1], time)
    for kind in KINDS:
        party = Party(kind, 0, (shared,), time)
        party.pause.end()
        party.pause.spend(25, 0)
        party.ask()
        assert not party.reasons
    assert not shared.has_waiters
    assert not time.waits
