"""New lines for the password file and the SCRAM file."""

from __future__ import annotations

import secrets
from typing import Final

from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.security.identity import is_principal
from gateway.security.saslprep import saslprep
from gateway.security.scram import MECHANISMS, derive
from gateway.security.scram_file import scram_line

SALT_BYTES: Final = 16


def argon2_line(user: str, password: str) -> str:
    """A line of `security.password_file`, as amqtt's own tools hash it.

    Raises:
        ValueError: a name or a password that cannot be used.
    """
    _check(user, password)
    return f"{user}:{Argon2Hasher().hash(password)}"


def new_scram_line(user: str, password: str, mechanism: str, iterations: int) -> str:
    """A line of `security.scram_file` with a salt of its own.

    Raises:
        ValueError: a name, a password, a mechanism or a number that cannot be used.
    """
    _check(user, password)
    if mechanism not in MECHANISMS:
        raise ValueError(f"the mechanism must be one of {', '.join(sorted(MECHANISMS))}")
    try:
        name = saslprep(user, stored=True)
    except ValueError as error:
        raise ValueError(f"the name holds {error}") from None
    _check(name, password)
    try:
        credential = derive(mechanism, password, secrets.token_bytes(SALT_BYTES), iterations)
    except ValueError as error:
        raise ValueError(f"the password or the number of iterations cannot be used: {error}") from None
    return scram_line(name, mechanism, credential)


def _check(user: str, password: str) -> None:
    """Refuse what the files cannot hold or no login could offer."""
    if not is_principal(user) or user != user.strip() or user.startswith("#") or ":" in user or not user.isprintable():
        raise ValueError("the name must be printable, without a colon or surrounding space, and neither # nor reserved")
    if not password:
        raise ValueError("the password is empty")
