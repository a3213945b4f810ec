"""A token issuer for tests: its keys, its key set, and valid and invalid tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER: Final = "https://issuer.example"
AUDIENCE: Final = "trivium"
NOW_MS: Final = 1_900_000_000_000

_RSA: Final = rsa.generate_private_key(65537, 2048)
KEYS: Final[dict[str, tuple[Any, str]]] = {
    "rsa": (_RSA, "RS256"),
    "ec": (ec.generate_private_key(ec.SECP256R1()), "ES256"),
    "ed": (ed25519.Ed25519PrivateKey.generate(), "EdDSA"),
}
"""The private key and its algorithm by kid."""


def public_jwk(kid: str, key: Any = None, **fields: Any) -> dict[str, Any]:
    """Return the public half of a key as an entry of a key set."""
    private = key if key is not None else KEYS[kid][0]
    public = private.public_key()
    if isinstance(private, rsa.RSAPrivateKey):
        entry = RSAAlgorithm.to_jwk(public, as_dict=True)
    elif isinstance(private, ec.EllipticCurvePrivateKey):
        entry = ECAlgorithm.to_jwk(public, as_dict=True)
    else:
        entry = OKPAlgorithm.to_jwk(public, as_dict=True)
    return {**entry, "kid": kid, **fields}


def key_set(*kids: str) -> bytes:
    """Return a key set of these keys, or of all keys if none is named."""
    return json.dumps({"keys": [public_jwk(kid) for kid in kids or KEYS]}).encode()


def token(kid: str = "ec", *, expires_s: float = NOW_MS / 1000 + 3600, header: Any = None, **claims: Any) -> str:
    """Return a token for ann, signed by `kid`; a claim of None is omitted."""
    key, algorithm = KEYS[kid]
    said = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "exp": expires_s, **claims}
    payload = {name: value for name, value in said.items() if value is not None}
    return jwt.encode(payload, key, algorithm, headers={"kid": kid, **(header or {})})


def oauth_options(path: Path, **options: Any) -> dict[str, Any]:
    """Write the key set to `path`; return a `security.oauth` section that trusts it."""
    path.write_bytes(key_set())
    return {"jwks_file": path, "issuer": ISSUER, "audience": (AUDIENCE,), **options}
