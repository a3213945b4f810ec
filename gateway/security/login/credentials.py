"""Credentials, and the interface of password checks.

Separate from the plugins (`amqtt_plugins`), whose import takes a twentieth of the CPU time of a start.
"""

from __future__ import annotations

import base64
from typing import Final, Protocol

import msgspec

WORKERS: Final = 2  # threads: a plugin that blocks (LDAP) leaves one for the others; Argon2 takes 20 ms of a core
CHECKS_AT_ONCE: Final = 8  # per thread; further checks wait before their time-out starts


class Credentials(msgspec.Struct, frozen=True):
    """A client's user name and password. The repr does not show the password."""

    user: str
    password: str
    client_id: str = ""
    peer: str = ""

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r}, password=***, peer={self.peer!r})"

    __str__ = __repr__


def name_and_password(credentials: str) -> tuple[str, str] | None:
    """Decode Basic credentials [RFC 7617]; None if they are malformed."""
    try:
        user, colon, password = base64.b64decode(credentials.strip(), validate=True).decode().partition(":")
    except ValueError:  # also from binascii and Unicode
        return None
    return (user, password) if colon else None


class Passwords(Protocol):
    """Checks passwords."""

    errors: int  # checks without an answer

    async def start(self) -> None:
        """Prepare for checks; raises ConfigError, which names the setting, on failure."""

    async def check(self, credentials: Credentials) -> bool:
        """Return whether the password is correct; False on any doubt. Raises Unavailable."""
        ...

    async def stop(self) -> None:
        """Close."""
