"""Files that others replace."""

from __future__ import annotations

from pathlib import Path


def stamp(path: Path) -> object:
    """Return what differs after the file was replaced or changed, or can be read no longer."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_mtime_ns, found.st_size
