"""Which tokens are valid, and their content."""

from __future__ import annotations

import base64
import hmac
import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from gateway.security.identity import Identity
from gateway.security.login.authentication import Authenticator
from gateway.security.login.key_source import NO_KEYS
from gateway.security.login.tokens import REMEMBER_S, TOKEN_LIMIT, TokenError, TokenVerifier, VerifiedToken
from gateway.security.rights.authorization import AccessList
from gateway.settings.config import ConfigError, OauthConfig, SecurityConfig, load
from tests.support.oauth import KEYS, NOW_MS, oauth_options, token

NOW_S = NOW_MS / 1000
LEEWAY_S = 30


class Clock:
    """Both clocks, which the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def wall(self) -> int:
        return NOW_MS + int(self.now * 1000)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def verifier(tmp_path: Path, clock: Clock) -> TokenVerifier:
    return make(tmp_path, clock)


def make(tmp_path: Path, clock: Clock, **options: Any) -> TokenVerifier:
    config = OauthConfig(**oauth_options(tmp_path / "jwks.json", **options))
    return TokenVerifier(config, clock=lambda: clock.now, wall_clock=clock.wall)


@pytest.mark.parametrize("kid", KEYS)
async def test_a_good_token(verifier: TokenVerifier, kid: str) -> None:
    shown = await verifier.verify(token(kid))
    assert shown == VerifiedToken(Identity("ann", "token"), NOW_MS + (3600 + LEEWAY_S) * 1000)


def encoded(*parts: bytes) -> str:
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


def segments(header: dict[str, Any], claims: dict[str, Any], secret: bytes | None = None) -> str:
    """A handmade token, signed with HS256 if there is a secret."""
    said = json.dumps(header).encode(), json.dumps(claims).encode()
    return encoded(*said, b"" if secret is None else hmac.digest(secret, encoded(*said).encode(), "sha256"))


def forged() -> dict[str, str]:
    """Tokens that were not signed with the issuer's keys."""
    claims = jwt.decode(token(), options={"verify_signature": False})
    public = KEYS["rsa"][0].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    head, _, signature = token().rpartition(".")
    return {
        "no signature": segments({"alg": "none"}, claims),
        "no signature, written otherwise": segments({"alg": "None", "kid": "ec"}, claims),
        "the public key as a secret": segments({"alg": "HS256", "kid": "rsa"}, claims, public),
        "the same, said to be RS256": segments({"alg": "RS256", "kid": "rsa"}, claims, public),
        "another's key": jwt.encode(claims, ec.generate_private_key(ec.SECP256R1()), "ES256", headers={"kid": "ec"}),
        "a key of another kind": jwt.encode(claims, KEYS["ec"][0], "ES256", headers={"kid": "rsa"}),
        "an unknown key": jwt.encode(claims, KEYS["ec"][0], "ES256", headers={"kid": "ec2"}),
        "a key that it brings itself": jwt.encode(
            claims, ec.generate_private_key(ec.SECP256R1()), "ES256", headers={"jwk": {"kty": "EC"}, "kid": "own"}
        ),
        "a signature of another": f"{head}.{token(sub='bob').rpartition('.')[2]}",
        "a cut signature": f"{head}.{signature[:-4]}",
        "claims of another": ".".join([token().split(".")[0], token(sub="eve").split(".")[1], signature]),
        "an extension that must be understood": token(header={"crit": ["exp2"], "exp2": 1}),
        "nothing": "",
        "no token": "x.y",
        "encrypted": "a.b.c.d.e",
        "too long": "a" * (TOKEN_LIMIT + 1),
        "not ASCII": token() + "é",
        "deeply nested": base64.urlsafe_b64encode(b"[" * 9000).decode().rstrip("=") + ".e30.",
    }


FORGED = forged()


@pytest.mark.parametrize("case", FORGED)
async def test_a_forged_token(verifier: TokenVerifier, case: str) -> None:
    with pytest.raises(TokenError):
        await verifier.verify(FORGED[case])


BAD_CLAIMS: dict[str, dict[str, Any]] = {
    "expired": {"expires_s": NOW_S - LEEWAY_S},
    "without an end": {"exp": None},
    "an end that is text": {"exp": str(NOW_S + 60)},
    "an end that is true": {"exp": True},
    "an end that is no number": {"exp": float("nan")},
    "an end without an end": {"exp": float("inf")},
    "an end beyond all time": {"exp": 10**400},
    "not valid yet": {"nbf": NOW_S + LEEWAY_S + 1},
    "another issuer": {"iss": "https://other.example"},
    "no issuer": {"iss": None},
    "another audience": {"aud": ["other"]},
    "no audience": {"aud": None},
    "no name": {"sub": None},
    "an empty name": {"sub": ""},
    "a reserved name": {"sub": "anonymous"},
    "everyone": {"sub": "*"},
    "a name with a line": {"sub": "a\nb"},
    "a name that is no text": {"sub": "\ud800"},
    "a number for a name": {"sub": 7},
    "a long name": {"sub": "a" * 1025},
}


@pytest.mark.parametrize("case", BAD_CLAIMS)
async def test_claims_that_are_not_believed(verifier: TokenVerifier, case: str) -> None:
    with pytest.raises(TokenError):
        await verifier.verify(token(**BAD_CLAIMS[case]))


async def test_the_leeway_is_for_both_ends(verifier: TokenVerifier) -> None:
    shown = await verifier.verify(token(expires_s=NOW_S - LEEWAY_S + 1, nbf=NOW_S + LEEWAY_S))
    assert shown.expires_ms == NOW_MS + 1000


async def test_one_of_several_audiences(tmp_path: Path, clock: Clock) -> None:
    verifier = make(tmp_path, clock, audience=("a", "b"))
    for audience in ("a", "b", ["x", "b"]):
        assert (await verifier.verify(token(aud=audience))).identity.name == "ann"
    with pytest.raises(TokenError):
        await verifier.verify(token(aud=["x", "y"]))


async def test_an_algorithm_that_is_not_allowed(tmp_path: Path, clock: Clock) -> None:
    verifier = make(tmp_path, clock, algorithms=("ES256",))
    assert (await verifier.verify(token("ec"))).identity.name == "ann"
    for kid in ("rsa", "ed"):
        with pytest.raises(TokenError, match="algorithm"):
            await verifier.verify(token(kid))


@pytest.mark.parametrize(
    ("claim", "claims", "groups"),
    [
        ("groups", {"groups": ["b", "a", "b"]}, ("a", "b")),
        ("scope", {"scope": "read write"}, ("read", "write")),
        ("realm_access.roles", {"realm_access": {"roles": ["admin"]}}, ("admin",)),
        ("https://x.example/roles", {"https://x.example/roles": ["admin"]}, ("admin",)),
        ("groups", {}, ()),
        ("groups.deeper", {"groups": ["a"]}, ()),
        ("groups", {"groups": ["a", 7, None, "", "x\n"]}, ("a",)),
        ("groups", {"groups": {"a": 1}}, ()),
        ("groups", {"groups": ["a"] * 257}, ()),
        (None, {"groups": ["a"]}, ()),
    ],
)
async def test_groups(
    tmp_path: Path, clock: Clock, claim: str | None, claims: dict[str, Any], groups: tuple[str, ...]
) -> None:
    verifier = make(tmp_path, clock, groups_claim=claim)
    assert (await verifier.verify(token(**claims))).identity == Identity("ann", "token", groups)


async def test_the_name_by_another_claim(tmp_path: Path, clock: Clock) -> None:
    verifier = make(tmp_path, clock, name_claim="preferred_username")
    assert (await verifier.verify(token(preferred_username="bob"))).identity.name == "bob"


async def test_a_token_is_remembered_but_neither_beyond_its_end_nor_for_long(
    verifier: TokenVerifier, clock: Clock
) -> None:
    long, short = token(), token(expires_s=NOW_S + 10 - LEEWAY_S)
    for one in (long, short):
        assert verifier.cached(one) is None
        shown = await verifier.verify(one)
        assert verifier.cached(one) == shown
    verifier._keys = NO_KEYS
    clock.now = 9.9
    for one in (long, short):
        assert (await verifier.verify(one)).identity.name == "ann"
        assert verifier.cached(one) is not None
    clock.now = 10.0
    with pytest.raises(TokenError, match="expired"):
        await verifier.verify(short)
    assert verifier.cached(short) is None
    clock.now = REMEMBER_S
    assert verifier.cached(long) is None
    with pytest.raises(TokenError, match="key"):
        await verifier.verify(long)


async def test_what_is_forgotten_is_checked_again(verifier: TokenVerifier) -> None:
    good = token()
    await verifier.verify(good)
    verifier._keys = NO_KEYS
    verifier.forget()
    assert verifier.cached(good) is None
    with pytest.raises(TokenError, match="key"):
        await verifier.verify(good)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> TokenVerifier:
    return make(tmp_path_factory.mktemp("fuzzed"), Clock())


@given(text=st.text() | st.lists(st.binary(max_size=40), max_size=4).map(lambda parts: encoded(*parts)))
async def test_any_text_is_refused(fuzzed: TokenVerifier, text: str) -> None:
    with pytest.raises(TokenError):
        await fuzzed.verify(text)


VALUES = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.sampled_from(["b64", "x"]), max_size=2)


@given(header=st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "b64", "cty"]), VALUES))
async def test_any_header_is_refused(fuzzed: TokenVerifier, header: dict[str, Any]) -> None:
    with pytest.raises(TokenError):
        await fuzzed.verify(segments({"alg": "ES256", "kid": "ec", **header}, {}, b"secret"))


WHOLE: dict[str, Any] = {"issuer": "i", "audience": ["a"]}
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({**WHOLE, "jwks_file": "f", "jwks_url": "https://x"}, "exclude each other"),
    ({"jwks_file": "f", "audience": ["a"]}, "issuer and audience are needed"),
    ({"jwks_file": "f", "issuer": "i"}, "issuer and audience are needed"),
    ({**WHOLE, "jwks_url": "http://issuer.example/jwks"}, "expected https"),
    ({**WHOLE, "jwks_url": "https://"}, "expected https"),
    ({**WHOLE, "jwks_url": "file:///etc/jwks"}, "expected https"),
    ({**WHOLE, "jwks_file": "f", "algorithms": []}, "algorithms"),
    ({**WHOLE, "jwks_file": "f", "algorithms": ["none"]}, "algorithms"),
    ({**WHOLE, "jwks_file": "f", "algorithms": ["HS256"]}, "algorithms"),
]


@pytest.mark.parametrize(("oauth", "reason"), CONFIGS)
def test_configurations_that_stop_the_start(oauth: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"security\.oauth.*{reason}"):
        load(flags={"security": {"oauth": oauth}})


@pytest.mark.parametrize("url", ["http://localhost:9/k", "http://127.0.0.1/k", "http://[::1]:8/k", "https://x.example"])
def test_urls_that_are_believed(url: str) -> None:
    oauth = OauthConfig(**WHOLE, jwks_url=url)
    assert oauth.enabled
    assert SecurityConfig(oauth=oauth, allow_anonymous=False).logins == {"token"}


async def test_the_claims_that_rules_ask_for_are_known_of_a_client(tmp_path: Path) -> None:
    oauth = OauthConfig(**oauth_options(tmp_path / "keys.json"))
    rules = [{"topic": "t/{claim:org.unit}/#"}, {"topic": "u/{claim:https://x/sites}/{claim:level}"}]
    config = SecurityConfig(oauth=oauth, access=rules)
    authenticator = Authenticator(config, wall_clock=lambda: NOW_MS)
    access = AccessList(config.access)
    for claims, allowed in (
        ({"org": {"unit": "a"}, "https://x/sites": ["n", "s"], "level": 7}, ["t/a/x", "u/n/7", "u/s/7"]),
        ({"org": {"unit": "b"}, "https://x/sites": "n s", "level": True}, ["t/b/x"]),
        ({"org": {"unit": ["a", 1.5]}, "https://x/sites": [], "level": "7"}, []),
        ({"org": "a", "org.unit": "c/d", "https://x/sites": {"n": 1}}, []),
        ({}, []),
    ):
        shown = await authenticator.authenticate_token(token(**claims), peer="127.0.0.1:1")
        assert shown is not None
        publish = access.for_client(shown.identity).publish
        names = ("t/a/x", "t/b/x", "t/c/d", "u/n/7", "u/s/7", "u/n s/7", "u/n/True", "t/1.5/x")
        assert [name for name in names if publish(*name.split("/", 1))] == allowed


def test_groups_are_principals() -> None:
    load_rules = SecurityConfig(
        access=[
            {"principal": "group:writers", "action": "publish", "topic": "sensors"},
            {"principal": "ann", "action": "subscribe", "topic": "sensors"},
        ]
    ).access
    access = AccessList(load_rules)
    member = Identity("ann", "token", ("writers",))
    assert access.for_client(member).publish("sensors", "a")
    assert access.for_client(member).subscribe("sensors", "a")
    assert not access.for_client(Identity("ann", "token")).publish("sensors", "a")
    assert not access.for_client(Identity("group:writers", "certificate")).publish("sensors", "a")
    with pytest.raises(ConfigError, match=r"access\[1\]\.principal"):
        AccessList(SecurityConfig(access=[{"principal": "group:"}]).access)
