"""The fence at which a process waits after it has not run for a long time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.runtime.fence import Fence


@pytest.fixture
def times() -> list[float]:
    return [100.0]


async def test_it_shuts_after_the_process_was_stopped_too_long(times: list[float]) -> None:
    fence = Fence(lambda: times[0])
    shut: list[float] = []
    opened: list[bool] = []

    def opens() -> None:
        opened.append(fence.is_open)

    fence.listen(lambda: shut.append(times[0]))
    times[0] += 1000.0
    assert fence.now() == 1100.0
    assert fence.is_open, "nobody minds"
    fence.guard(5.0, "table")
    for _ in range(3):
        times[0] += 5.0
        fence.now()
    assert (fence.is_open, fence.allows("t"), shut) == (True, True, [])
    times[0] += 5.1
    waiting = asyncio.ensure_future(fence.wait_open())
    fence.now()
    assert (fence.is_open, fence.allows("t"), fence.allows("table"), shut) == (False, False, True, [1120.1])
    fence.call_when_open(opens)
    fence.call_when_open(opens)
    fence.now()
    assert fence.freezes == 1
    times[0] += 6.0
    fence.now()
    assert fence.freezes == 2, "once more while it is shut: what was read since is old"
    fence.open()
    await waiting
    assert opened == [True]
    fence.stop_guarding()


async def test_without_guards_the_fence_is_open(times: list[float]) -> None:
    fence = Fence(lambda: times[0])
    fence.guard(5.0, "table")
    times[0] += 6.0
    fence.now()
    fence.stop_guarding()
    times[0] += 60.0
    fence.now()
    assert fence.is_open
    await fence.wait_open()
