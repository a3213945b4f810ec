"""What a client offers to the plugins that check passwords, and how many they check at once.

Apart from the plugins (`amqtt_plugins`), whose import is a twentieth of the processor time of a start.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

WORKERS: Final = 2  # threads: a plugin that blocks (LDAP) leaves one for the others; Argon2 takes 20 ms of a core
CHECKS_AT_ONCE: Final = 8  # per thread; more wait their turn outside, where no time-out counts for them


class Credentials(msgspec.Struct, frozen=True):
    """What a client offers. Its repr shows no password."""

    user: str
    password: str
    client_id: str = ""
    peer: str = ""

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r}, password=***, peer={self.peer!r})"

    __str__ = __repr__


class Passwords(Protocol):
    """Who checks passwords.

    Attributes:
        errors: checks that had no answer.
        started: whether it can be asked.
    """

    errors: int
    started: bool

    async def start(self) -> None:
        """Make ready to be asked; ConfigError names the key of what cannot be."""

    async def check(self, credentials: Credentials) -> bool:
        """Whether the password is the user's; False on doubt. Raises Unavailable: whoever knows is away."""
        ...

    async def stop(self) -> None:
        """Close."""
