"""Freezing a process with SIGSTOP, which takes effect with a delay and in each thread separately."""

import os
import signal
import time
from pathlib import Path

from tests.support.waiting import wait_until

LIMIT_S = 60.0


def freeze(pid: int) -> None:
    """Stop a process; this blocks until every thread of it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + LIMIT_S
    while not _all_stopped(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not stop")
        time.sleep(0.001)


async def until_frozen(pid: int) -> None:
    """Wait until every thread of a process has stopped."""
    await wait_until(lambda: _all_stopped(pid))


def _all_stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    try:
        return all(path.read_text().rpartition(")")[2].split()[0] == "T" for path in threads)
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
