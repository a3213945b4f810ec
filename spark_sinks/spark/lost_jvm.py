"""Says why a job's JVM has ended: its last error is in the log, while Python only sees a closed connection."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JNetworkError

LAST: Final = 1 << 20
"""The bytes at the end of the log that are searched."""
_ERROR: Final = re.compile(rb"java\.lang\.(?:\w+Error|OutOfMemoryError)\b[^\r\n]*")
_MEMORY: Final = "run.driver_memory gives it more memory, a smaller run.max_offsets_per_trigger needs less"


def reason(error: BaseException, log_file: Path | None, since: int) -> str | None:
    """Return why the JVM has ended, with the setting that helps; None if `error` does not mean that it has.

    Args:
        error: what ended the job.
        log_file: the log to which the JVM writes.
        since: the size of the log when the job started.
    """
    if not isinstance(error, Py4JNetworkError | ConnectionError):
        return None
    errors = [] if log_file is None else _ERROR.findall(_end(log_file, since))
    if not errors:
        return "its JVM has ended; the system may have killed it for its memory"
    last = errors[-1].decode(errors="replace").strip()
    return f"its JVM has ended: {last}" + (f"; {_MEMORY}" if "OutOfMemoryError" in last else "")


def _end(log_file: Path, since: int) -> bytes:
    with log_file.open("rb") as log:
        log.seek(max(since, log.seek(0, os.SEEK_END) - LAST))
        return log.read()
