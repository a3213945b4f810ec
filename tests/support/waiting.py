"""Waiting for what nobody announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable
from typing import Any, Final

PAUSE_S: Final = 0.005
QUESTION_PAUSE_S: Final = 0.02
"""After a question to a gateway or to Kafka, which costs both sides."""


async def wait_until(condition: Callable[[], Any], timeout: float = 60) -> float:
    """Wait until a function, or a coroutine function, says yes; the seconds it took. TimeoutError: it has not."""
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
