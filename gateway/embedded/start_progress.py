"""Whether a starting broker makes progress: after a crash it reads back its logs, for as long as that takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LEAST_BYTES: Final = 64 * 1024
"""Read or written since the last look, below which a process only idles."""


class StartProgress:
    """What a starting broker has done, from outside.

    Progress is a line of its log at level INFO (it names each log that it loads; warnings that are repeated are no
    progress), or input and output of the process: a large log is recovered without a word. CPU time is none: a
    broker that spins would be waited for for ever.
    """

    def __init__(self, pid: int, log: Path, position: int) -> None:
        """`position`: where the log of this start begins."""
        self._io = Path(f"/proc/{pid}/io")
        self._log = log
        self._position = position
        self._bytes = 0
        self.last_line = ""

    def made(self) -> bool:
        """Whether it got on since the last call."""
        lines, self._position = read_log(self._log, self._position)
        self.last_line = lines[-1] if lines else self.last_line
        moved = self._moved()
        got_on = any(" INFO " in line for line in lines) or moved - self._bytes >= LEAST_BYTES
        if got_on:
            self._bytes = moved
        return got_on

    def _moved(self) -> int:
        """Bytes that the process has read and written; 0 where the kernel does not tell."""
        try:
            counts = dict(line.split(": ") for line in self._io.read_text().splitlines())
        except (OSError, ValueError):
            return 0
        return int(counts.get("rchar", 0)) + int(counts.get("wchar", 0))


def read_log(path: Path, position: int) -> tuple[list[str], int]:
    """A log's lines from a position on, all when it was rolled over meanwhile; and where it ends."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(position if position <= size else 0)
            return file.read().decode(errors="replace").splitlines(), file.tell()
    except FileNotFoundError:
        return [], position
