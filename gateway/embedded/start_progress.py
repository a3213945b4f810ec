"""Detect whether a starting broker makes progress: log recovery after a crash may take any time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LEAST_BYTES: Final = 64 * 1024
"""Bytes read or written between two checks below which a process counts as idle."""


class StartProgress:
    """Observes a starting broker from outside.

    Progress is an INFO line in its log (there is one for each partition log that is loaded; warnings may repeat without
    progress), or I/O of the process, since a large log is recovered silently. CPU time is no progress: a spinning
    broker would be waited for for ever.
    """

    def __init__(self, pid: int, log: Path, position: int) -> None:
        """`position` is where this start's lines begin in `log`."""
        self._io = Path(f"/proc/{pid}/io")
        self._log = log
        self._position = position
        self._bytes = 0
        self.last_line = ""

    def has_advanced(self) -> bool:
        """Whether the broker has made progress since the last call."""
        lines, self._position = read_log(self._log, self._position)
        self.last_line = lines[-1] if lines else self.last_line
        transferred = self._io_bytes()
        advanced = any(" INFO " in line for line in lines) or transferred - self._bytes >= LEAST_BYTES
        if advanced:
            self._bytes = transferred
        return advanced

    def _io_bytes(self) -> int:
        """Return the bytes that the process has read and written; 0 when the kernel does not report them."""
        try:
            counts = dict(line.split(": ") for line in self._io.read_text().splitlines())
        except (OSError, ValueError):
            return 0
        return int(counts.get("rchar", 0)) + int(counts.get("wchar", 0))


def read_log(path: Path, position: int) -> tuple[list[str], int]:
    """Return a log's lines from `position` on, and its end. After a rollover that is all lines."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(position if position <= size else 0)
            return file.read().decode(errors="replace").splitlines(), file.tell()
    except FileNotFoundError:
        return [], position
