"""The demo's processes: the gateway with its broker, and the Spark job."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)
READY_POLL_S: Final = 0.05


class ProcessError(Exception):
    """A process of the demo ended or did not get ready; the text says which and where its log is."""


def _die_with_parent() -> None:
    # In the child between fork and exec: nothing but the system call.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Process:
    """A child in a session of its own, so that Ctrl-C reaches the demo alone and the order of stopping is ours."""

    def __init__(self, name: str, argv: list[str], log: Path, ready_file: Path) -> None:
        self.name = name
        self.ready_file = ready_file
        self.log = log
        self._argv = argv
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; its standard error goes to the log."""
        self.ready_file.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    async def lines(self) -> AsyncIterator[bytes]:
        """What it prints on its standard output, line by line, until it ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield line

    async def ready(self, timeout: float) -> dict[str, Any]:
        """Wait for the ready file and read it; ProcessError when the process ends before."""
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            while not self.ready_file.exists():
                if asyncio.get_running_loop().time() > deadline:
                    raise ProcessError(f"{self.name} was not ready within {timeout:g} s; see {self.log}")
                await asyncio.wait((ended,), timeout=READY_POLL_S)
                if ended.done():
                    raise ProcessError(f"{self.name} ended with {ended.result()}: {self._last_words()}")
        finally:
            ended.cancel()
        found: dict[str, Any] = json.loads(self.ready_file.read_text() or "{}")
        return found

    @property
    def running(self) -> bool:
        """Whether it lives."""
        return self._process is not None and self._process.returncode is None

    async def stop(self, timeout: float) -> int | None:
        """SIGTERM, wait, SIGKILL at the end of `timeout` seconds; the exit code."""
        process = self._process
        if process is None:
            return None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), timeout)
            except TimeoutError:
                process.kill()
                await process.wait()
        return process.returncode

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"no output; see {self.log}"


def gateway(directory: Path, addresses: dict[str, str]) -> Process:
    """`trivium up` with the embedded broker."""
    ready = directory / "demo" / "gateway.json"
    argv = [sys.executable, "-m", "gateway", "up", "--ready-file", str(ready), "--data-dir", str(directory)]
    for flag, address in addresses.items():
        argv += [f"--{flag}", address]
    return Process("gateway", argv, directory / "demo" / "gateway.log", ready)


def spark(directory: Path, bootstrap: str, trigger: str) -> Process:
    """`trivium spark run max-temperature`."""
    ready = directory / "demo" / "spark.json"
    log = directory / "demo" / "spark.log"
    argv = [sys.executable, "-m", "gateway", "spark", "run", "max-temperature", "--bootstrap-servers", bootstrap]
    argv += ["--trigger", trigger, "--ready-file", str(ready), "--checkpoint", str(directory / "demo" / "checkpoint")]
    argv += ["--log-file", str(log), "--die-with-parent"]
    return Process("Spark", argv, log, ready)
