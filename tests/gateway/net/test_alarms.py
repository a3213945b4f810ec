"""Alarms: never late, at most one slot early, nothing left after a cancel, no turn of the loop too long."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from gateway.net import alarms
from gateway.net.alarms import WAKES_PER_TURN, WIDTH_S, Alarms
from tests.support.waiting import wait_until


class Sleeper:
    def __init__(self, woken: list[Sleeper], then: Callable[[], None] = lambda: None) -> None:
        self._woken = woken
        self._then = then

    def wake(self) -> None:
        self._woken.append(self)
        self._then()


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_each_is_woken_once_when_its_slot_begins() -> None:
    times = Alarms()
    woken: list[Sleeper] = []
    late, due = Sleeper(woken), Sleeper(woken)
    times.set(now() + 100, late)
    times.set(now(), due)
    assert len(times) == 2
    await wait_until(lambda: bool(woken))
    await wait_until(lambda: len(times) == 1)
    assert woken == [due]
    times.cancel(now() + 100 - WIDTH_S * 2, late)  # in another slot: nothing happens
    assert len(times) == 1


async def test_a_slot_begins_before_the_deadlines_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms, "WIDTH_S", 0.25)
    times = Alarms()
    woken: list[Sleeper] = []
    wanted = now() + 1
    begins = int(wanted / 0.25) * 0.25
    woken_at: list[float] = []
    for at in (begins, begins + 0.1, begins + 0.24):
        times.set(at, Sleeper(woken, lambda: woken_at.append(now())))
    assert len(times) == 1
    await wait_until(lambda: len(woken) == 3)
    assert min(woken_at) > begins - 0.01  # a loop may be a tick early
    assert len(times) == 0


async def test_cancelled_alarms_leave_nothing_behind() -> None:
    times = Alarms()
    sleepers = [Sleeper([]) for _ in range(3)]
    at = now() + 1000
    for sleeper in sleepers:
        times.set(at, sleeper)
    assert len(times) == 1
    for sleeper in sleepers:
        times.cancel(at, sleeper)
        times.cancel(at, sleeper)
    assert len(times) == 0


async def test_a_crowd_is_woken_in_several_turns_and_may_cancel_and_ask_again() -> None:
    times = Alarms()
    woken: list[Sleeper] = []
    at = now()
    again = at + 500
    crowd = [Sleeper(woken) for _ in range(3 * WAKES_PER_TURN)]

    def change() -> None:
        times.set(again, restless)
        for sleeper in crowd:
            if sleeper not in woken:
                times.cancel(at, sleeper)

    restless = Sleeper(woken, change)
    for sleeper in [*crowd, restless]:
        times.set(at, sleeper)
    turns: list[int] = []

    def look() -> None:
        turns.append(len(woken))
        if restless not in woken:
            asyncio.get_running_loop().call_soon(look)

    look()
    await wait_until(lambda: restless in woken and len(times) == 1)
    assert len(set(woken)) == len(woken)
    assert max(after - before for before, after in itertools.pairwise(turns)) <= WAKES_PER_TURN
    times.cancel(again, restless)
    assert len(times) == 0
