"""The files of users, one a line, `#` starts a comment: read strictly, and new lines for them.

The password file is amqtt's, `name:hash`. amqtt's own reader logs a malformed line as it is, and such a line is most
likely a password in clear: so the file is judged here first, and only one without fault reaches the plugin.

The SCRAM file has `name:SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>`. What follows the name is RFC 5803's
form, which PostgreSQL keeps too (`pg_authid.rolpassword`). A user has a line for each mechanism.
"""

from __future__ import annotations

import binascii
import hashlib
import importlib.util
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.config import ConfigError
from gateway.security.identity import is_principal
from gateway.security.saslprep import saslprep
from gateway.security.scram import MECHANISMS, MINIMUM_ITERATIONS, ScramCredential, derive, digest_size


def read_entries(path: Path, key: str) -> Iterator[tuple[str, str]]:
    """The place of each line for errors, and the line; ConfigError, which names `key`, for what is no text file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path} is not UTF-8 text") from None
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if entry and not entry.startswith("#"):
            yield f"{key}: {path} line {number}", entry


ARGON2: Final = ("$argon2id$", "$argon2i$", "$argon2d$")
SHA_512_CRYPT: Final = "$6$"
"""What older releases of amqtt wrote; its plugin checks it by Python's `crypt`, which 3.13 does not have any more."""


def read_password_file(path: Path, key: str) -> dict[str, str]:
    """The names and hashes of a password file, which `key` of the configuration names in errors.

    Raises:
        ConfigError: unreadable or malformed; names the line, never its text.
    """
    users: dict[str, str] = {}
    for where, entry in read_entries(path, key):
        name, colon, hashed = entry.partition(":")
        if not colon or not name or not hashed:
            raise ConfigError(f"{where}: expected name:hash")
        if hashed.startswith(SHA_512_CRYPT):
            if importlib.util.find_spec("crypt") is None:
                raise ConfigError(f"{where}: this Python cannot check SHA-512 crypt; use Argon2")
        elif not hashed.startswith(ARGON2):
            raise ConfigError(f"{where}: the hash is neither Argon2 nor SHA-512 crypt")
        if name in users:
            raise ConfigError(f"{where}: the name stands twice")
        users[name] = hashed
    return users


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
