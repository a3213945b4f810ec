"""amqtt's password file, read strictly: one `name:hash` a line, `#` starts a comment.

amqtt's own reader logs a malformed line as it is, and such a line is most likely a password in clear. So the file is
judged here first, and only a file without fault reaches the plugin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gateway.config import ConfigError

HASHES: Final = ("$argon2id$", "$argon2i$", "$argon2d$", "$6$")
"""What the plugin can check: Argon2, and SHA-512 crypt as long as Python has `crypt` (before 3.13)."""


def read_password_file(path: Path, key: str) -> dict[str, str]:
    """Read the names and hashes of a password file.

    Args:
        path: the file.
        key: the configuration key that named it, for the error.

    Raises:
        ConfigError: unreadable or malformed; names the line, never its text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path} is not UTF-8 text") from None
    users: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        name, colon, hashed = entry.partition(":")
        if not colon or not name or not hashed:
            raise ConfigError(f"{key}: {path} line {number}: expected name:hash")
        if not hashed.startswith(HASHES):
            raise ConfigError(f"{key}: {path} line {number}: the hash is neither Argon2 nor SHA-512 crypt")
        if name in users:
            raise ConfigError(f"{key}: {path} line {number}: the name stands twice")
        users[name] = hashed
    return users
