"""Work over what a client can make many of, in turns of the event loop: everybody else is served in between.

Ten thousand links that end, sessions that expire or subscribers of one message are each cheap; all of them in one turn
would hold up every other client. ADR 0030.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Final

import structlog

log = structlog.get_logger(__name__)

SLICE_S: Final = 0.01
"""How long one piece of work may keep the loop. A turn has a few such pieces at most, and Kafka's answers, which every
client waits for, come in between."""


class Slice:
    """Tells when a piece of work has had its share of a turn; for loops in tasks: `if slice.is_over: await ...`."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        """It begins now."""
        self._until = time.perf_counter() + SLICE_S

    @property
    def is_over(self) -> bool:
        """Whether it is time to let others go on."""
        return time.perf_counter() >= self._until

    async def rest(self) -> None:
        """Let others go on when it is time to, and begin the next slice."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + SLICE_S


def in_turns(steps: Iterator[object]) -> None:
    """Do steps: some of them now, the others in later turns of the loop, a slice in each.

    A step that raises is our bug: it is logged, and what a generator had still to do is not done. Whoever asks must not
    depend on all steps being done when this returns.
    """
    until = time.perf_counter() + SLICE_S
    try:
        for _ in steps:
            if time.perf_counter() >= until:
                asyncio.get_running_loop().call_soon(in_turns, steps)
                return
    except Exception:
        log.exception("work in turns failed", work=getattr(steps, "__qualname__", type(steps).__name__))
