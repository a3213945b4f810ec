"""A wait for Kafka ends when Kafka is silent, not when it is slow."""

import asyncio
import math

import pytest

from gateway.kafka.cluster.topic_queries import SilenceLimit

SILENCE_S = 0.01


class Waiting:
    """A wait for an answer that never comes, with a clock that the test moves."""

    def __init__(self, limit_s: float = math.inf) -> None:
        self.now = 0.0
        self.silence_limit = SilenceLimit(lambda: self.now, SILENCE_S)
        self.task = asyncio.ensure_future(self._wait(limit_s))

    async def _wait(self, limit_s: float) -> None:
        async with self.silence_limit.bound(limit_s):
            await asyncio.Event().wait()


async def test_an_answer_extends_the_wait() -> None:
    silent, slow, limited = Waiting(), Waiting(), Waiting(SILENCE_S)
    await asyncio.gather(*(asyncio.wait((one.task,), timeout=0) for one in (silent, slow, limited)))  # all have started
    for one in (silent, slow, limited):
        one.now = SILENCE_S * 1.5
    slow.silence_limit.answered()
    limited.silence_limit.answered()
    for ended in (silent, limited):
        with pytest.raises(TimeoutError):
            await ended.task
    assert not slow.task.done()
    slow.now = SILENCE_S * 3
    with pytest.raises(TimeoutError):
        await slow.task
    assert slow.silence_limit.silent_s == pytest.approx(SILENCE_S * 1.5)


async def test_an_answer_in_time_ends_the_wait() -> None:
    silence_limit = SilenceLimit(asyncio.get_running_loop().time)
    assert silence_limit.silent_s == math.inf
    async with silence_limit.bound():
        silence_limit.answered()
    assert silence_limit.silent_s < math.inf


async def test_a_wait_can_be_cancelled() -> None:
    waiting = Waiting()
    await asyncio.wait((waiting.task,), timeout=0)
    waiting.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.task
