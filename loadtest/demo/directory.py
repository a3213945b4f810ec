"""The demo's directory, locked for one run at a time, and its ports."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

USUAL_PORTS: Final = {"mqtt": 1883, "amqp": 5672, "http": 8080, "management": 8081, "kafka": 9092}
ENDING_S: Final = 10.0  # longest time the processes of a killed run need to stop
_POLL_S: Final = 0.1


class InUseError(Exception):
    """Another run uses the directory. The message names it."""


class Directory:
    """`demo/` in the data directory: logs, ready files, Spark's checkpoint and the lock file.

    The demo's processes inherit the lock's file descriptor, so the lock is held until the last of them has ended.
    """

    def __init__(self, data: Path) -> None:
        """Create the directory if needed and lock it.

        Raises:
            InUseError: another demo uses it, or the processes of a killed one are still running.
            OSError: the directory cannot be written.
        """
        self.data = data.resolve()
        self.path = self.data / "demo"
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + ENDING_S
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(self.lock, 32, 0).decode(errors="replace").strip()
                if _is_running(holder) or time.monotonic() > deadline:
                    os.close(self.lock)
                    raise InUseError(
                        f"{self.data} is in use by another `make run` (process {holder or 'unknown'}): "
                        "stop it first, or pass another directory with --data-dir"
                    ) from None
                time.sleep(_POLL_S)  # that run was killed and its processes are still stopping
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock."""
        os.close(self.lock)


def _is_running(holder: str) -> bool:
    return holder.isdigit() and Path(f"/proc/{holder}").exists()
