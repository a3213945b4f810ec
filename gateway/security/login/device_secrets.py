"""Secrets of devices: generated, never chosen, so that one fast digest verifies them (ADR 0108).

    secret = new_secret()                       # "tds1_" and 43 characters: 256 random bits
    DeviceSecrets({"pump-7": digest_of(secret)}).matches("pump-7", secret)

A password file has `name:$device-sha256$<digest>` for a device: SHA-256 of the secret, in 64 hexadecimal digits. A
login must present a text of the generated form. So a digest of a chosen password, which could be guessed a billion
times a second, lets nobody in.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Final

PREFIX: Final = "tds1_"  # lets scanners recognise a secret that has leaked
RANDOM_BYTES: Final = 32
MARK: Final = "$device-sha256$"
_SECRET: Final = re.compile(rb"tds1_[A-Za-z0-9_-]{43}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def new_secret() -> str:
    """Generate a secret."""
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def digest_of(secret: str) -> bytes:
    """Return what is stored of a secret."""
    return hashlib.sha256(secret.encode()).digest()


def verifier_of(secret: str) -> str:
    """Return a secret's part of a line of the password file."""
    return MARK + digest_of(secret).hex()


def parse_verifier(text: str) -> bytes:
    """Return the digest of a text that starts with `MARK`. Raises ValueError, which says what is wrong with it."""
    digest = text.removeprefix(MARK)
    if _DIGEST.fullmatch(digest) is None:
        raise ValueError(f"expected 64 lower-case hexadecimal digits after {MARK}")
    return bytes.fromhex(digest)


class DeviceSecrets:
    """The devices of a password file."""

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        """`digests` are by the device's name."""
        self._digests = digests

    def __contains__(self, name: str) -> bool:
        """Whether there is a device of this name, so that nothing else may decide about its logins."""
        return name in self._digests

    def matches(self, name: str, secret: bytes | str) -> bool:
        """Whether this is the secret of the device; in constant time for a known name."""
        digest = self._digests.get(name)
        if digest is None:
            return False
        presented = secret.encode("utf-8", "surrogatepass") if isinstance(secret, str) else bytes(secret)
        if _SECRET.fullmatch(presented) is None:
            return False
        return hmac.compare_digest(hashlib.sha256(presented).digest(), digest)
