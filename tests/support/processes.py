"""Facts about a process from the kernel."""

from __future__ import annotations

from pathlib import Path


def maps(pid: int, file: Path) -> bool:
    """Whether a process has mapped the file into its memory."""
    return str(file) in Path(f"/proc/{pid}/maps").read_text()


def has_argument(pid: int, argument: str) -> bool:
    """Whether a process was started with the argument."""
    return argument.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
