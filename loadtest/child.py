"""Launches our child processes: replaces itself by the given command, which gets SIGTERM when its parent ends.

It is a file executed before the command, because the child must call prctl between fork and exec, where a parent with
threads may not run Python code. SIGTERM, not SIGKILL, lets the gateway and Spark stop cleanly.
Called as `python -I -S child.py PARENT_PID COMMAND [ARGUMENT...]`; imports only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

PARENT_IS_GONE = 125
PR_SET_PDEATHSIG = 1


def command_line(*command: str) -> list[str]:
    """Return a command line whose process gets SIGTERM when the thread that started it ends for any reason."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    """Have the kernel end this process with its parent, then execute the command."""
    import ctypes  # noqa: PLC0415 - only the child needs it

    parent, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # the parent ended before the call
        sys.exit(PARENT_IS_GONE)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
