"""The launcher of our Java children: becomes the given command, which then cannot outlive its parent.

It runs as a file of its own, before the command, because this must be asked for in the child between fork and
exec, where a threaded parent may not run Python code (docs/adr/0002-child-launcher.md). The kernel sends the
signal when the *thread* that made the child ends: start children from the main thread.

Called as `python -I -S child.py PARENT_PID COMMAND [ARGUMENT...]`; imports nothing but the standard library.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

PARENT_IS_GONE = 125
PR_SET_PDEATHSIG = 1


def command_line(*command: str) -> list[str]:
    """Return what to execute so that `command` runs as our child and dies with us, whatever kills us."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    """Tie this process's life to its parent's, take all the open files there are, then become the command."""
    import ctypes  # noqa: PLC0415 - only the child needs it

    parent, *command = arguments
    # As many open files as we may have: the usual soft limit of 1,024 is for programs that use select().
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # it died before it was asked for
        sys.exit(PARENT_IS_GONE)
    os.execvp(command[0], command)  # noqa: S606 - the very purpose


if __name__ == "__main__":
    main(sys.argv[1:])
