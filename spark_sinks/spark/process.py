"""A job as a process: redirects its output, handles stop signals, and leaves no JVM behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1


class JobConsole:
    """The process's own standard output and error, kept apart from the output of Spark and its JVM.

    After `divert`, file descriptors 1 and 2 lead to the log file, also in the JVM, which inherits them; only output
    written through this class reaches the console.
    """

    def __init__(self) -> None:
        self._out = os.dup(1)
        self._err = os.dup(2)

    @property
    def terminal(self) -> int | None:
        """The file descriptor of the standard output if it is a terminal, else None."""
        return self._out if os.isatty(self._out) else None

    def divert(self, log_file: Path) -> None:
        """Append all other output to `log_file`, and create its directory."""
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
        """Restore file descriptors 1 and 2."""
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
    """Have the kernel send SIGTERM when the parent process (strictly: its thread) ends for any reason.

    Linux only. Spark's JVM needs no such call: it reads a pipe from this process and ends when the pipe closes.
    """
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent or parent == 1:  # the parent ended before the call
        raise SystemExit(0)


def on_stop(action: Callable[[], None]) -> None:
    """Call `action`, in the main thread, at SIGTERM or SIGINT."""

    def handler(_signal: int, _frame: FrameType | None) -> None:
        action()

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)


class StopRequest:
    """Whether the process was asked to stop; set by a signal handler, so it has no lock."""

    def __init__(self) -> None:
        self.made = False

    def comes(self, limit_s: float = 0.5) -> bool:
        """Whether it was asked to stop, or is within a moment.

        A service manager signals every process of a service, so the JVM may end before this process hears of it.
        """
        deadline = time.monotonic() + limit_s
        while not self.made and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.made


def end_jvm(limit_s: float) -> None:
    """End the JVM that this process started and wait for it; kill it after `limit_s`.

    A running JVM ends when the pipe that it reads is closed. One that was interrupted while it started does not (it
    cannot report its port, and stays), so SIGTERM is then sent to every child.
    """
    from pyspark import SparkContext  # noqa: PLC0415 - a job without Spark uses this module too

    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        process.stdin.close()
        running = [process.pid]
    else:
        running = children(os.getpid())
        for child in running:
            os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + limit_s
    killed = False
    while running := [child for child in running if _runs(child)]:
        if time.monotonic() > deadline and not killed:
            killed = True
            for child in running:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def children(process: int) -> list[int]:
    """Return the ids of a process's children that have not been waited for (Linux); none if it has ended."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):  # only this thread has ended
                pids += map(int, (thread / "children").read_text().split())
    return pids


def _runs(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == 0
    except ChildProcessError:  # already waited for
        return False
