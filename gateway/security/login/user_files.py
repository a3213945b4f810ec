"""User files: a strict reader, and new lines for them. One user per line; `#` starts a comment.

The password file has amqtt's format, `name:hash`, and lines of devices (`device_secrets`). amqtt's own reader logs
malformed lines, which are most likely passwords in clear text. So a file is validated here before any plugin reads it.

The SCRAM file has `name:SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>`. After the name it is the format of
RFC 5803, which PostgreSQL uses too (`pg_authid.rolpassword`). A user has one line per mechanism.
"""

from __future__ import annotations

import binascii
import hashlib
import importlib.util
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.security.identity import is_principal
from gateway.security.login.device_secrets import MARK, new_secret, parse_verifier, verifier_of
from gateway.security.login.saslprep import saslprep
from gateway.security.login.scram import MECHANISMS, MINIMUM_ITERATIONS, ScramCredential, derive, digest_size
from gateway.settings.config import ConfigError


def read_entries(path: Path, key: str) -> Iterator[tuple[str, str]]:
    """Yield each entry with its place for errors; raises ConfigError, which names `key`, if this is no text file."""
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
"""Written by older releases of amqtt; its plugin checks it with Python's `crypt`, which 3.13 no longer has."""


class PasswordFile(NamedTuple):
    """The content of a password file; a name is in one of both."""

    hashes: dict[str, str]  # of passwords, by the user's name
    devices: dict[str, bytes]  # digests of secrets, by the device's name


def read_password_file(path: Path, key: str) -> PasswordFile:
    """Read a password file.

    Raises ConfigError, with the setting `key` and the number of a malformed line, never its content.
    """
    users = PasswordFile({}, {})
    for where, entry in read_entries(path, key):
        name, colon, hashed = entry.partition(":")
        if not colon or not name or not hashed:
            raise ConfigError(f"{where}: expected name:hash")
        if name in users.hashes or name in users.devices:
            raise ConfigError(f"{where}: duplicate name")
        if hashed.startswith(MARK):
            users.devices[name] = _parse_device(where, name, hashed)
            continue
        if hashed.startswith(SHA_512_CRYPT):
            if importlib.util.find_spec("crypt") is None:
                raise ConfigError(f"{where}: this Python cannot check SHA-512 crypt; use Argon2")
        elif not hashed.startswith(ARGON2):
            raise ConfigError(f"{where}: the hash is neither Argon2 nor SHA-512 crypt, nor a device's ({MARK})")
        users.hashes[name] = hashed
    return users


def _parse_device(where: str, name: str, verifier: str) -> bytes:
    if not is_principal(name):
        raise ConfigError(f"{where}: the name is reserved by the access list")
    try:
        return parse_verifier(verifier)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


_ENTRY: Final = re.compile(
    r"(?P<mechanism>[A-Z0-9-]+)\$(?P<iterations>[0-9]{1,9}):(?P<salt>[A-Za-z0-9+/=]+)"
    r"\$(?P<stored>[A-Za-z0-9+/=]+):(?P<server>[A-Za-z0-9+/=]+)"
)


class ScramUsers:
    """The users of a SCRAM file.

    An unknown name gets a made-up credential, derived from the name and the file's first line: the same on every
    request, after a reload and on every gateway with that file. Its salt length and iterations are those of that line.
    """

    def __init__(self, credentials: Mapping[tuple[str, str], ScramCredential]) -> None:
        """`credentials` are by mechanism and prepared name; at least one is needed."""
        self._credentials = credentials
        first = next(iter(credentials.values()))
        self._secret = hashlib.sha512(first.stored_key + first.server_key).digest()
        self._pattern = first
        offered = {mechanism for mechanism, _ in credentials}
        self.mechanisms = tuple(mechanism for mechanism in MECHANISMS if mechanism in offered)
        """The mechanisms for which the file has a user, best first."""

    def credential(self, mechanism: str, name: str) -> ScramCredential:
        """Return the credential of a prepared name, or a made-up one if there is no such user."""
        # Made up in any case, so that the response time does not reveal which names exist.
        size, length = digest_size(mechanism), len(self._pattern.salt)
        made = hashlib.shake_256(self._secret + f"{mechanism}\0{name}".encode()).digest(length + 2 * size)
        made_up = ScramCredential(self._pattern.iterations, made[:length], made[length:-size], made[-size:])
        return self._credentials.get((mechanism, name), made_up)


def read_scram_file(path: Path, key: str) -> ScramUsers:
    """Read the users of a SCRAM file, at least one. Raises ConfigError as `read_password_file`."""
    credentials: dict[tuple[str, str], ScramCredential] = {}
    for where, entry in read_entries(path, key):
        try:
            user, credential = _parse(entry)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if user in credentials:
            raise ConfigError(f"{where}: duplicate name with this mechanism")
        credentials[user] = credential
    if not credentials:
        raise ConfigError(f"{key}: {path} has no user")
    return ScramUsers(credentials)


def scram_line(name: str, mechanism: str, credential: ScramCredential) -> str:
    """Format the line of one user."""
    salt, stored, server = (
        binascii.b2a_base64(part, newline=False).decode()
        for part in (credential.salt, credential.stored_key, credential.server_key)
    )
    return f"{name}:{mechanism}${credential.iterations}:{salt}${stored}:{server}"


def _parse(entry: str) -> tuple[tuple[str, str], ScramCredential]:
    """Parse a line; the text of ValueError says what is wrong with it."""
    name, _, rest = entry.partition(":")
    match = _ENTRY.fullmatch(rest)
    if match is None or match["mechanism"] not in MECHANISMS:
        raise ValueError("expected name:SCRAM-SHA-256$iterations:salt$StoredKey:ServerKey, or SCRAM-SHA-512")
    try:
        prepared = saslprep(name, stored=True)
    except ValueError as error:
        raise ValueError(f"the name contains {error}") from None
    if not is_principal(prepared):
        raise ValueError("the name is empty or reserved by the access list")
    try:
        salt, stored, server = (
            binascii.a2b_base64(match[part], strict_mode=True) for part in ("salt", "stored", "server")
        )
    except ValueError:
        raise ValueError("salt or keys are not base64") from None
    iterations = int(match["iterations"])
    if iterations < MINIMUM_ITERATIONS:
        raise ValueError(f"at least {MINIMUM_ITERATIONS} iterations are needed")
    size = digest_size(match["mechanism"])
    if len(stored) != size or len(server) != size:
        raise ValueError("the keys have the wrong length for the mechanism")
    return (match["mechanism"], prepared), ScramCredential(iterations, salt, stored, server)


SALT_BYTES: Final = 16


def argon2_line(user: str, password: str) -> str:
    """Create a line of `security.password_file`, hashed as amqtt does. Raises ValueError for a bad name or password."""
    _check(user, password)
    return f"{user}:{Argon2Hasher().hash(password)}"


def new_device(name: str) -> tuple[str, str]:
    """Generate a device's secret; return it with its line of `security.password_file`. ValueError for a bad name."""
    _check_name(name)
    secret = new_secret()
    return secret, f"{name}:{verifier_of(secret)}"


def read_names(path: Path, key: str) -> list[str]:
    """Read the names of devices, one per line. Raises ConfigError, with `key` and the number of an unusable line."""
    names: dict[str, None] = {}
    for where, name in read_entries(path, key):
        try:
            _check_name(name)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if name in names:
            raise ConfigError(f"{where}: duplicate name")
        names[name] = None
    if not names:
        raise ConfigError(f"{key}: {path} has no name")
    return list(names)


def new_scram_line(user: str, password: str, mechanism: str, iterations: int) -> str:
    """Create a line of `security.scram_file` with a random salt. Raises ValueError if an argument cannot be used."""
    _check(user, password)
    if mechanism not in MECHANISMS:
        raise ValueError(f"the mechanism must be one of {', '.join(sorted(MECHANISMS))}")
    try:
        name = saslprep(user, stored=True)
    except ValueError as error:
        raise ValueError(f"the name contains {error}") from None
    _check(name, password)
    try:
        credential = derive(mechanism, password, secrets.token_bytes(SALT_BYTES), iterations)
    except ValueError as error:
        raise ValueError(f"the password or the number of iterations cannot be used: {error}") from None
    return scram_line(name, mechanism, credential)


def _check(user: str, password: str) -> None:
    """Raise ValueError for a name or password that the files cannot hold or no login can use."""
    _check_name(user)
    if not password:
        raise ValueError("the password is empty")


def _check_name(name: str) -> None:
    if not is_principal(name) or name != name.strip() or name.startswith("#") or ":" in name or not name.isprintable():
        raise ValueError("the name must be printable, without colon, outer spaces or leading #, and not reserved")
