"""The expiry of a login."""

from __future__ import annotations

import pytest

from gateway.security import expiry
from gateway.security.expiry import Expiry
from tests.support.waiting import wait_until


class Wall:
    """A wall clock that the test sets, and the recorded calls."""

    def __init__(self) -> None:
        self.now = 1_000_000
        self.looks = 0
        self.ended = 0

    def make(self) -> Expiry:
        return Expiry(self.look, self.end)

    def look(self) -> int:
        self.looks += 1
        return self.now

    def end(self) -> None:
        self.ended += 1


async def test_it_ends_once() -> None:
    wall = Wall()
    wall.make().set(wall.now)
    await wait_until(lambda: wall.ended == 1)


async def test_a_clock_that_was_set_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "CHECK_S", 0.01)
    wall = Wall()
    one = wall.make()
    one.set(wall.now + 3_600_000)
    await wait_until(lambda: wall.looks > 5)
    assert wall.ended == 0
    wall.now += 3_600_000
    await wait_until(lambda: wall.ended == 1)


async def test_it_can_be_put_off_and_taken_back() -> None:
    wall = Wall()
    later, never = wall.make(), wall.make()
    for one, end in ((later, wall.now + 3_600_000), (never, None)):
        one.set(wall.now)
        one.set(end)
    told = wall.make()
    told.set(wall.now)
    await wait_until(lambda: wall.ended == 1)
    later.set(None)
