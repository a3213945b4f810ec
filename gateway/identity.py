"""Who this gateway is among those that share a Kafka, and that it stays so over a restart."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

FILE: Final = "gateway-id"


class GatewayIdentity:
    """The name of this gateway: from a file in its data directory, which one process at a time holds.

    A gateway that is started again on the same directory knows that its predecessor is dead, and need not wait for
    its silence. Where another process holds the file, or none can be written, the name is good for this process only.
    """

    def __init__(self, directory: Path) -> None:
        """Take the name of `directory`, or give it one."""
        self.incarnation = secrets.token_hex(4)  # of the process
        self._directory = directory
        self._held: int | None = None
        self.name = self._take(directory) or secrets.token_hex(8)  # of the gateway

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

    def beside(self, name: str) -> Path | None:
        """A file for what the gateway's next process should know; None when that will have another name."""
        return self._directory / name if self._held is not None else None

    def close(self) -> None:
        """Let another process have the name."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
