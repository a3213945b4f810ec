"""Ports for servers that are started later, or again."""

from __future__ import annotations

import random
import socket
from typing import Final

PORTS: Final = (20_000, 32_000)
"""Below the kernel's range for client ports and for "any port": nobody is given one of these by chance."""


def free_port(usual: int | None = None) -> int:
    """Return the usual port of loopback if nobody has it, or else an unused one."""
    while True:
        port = random.randint(*PORTS) if usual is None else usual
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                usual = None
            else:
                return port
