"""The launcher of our child processes: becomes the given command, which is asked to stop when its parent ends.

It runs as a file of its own, before the command, because the signal must be asked for in the child between fork and
exec, where a parent with threads may not run Python code. SIGTERM and not SIGKILL: the gateway and Spark stop in order.
Called as `python -I -S child.py PARENT_PID COMMAND [ARGUMENT...]`; imports nothing but the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

PARENT_IS_GONE = 125
PR_SET_PDEATHSIG = 1


def command_line(*command: str) -> list[str]:
    """What to execute so that `command` gets SIGTERM when the thread that started it ends, however that happens."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    """Tie this process's life to its parent's, then become the command."""
    import ctypes  # noqa: PLC0415 - only the child needs it

    parent, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # it died before it was asked for
        sys.exit(PARENT_IS_GONE)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
