"""Starts processes so that none is left behind when we are cancelled meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any, Final

STOP_S: Final = 20.0


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


class Child:
    """A process in its own session, which can be started again; its output goes to a file."""

    _process: asyncio.subprocess.Process | None = None

    async def spawn(self, *command: str, log: Path, **options: Any) -> None:
        """Start it."""
        with log.open("ab") as out:
            self._process = await start_process(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, **options
            )

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def exit_code(self) -> int | None:
        """The last process's exit code; None while it runs."""
        return None if self._process is None else self._process.returncode

    async def ended(self) -> int:
        """Wait until it has ended; return its exit code."""
        assert self._process is not None, "it was not started"
        return await self._process.wait()

    async def kill(self) -> None:
        """Send SIGKILL, like a crash."""
        await self._end(signal.SIGKILL)

    async def stop(self, limit_s: float = STOP_S) -> None:
        """Send SIGTERM, and SIGKILL after `limit_s`."""
        try:
            await asyncio.wait_for(self._end(signal.SIGTERM), limit_s)
        except TimeoutError:
            await self.kill()

    def send_signal(self, how: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(how)

    async def _end(self, how: signal.Signals) -> None:
        self.send_signal(how)
        if self._process is not None:
            await self._process.wait()
