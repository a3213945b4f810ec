"""Files that others replace."""

from __future__ import annotations

from pathlib import Path


def stamp(path: Path) -> object:
    """Return what differs after the file was replaced or changed, or can be read no longer."""
    try:
        status = path.stat()
    except OSError as error:
        return error.errno
    return status.st_ino, status.st_mtime_ns, status.st_size
