"""Waiting for the end of a drain (part 2.6.7): the records stored until it began are sent, or Kafka is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

DRAIN_S: Final = 8.0
"""How long a drain waits without progress in reading before it is answered; the usual wait for Kafka."""
DRAIN_POLL_S: Final = (0.01, 0.2)
"""The first and the longest poll interval of a drain: thousands of links may wait for one busy Kafka."""


async def until_read(unread: Callable[[], int]) -> None:
    """Wait until `unread` returns 0, or has not changed for `DRAIN_S`."""
    loop = asyncio.get_running_loop()
    left, until = -1, 0.0
    pause, longest = DRAIN_POLL_S
    while now := unread():
        if now != left:
            left, until = now, loop.time() + DRAIN_S
        elif loop.time() > until:
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, longest)
