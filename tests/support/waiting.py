"""Waiting for a condition by polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable
from typing import Any, Final

PAUSE_S: Final = 0.005
QUESTION_PAUSE_S: Final = 0.02
"""The pause after a condition that sends a request to a gateway or to Kafka, which costs both sides."""


async def wait_until(condition: Callable[[], Any], timeout: float = 60) -> float:
    """Wait until a function or coroutine function returns true; return the seconds it took, or raise TimeoutError."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        found = condition()
        asked = isawaitable(found)
        if await found if asked else found:
            return loop.time() - began
        if loop.time() - began > timeout:
            raise TimeoutError("the condition did not come true")
        await asyncio.sleep(QUESTION_PAUSE_S if asked else PAUSE_S)
