"""The keys of an issuer of tokens: a JSON Web Key Set (RFC 7517), checked and bound to algorithms."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from jwt import PyJWK
from jwt.exceptions import PyJWTError

DOCUMENT_LIMIT: Final = 1024 * 1024  # bytes; real ones have some thousand
KEYS_LIMIT: Final = 100
FITTING: Final[dict[tuple[str, str | None], tuple[str, ...]]] = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
    ("OKP", "Ed448"): ("EdDSA",),
}
"""By kty and crv, what a key can sign with (RFC 7518 part 3.1, RFC 8037 part 3.1)."""


class KeySet:
    """The keys of one document.

    A key is found by the algorithm that it was bound to when the set was read, so that a token cannot have a key used
    as something that it is not.
    """

    __slots__ = ("_by_algorithm", "_by_name")

    def __init__(self, keys: Iterable[PyJWK]) -> None:
        self._by_name: dict[tuple[str, str], PyJWK] = {}
        self._by_algorithm: dict[str, list[PyJWK]] = {}
        for key in keys:
            self._by_algorithm.setdefault(key.algorithm_name, []).append(key)
            if isinstance(key.key_id, str):
                self._by_name.setdefault((key.key_id, key.algorithm_name), key)

    def find(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """The key of this name; without a name the only one that fits."""
        if kid is not None:
            return self._by_name.get((kid, algorithm))
        fitting = self._by_algorithm.get(algorithm, ())
        return fitting[0] if len(fitting) == 1 else None


NO_KEYS: Final = KeySet(())


def parse_jwks(document: bytes, algorithms: Iterable[str]) -> KeySet:
    """Read a document; keys that `algorithms` do not use are passed over: an issuer may have others for others.

    Raises:
        ValueError: it is none, or has no usable key.
    """
    if len(document) > DOCUMENT_LIMIT:
        raise ValueError(f"a key set of more than {DOCUMENT_LIMIT} bytes")
    try:
        content = json.loads(document)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    entries = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(entries, list) or len(entries) > KEYS_LIMIT:
        raise ValueError(f"no JSON object with a list of at most {KEYS_LIMIT} keys")
    allowed = frozenset(algorithms)
    keys = [key for entry in entries if isinstance(entry, dict) for key in _usable(entry, allowed)]
    if not keys:
        raise ValueError(f"no key that could be used for {', '.join(sorted(allowed))}")
    return KeySet(keys)


def _usable(entry: dict[str, Any], allowed: frozenset[str]) -> list[PyJWK]:
    """What the key of one entry can be used as."""
    kind, curve, named = entry.get("kty"), entry.get("crv"), entry.get("alg")
    operations = entry.get("key_ops", ["verify"])
    for_signatures = entry.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations
    if not isinstance(kind, str) or not isinstance(curve, str | None) or not for_signatures:
        return []
    fitting = [name for name in FITTING.get((kind, curve), ()) if name in allowed and named in (None, name)]
    try:
        keys = [PyJWK(entry, name) for name in fitting]
    except (PyJWTError, ValueError, TypeError):
        return []
    return [key for key in keys if key.Algorithm.check_key_length(key.key) is None]  # RSA below 2048 bits
