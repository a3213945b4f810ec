"""Bearer tokens: verifies JSON Web Tokens (RFC 7519) of the configured issuer and extracts the client's identity."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jwt
import msgspec
from jwt.exceptions import PyJWTError
from jwt.types import Options

from gateway.runtime.recent import Recent
from gateway.security.identity import Identity, is_principal
from gateway.security.login.key_source import NO_KEYS, UrlKeys, read_keys
from gateway.settings.config import OauthConfig

TOKEN_LIMIT: Final = 16_384  # characters
NAME_LIMIT: Final = 1024  # characters of a name or a group
GROUPS_LIMIT: Final = 256
REMEMBERED: Final = 10_000  # tokens: an HTTP client sends its token with every request
REMEMBER_S: Final = 60.0  # then the signature is verified again: the key may have been withdrawn
LATEST: Final = 2**40  # seconds; a later time is invalid
CHECKED: Final[Options] = {
    "require": ["exp", "iss", "aud"],
    "verify_exp": False,  # the times are checked here, by our clock
    "verify_nbf": False,
    "verify_iat": False,
    "enforce_minimum_key_length": True,
}


class TokenError(ValueError):
    """The token is not valid. The text is for the log and contains no part of the token."""


class VerifiedToken(msgspec.Struct, frozen=True):
    """The content of a valid token."""

    identity: Identity  # the client
    expires_ms: int  # wall clock, epoch milliseconds; includes the leeway


class TokenVerifier:
    """Verifies tokens with the issuer's keys and remembers verified ones for `REMEMBER_S`."""

    def __init__(
        self,
        config: OauthConfig,
        *,
        claims: Sequence[str] = (),
        clock: Callable[[], float],
        wall_clock: Callable[[], int],
    ) -> None:
        """Read the keys if they are in a file; raises ConfigError if it cannot be used.

        Identities get the given `claims`. `clock` returns monotonic seconds, `wall_clock` epoch milliseconds.
        """
        self._config = config
        self._claims_wanted = claims
        self._leeway_ms = int(config.leeway_s * 1000)
        self._clock = clock
        self._wall_clock = wall_clock
        self._remembered: Recent[bytes, tuple[float, VerifiedToken]] = Recent(REMEMBERED)
        self._keys = NO_KEYS if config.jwks_file is None else read_keys(config.jwks_file, config.algorithms)
        self.fetched = UrlKeys(config, clock=clock) if config.jwks_file is None else None
        """The keys if they come from a URL."""

    async def verify(self, token: str) -> VerifiedToken:
        """Verify a token and return its content; raises TokenError if it is not valid."""
        if len(token) > TOKEN_LIMIT or not token.isascii():
            raise TokenError("it is too long or not ASCII")
        shown = self._recall(token)
        if shown is None:
            try:
                shown = self._read(await self._claims(token))
            except TokenError:
                self._remembered.pop(_digest(token), None)
                raise
            self._remembered[_digest(token)] = (self._clock() + REMEMBER_S, shown)
        if shown.expires_ms <= self._wall_clock():
            self._remembered.pop(_digest(token), None)
            raise TokenError("it has expired")
        return shown

    def cached(self, token: str) -> VerifiedToken | None:
        """Return the content of a valid token verified less than `REMEMBER_S` ago. None means: verify it."""
        shown = self._recall(token)
        return None if shown is None or shown.expires_ms <= self._wall_clock() else shown

    def knows(self, token: str) -> bool:
        """Whether the token was valid before, even if it must be verified again."""
        return _digest(token) in self._remembered

    def _recall(self, token: str) -> VerifiedToken | None:
        until, shown = self._remembered.get(_digest(token), (0.0, None))
        return shown if self._clock() < until else None

    def forget(self) -> None:
        """Forget all verified tokens, so that every signature is verified again."""
        self._remembered.clear()

    async def _claims(self, token: str) -> dict[str, Any]:
        """Return the claims after verifying signature, issuer and audience."""
        config = self._config
        try:
            header = jwt.get_unverified_header(token)
            algorithm, kid = header.get("alg"), header.get("kid")
            if algorithm not in config.algorithms:
                raise TokenError("its signature algorithm is not allowed")
            if self.fetched is None:
                key = self._keys.find(kid, algorithm)
            else:
                key = await self.fetched.find(kid, algorithm)
            if key is None:
                raise TokenError("its issuer has no such key")
            return jwt.decode(token, key, [algorithm], audience=config.audience, issuer=config.issuer, options=CHECKED)
        except (PyJWTError, ValueError, TypeError, RecursionError) as error:
            # PyJWT's texts may hold a part of the token.
            raise error if isinstance(error, TokenError) else TokenError(type(error).__name__) from None

    def _read(self, claims: dict[str, Any]) -> VerifiedToken:
        config = self._config
        expires_ms = _milliseconds(claims["exp"]) + self._leeway_ms
        if "nbf" in claims and _milliseconds(claims["nbf"]) - self._leeway_ms > self._wall_clock():
            raise TokenError("it is not valid yet")
        name = _claim(claims, config.name_claim)
        if not _is_name(name) or not is_principal(name):
            raise TokenError("it has no usable name")
        groups: tuple[str, ...] = ()
        if config.groups_claim is not None:
            groups = _groups(_claim(claims, config.groups_claim))
        wanted = tuple((path, _texts(_claim(claims, path))) for path in self._claims_wanted)
        return VerifiedToken(Identity(name, "token", groups, wanted), expires_ms)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Find a claim by its name, which may contain dots, or by a dotted path. None means not present."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _groups(value: Any) -> tuple[str, ...]:
    """Read a list of names, or space-separated names as in `scope` (RFC 8693 part 4.2); sorted, without duplicates."""
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list) or len(names) > GROUPS_LIMIT:
        return ()
    return tuple(sorted({name for name in names if _is_name(name)}))


def _texts(value: Any) -> tuple[str, ...]:
    """Return a claim's values as texts: of a text, an integer, or a list of these. Any other value gives none."""
    values = value if isinstance(value, list) else [value]
    texts = [str(one) if isinstance(one, int) and not isinstance(one, bool) else one for one in values]
    return tuple(dict.fromkeys(texts)) if len(texts) <= GROUPS_LIMIT and all(map(_is_name, texts)) else ()


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= NAME_LIMIT and value.isprintable()


def _milliseconds(value: Any) -> int:
    """Convert a NumericDate (RFC 7519 part 2), which is in seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST:
        raise TokenError("it has an invalid time")
    return int(value * 1000)
