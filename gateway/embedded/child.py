"""The launcher of the Java children: executes the given command such that it cannot outlive its parent.

It is a program of its own because PR_SET_PDEATHSIG must be set in the child between fork and exec, where a threaded
parent must not run Python code (docs/adr/0002-child-launcher.md). The kernel sends the signal when the *thread* that
created the child ends, so start children from the main thread.

Called as `python -I -S child.py PARENT_PID COMMAND [ARGUMENT...]`; imports only the standard library.
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
    """Return the command line that runs `command` as our child and kills it when we end, for whatever reason."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    """Tie this process to its parent's life, raise the limit of open files, and execute the command."""
    import ctypes  # noqa: PLC0415 - only the child needs it

    parent, *command = arguments
    # To the hard limit: the usual soft limit of 1,024 is for programs that use select().
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # the parent died before prctl
        sys.exit(PARENT_IS_GONE)
    os.execvp(command[0], command)  # noqa: S606 - the purpose of this program


if __name__ == "__main__":
    main(sys.argv[1:])
