"""Reading key sets: which keys can be used, and with which algorithms."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from gateway.security.login.key_source import DOCUMENT_LIMIT, FITTING, KEYS_LIMIT, NO_KEYS, parse_jwks
from gateway.settings.security import Algorithm
from tests.support.oauth import KEYS, key_set, public_jwk

ALL = get_args(Algorithm)


def document(*entries: Any) -> bytes:
    return json.dumps({"keys": entries}).encode()


def test_every_key_serves_its_own_algorithms() -> None:
    keys = parse_jwks(key_set(), ALL)
    for kid, kind in (("rsa", ("RSA", None)), ("ec", ("EC", "P-256")), ("ed", ("OKP", "Ed25519"))):
        found = [name for name in ALL if keys.find(kid, name) is not None]
        assert found == list(FITTING[kind])
    assert keys.find("other", "RS256") is None
    assert keys.find("rsa", "HS256") is None
    assert keys.find("rsa", "none") is None


def test_every_algorithm_has_a_kind_of_key() -> None:
    assert {name for names in FITTING.values() for name in names} == set(ALL)


def test_only_allowed_algorithms_and_the_keys_own() -> None:
    assert parse_jwks(key_set(), ["ES256"]).find("rsa", "RS256") is None
    keys = parse_jwks(document(public_jwk("rsa", alg="PS256")), ALL)
    assert keys.find("rsa", "PS256") is not None
    assert keys.find("rsa", "RS256") is None


def test_a_token_that_names_no_key() -> None:
    keys = parse_jwks(key_set(), ALL)
    key = keys.find(None, "ES256")
    assert key is not None
    assert key.key_id == "ec"
    two = parse_jwks(document(public_jwk("a", KEYS["ec"][0]), public_jwk("b", KEYS["ec"][0])), ALL)
    assert two.find(None, "ES256") is None, "it could be either"
    assert NO_KEYS.find(None, "ES256") is None


UNUSABLE = {
    "for encryption": public_jwk("ec", use="enc"),
    "for signing only": public_jwk("ec", key_ops=["sign"]),
    "a shared secret": {"kty": "oct", "k": "c2VjcmV0", "kid": "x"},
    "an unknown curve": public_jwk("k1", ec.generate_private_key(ec.SECP256K1())),
    "too short": public_jwk("short", rsa.generate_private_key(65537, 1024)),
    "of another algorithm": public_jwk("ec", alg="RS256"),
    "half": {"kty": "EC", "crv": "P-256", "kid": "ec", "x": "AA"},
    "not of a kind": {"kid": "ec"},
    "no object": 7,
    "a kind that is a list": {"kty": ["RSA"], "crv": {}},
}


@pytest.mark.parametrize("entry", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_keys_that_cannot_be_used_are_passed_over(entry: Any) -> None:
    with pytest.raises(ValueError, match="no usable key"):
        parse_jwks(document(entry), ALL)
    assert parse_jwks(document(entry, public_jwk("ed")), ALL).find("ed", "EdDSA") is not None


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{}", b'{"keys": {}}', b"\xff", b"[" * 100_000, key_set() + b" " * DOCUMENT_LIMIT,
        document(*[{}] * (KEYS_LIMIT + 1)),
    ],
    ids=range(8),
)  # fmt: skip
def test_documents_that_are_none(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - JSON's own and ours
        parse_jwks(text, ALL)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["kty", "crv", "alg", "use", "key_ops", "x", "y", "n", "e", "kid"]), JSON))
def test_any_entry_is_a_key_or_is_passed_over(fields: dict[str, Any]) -> None:
    entry = {**public_jwk("ec"), **fields}
    assert parse_jwks(document(entry, public_jwk("ed")), ALL).find("ed", "EdDSA") is not None
