"""amqtt's password file, read strictly: one `name:hash` a line, `#` starts a comment.

amqtt's own reader logs a malformed line as it is, and such a line is most likely a password in clear. So the file is
judged here first, and only a file without fault reaches the plugin.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from gateway.config import ConfigError
from gateway.security.entry_file import read_entries

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
