"""A job as a process: where its output goes, how it is stopped, and that it leaves no JVM behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from pyspark import SparkContext

_PR_SET_PDEATHSIG = 1


class Console:
    """The process's own standard output and error, kept apart from what Spark and its JVM write.

    From `divert` on, file descriptors 1 and 2 lead to the log file, also for the JVM that inherits them; only
    what is written here reaches the console.
    """

    def __init__(self) -> None:
        self._out = os.dup(1)
        self._err = os.dup(2)

    @property
    def terminal(self) -> int | None:
        """The standard output's descriptor where it is a terminal."""
        return self._out if os.isatty(self._out) else None

    def divert(self, log_file: Path) -> None:
        """Send everything else to `log_file` (appended; its directory is made)."""
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def report(self, line: bytes) -> None:
        """Write one line to the standard output."""
        _write_all(self._out, line + b"\n")

    def say(self, text: str) -> None:
        """Write one line to the standard error."""
        _write_all(self._err, text.encode() + b"\n")

    def close(self) -> None:
        """Put 1 and 2 back where they led at the start."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(self._out, 1)
        os.dup2(self._err, 2)
        os.close(self._out)
        os.close(self._err)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def die_with_parent() -> None:
    """Get SIGTERM when the process (strictly: the thread) that started this one ends, however it ends.

    Linux only. Spark's JVM needs nothing of the kind: it reads this process's pipe and ends with it.
    """
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent or parent == 1:  # it ended before the call
        raise SystemExit(0)


def on_stop(action: Callable[[], None]) -> None:
    """Call `action`, in the main thread, at SIGTERM or SIGINT."""

    def handler(_signal: int, _frame: FrameType | None) -> None:
        action()

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)


def end_jvm(limit_s: float) -> None:
    """End the JVM this process started and wait for it; kill it after `limit_s`.

    A JVM that serves ends when the pipe it reads is closed. One that was interrupted while it started does not
    (it fails to say where it listens, and stays), so every child is asked by SIGTERM then.
    """
    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        process.stdin.close()
        children = [process.pid]
    else:
        children = _children()
        for child in children:
            os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + limit_s
    killed = False
    while children := [child for child in children if _runs(child)]:
        if time.monotonic() > deadline and not killed:
            killed = True
            for child in children:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def _children() -> list[int]:
    """The ids of this process's children, not yet waited for (Linux)."""
    return [
        int(child)
        for thread in Path("/proc/self/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]


def _runs(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == 0
    except ChildProcessError:  # already waited for
        return False
