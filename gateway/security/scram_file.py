"""The SCRAM file: one `name:SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>` a line.

What follows the name is RFC 5803's form, which PostgreSQL keeps too (`pg_authid.rolpassword`). A user has a line for
each mechanism; `#` starts a comment.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gateway.config import ConfigError
from gateway.security.entry_file import read_entries
from gateway.security.identity import is_principal
from gateway.security.saslprep import saslprep
from gateway.security.scram import MECHANISMS, MINIMUM_ITERATIONS, ScramCredential, digest_size

_ENTRY: Final = re.compile(
    r"(?P<mechanism>[A-Z0-9-]+)\$(?P<iterations>[0-9]{1,9}):(?P<salt>[A-Za-z0-9+/=]+)"
    r"\$(?P<stored>[A-Za-z0-9+/=]+):(?P<server>[A-Za-z0-9+/=]+)"
)


class ScramUsers:
    """The users of a SCRAM file.

    An unknown name has a credential too, made up from the name and the file's first line: the same at every question,
    after a reload and on every gateway with that file. Its salt and iterations look like the first line's.
    """

    def __init__(self, credentials: Mapping[tuple[str, str], ScramCredential]) -> None:
        """Take over what was read, by mechanism and prepared name; at least one."""
        self._credentials = credentials
        first = next(iter(credentials.values()))
        self._secret = hashlib.sha512(first.stored_key + first.server_key).digest()
        self._pattern = first
        offered = {mechanism for mechanism, _ in credentials}
        self.mechanisms = tuple(mechanism for mechanism in MECHANISMS if mechanism in offered)
        """The mechanisms that somebody has a line for, best first."""

    def credential(self, mechanism: str, name: str) -> ScramCredential:
        """The credential of a prepared name, which is made up when there is no such user."""
        known = self._credentials.get((mechanism, name))
        # Made up in any case: the time it takes must not tell either.
        made_up = self._made_up(mechanism, name)
        return made_up if known is None else known

    def _made_up(self, mechanism: str, name: str) -> ScramCredential:
        size, length = digest_size(mechanism), len(self._pattern.salt)
        made = hashlib.shake_256(self._secret + f"{mechanism}\0{name}".encode()).digest(length + 2 * size)
        return ScramCredential(self._pattern.iterations, made[:length], made[length:-size], made[-size:])


def read_scram_file(path: Path, key: str) -> ScramUsers:
    """The users of a SCRAM file, which `key` of the configuration names in errors.

    Raises:
        ConfigError: unreadable, malformed or without a user; names the line, never its text.
    """
    credentials: dict[tuple[str, str], ScramCredential] = {}
    for where, entry in read_entries(path, key):
        try:
            user, credential = _parse(entry)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if user in credentials:
            raise ConfigError(f"{where}: the name stands twice with this mechanism")
        credentials[user] = credential
    if not credentials:
        raise ConfigError(f"{key}: {path} has no user")
    return ScramUsers(credentials)


def scram_line(name: str, mechanism: str, credential: ScramCredential) -> str:
    """The line of one user."""
    salt, stored, server = (
        binascii.b2a_base64(part, newline=False).decode()
        for part in (credential.salt, credential.stored_key, credential.server_key)
    )
    return f"{name}:{mechanism}${credential.iterations}:{salt}${stored}:{server}"


def _parse(entry: str) -> tuple[tuple[str, str], ScramCredential]:
    """Take a line apart; ValueError says what is wrong with it."""
    name, _, rest = entry.partition(":")
    found = _ENTRY.fullmatch(rest)
    if found is None or found["mechanism"] not in MECHANISMS:
        raise ValueError("expected name:SCRAM-SHA-256$iterations:salt$StoredKey:ServerKey, or SCRAM-SHA-512")
    try:
        prepared = saslprep(name, stored=True)
    except ValueError as error:
        raise ValueError(f"the name holds {error}") from None
    if not is_principal(prepared):
        raise ValueError("a name that is empty or means something else in the access list")
    try:
        salt, stored, server = (
            binascii.a2b_base64(found[part], strict_mode=True) for part in ("salt", "stored", "server")
        )
    except ValueError:
        raise ValueError("salt or keys are not base64") from None
    iterations = int(found["iterations"])
    if iterations < MINIMUM_ITERATIONS:
        raise ValueError(f"at least {MINIMUM_ITERATIONS} iterations are needed")
    size = digest_size(found["mechanism"])
    if len(stored) != size or len(server) != size:
        raise ValueError("the keys have not the mechanism's length")
    return (found["mechanism"], prepared), ScramCredential(iterations, salt, stored, server)
