"""Waits for conditions that nobody announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], what: str, limit_s: float, step_s: float = 0.02) -> None:
    """Check a condition every `step_s` until it is true. Raises TimeoutError, which says `what` was waited for."""
    try:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(step_s)
    except TimeoutError:
        raise TimeoutError(f"{what}: not within {limit_s:g} s") from None
