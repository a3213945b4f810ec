"""The name of this gateway among those that share a Kafka cluster; it survives a restart."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

FILE: Final = "gateway-id"


class GatewayIdentity:
    """The gateway's name, from a file in its data directory that one process at a time locks.

    A gateway that restarts with the same directory knows that its predecessor is dead and need not wait for its
    heartbeats to stop. If another process locks the file, or it cannot be written, the name is valid for this process
    only.
    """

    def __init__(self, directory: Path) -> None:
        """Read the name from `directory`, or create one."""
        self.incarnation = secrets.token_hex(4)  # identifies this process
        self._directory = directory
        self._held: int | None = None
        self.name = self._take(directory) or secrets.token_hex(8)  # identifies the gateway

    def _take(self, directory: Path) -> str | None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            held = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = os.read(held, 64).decode("ascii", "replace").strip()
            if not name:
                name = secrets.token_hex(8)
                os.write(held, name.encode())
        except OSError:
            os.close(held)
            return None
        self._held = held
        return name

    def file(self, name: str) -> Path | None:
        """Return a file for the gateway's next process; None if that process will have another name."""
        return self._directory / name if self._held is not None else None

    def close(self) -> None:
        """Release the name for another process."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
