"""FairQueue: no address delays another, however many attempts it has; cancelled waiters lose no turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.security.fair_queue import Busy, FairQueue


class Handshakes:
    """Attempts that hold their turn until the test ends them; `order` is the order of the turns."""

    def __init__(self, **limits: int) -> None:
        self.turns = FairQueue(**{"at_once": 4, "of_address": 2, "waiting_of_address": 100, "waiting": 1000, **limits})
        self.order: list[str] = []
        self.inside: list[tuple[str, asyncio.Event]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, address: str, count: int = 1, *, known: bool = False) -> None:
        """Start attempts from an address."""
        self.tasks += [asyncio.create_task(self._attempt(address, known=known)) for _ in range(count)]
        await self.settle()

    async def _attempt(self, address: str, *, known: bool) -> None:
        async with self.turns.turn(address, known=known):
            self.order.append(address)
            leave = asyncio.Event()
            place = (address, leave)
            self.inside.append(place)
            try:
                await leave.wait()
            finally:
                self.inside.remove(place)

    async def settle(self) -> None:
        """Run a few turns of the event loop."""
        for _ in range(5):
            turn = asyncio.Event()
            asyncio.get_running_loop().call_soon(turn.set)
            await turn.wait()

    async def finish(self, count: int = 1) -> None:
        """End the first running attempts."""
        for _, leave in self.inside[:count]:
            leave.set()
        await self.settle()

    async def empty(self) -> None:
        """End all attempts, in turn."""
        while self.inside:
            await self.finish()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert (self.turns.waiting, self.turns.running, self.turns._lines) == (0, 0, {})


async def test_an_address_waits_for_no_others_attempts() -> None:
    handshakes = Handshakes()
    await handshakes.come("flood", 90)
    await handshakes.come("other", 90)
    assert handshakes.order == ["flood"] * 2 + ["other"] * 2
    await handshakes.come("third")
    await handshakes.finish()
    await handshakes.finish()
    assert "third" in handshakes.order[4:6]
    await handshakes.empty()
    assert len(handshakes.order) == 181


async def test_who_was_there_before_goes_before_strangers_but_not_for_ever() -> None:
    handshakes = Handshakes()
    await handshakes.come("stranger", 20)
    await handshakes.come("other", 2)
    await handshakes.come("friend", 20, known=True)
    await handshakes.come("friends friend", 20, known=True)
    for _ in range(8):
        await handshakes.finish()
    assert handshakes.order[4:].count("stranger") == 2
    assert set(handshakes.order[4:]) == {"friend", "friends friend", "stranger"}
    await handshakes.empty()


async def test_more_than_its_share_is_refused_at_once() -> None:
    handshakes = Handshakes(waiting_of_address=3, waiting=5)
    await handshakes.come("flood", 9)
    failed = [task for task in handshakes.tasks if task.done()]
    assert len(failed) == 4
    assert all(isinstance(task.exception(), Busy) for task in failed)
    await handshakes.come("other", 2)
    assert handshakes.order == ["flood"] * 2 + ["other"] * 2
    await handshakes.come("other", 2)
    with pytest.raises(Busy):
        async with handshakes.turns.turn("third", known=False):
            pass
    await handshakes.empty()


actions = st.lists(
    st.tuples(st.just("come"), st.sampled_from("abc"), st.booleans())
    | st.tuples(st.just("finish"), st.integers(0, 5), st.none())
    | st.tuples(st.just("cancel"), st.integers(0, 20), st.none()),
    max_size=40,
)


@given(actions)
def test_no_turn_is_lost_and_none_is_given_twice(steps: list[tuple[str, Any, Any]]) -> None:
    async def play() -> None:
        handshakes = Handshakes()
        for what, which, known in steps:
            if what == "come":
                await handshakes.come(which, known=known)
            elif what == "finish" and handshakes.inside:
                handshakes.inside[which % len(handshakes.inside)][1].set()
            elif what == "cancel" and handshakes.tasks:
                handshakes.tasks[which % len(handshakes.tasks)].cancel()
            addresses = [address for address, _ in handshakes.inside]
            assert len(addresses) <= 4
            assert all(addresses.count(one) <= 2 for one in addresses)
            await handshakes.settle()
            waiting = {one for one, line in handshakes.turns._lines.items() if line.waiting and line.running < 2}
            assert not waiting or handshakes.turns.running == 4, "a place is free, and somebody waits who may have it"
        await handshakes.empty()

    asyncio.run(play())


async def test_a_waiter_cancelled_in_the_turn_in_which_it_is_served_takes_no_turn() -> None:
    handshakes = Handshakes()
    await handshakes.come("a", 3)
    handshakes.inside[0][1].set()
    handshakes.tasks[2].cancel()
    await handshakes.settle()
    assert handshakes.tasks[0].exception() is None
    assert handshakes.tasks[2].cancelled()
    await handshakes.come("a")
    assert len(handshakes.inside) == 2
    await handshakes.empty()
