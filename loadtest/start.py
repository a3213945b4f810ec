"""Starts processes so that none is left behind when we are cancelled meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any


async def start_process(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Like `asyncio.create_subprocess_exec`, but ends the process and waits for it if cancelled meanwhile."""
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, **options))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        process = await starting
        if process.returncode is None:
            process.terminate()
        await process.wait()
        raise
