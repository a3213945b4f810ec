"""Bearer tokens: whether a JSON Web Token (RFC 7519) of the configured issuer is good here and now, and whose it is."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jwt
import msgspec
from jwt.exceptions import PyJWTError
from jwt.types import Options

from gateway.config import OauthConfig
from gateway.security.identity import Identity, is_principal
from gateway.security.key_source import FileKeys, UrlKeys

TOKEN_LIMIT: Final = 16_384  # characters
NAME_LIMIT: Final = 1024  # characters of a name or a group
GROUPS_LIMIT: Final = 256
REMEMBERED: Final = 10_000  # tokens: an HTTP client shows its own with each request
REMEMBER_S: Final = 60.0  # then the signature is checked again: its key may have been withdrawn
LATEST: Final = 2**40  # seconds; a time above it is none
CHECKED: Final[Options] = {
    "require": ["exp", "iss", "aud"],
    "verify_exp": False,  # the times are judged here, by our clock
    "verify_nbf": False,
    "verify_iat": False,
    "enforce_minimum_key_length": True,
}


class TokenError(ValueError):
    """A token that is not believed; the text is for the log and holds nothing of it."""


class Shown(msgspec.Struct, frozen=True):
    """What a good token says."""

    identity: Identity  # whose it is
    expires_ms: int  # wall clock, epoch milliseconds, until when it is good; the leeway is in it


class TokenJudge:
    """Judges tokens by the keys of their issuer."""

    def __init__(
        self,
        config: OauthConfig,
        *,
        claims: Sequence[str] = (),
        clock: Callable[[], float],
        wall_clock: Callable[[], int],
    ) -> None:
        """Read the keys, if they are in a file. `clock` gives monotonic seconds, `wall_clock` epoch milliseconds.

        `claims` are those that an identity is to have.

        Raises:
            ConfigError: a file that cannot be used.
        """
        self._config = config
        self._claims_wanted = claims
        self._leeway_ms = int(config.leeway_s * 1000)
        self._clock = clock
        self._wall_clock = wall_clock
        self._remembered: collections.OrderedDict[bytes, tuple[float, Shown]] = collections.OrderedDict()
        self.keys: FileKeys | UrlKeys
        if config.jwks_file is not None:
            self.keys = FileKeys(config.jwks_file, config.algorithms)
        else:
            self.keys = UrlKeys(config, clock=clock)

    async def judge(self, token: str) -> Shown:
        """Whose token it is; TokenError: it is not believed."""
        if len(token) > TOKEN_LIMIT or not token.isascii():
            raise TokenError("a token that is too long or has other than ASCII characters")
        digest = hashlib.sha256(token.encode()).digest()
        known = self._remembered.get(digest)
        if known is not None and self._clock() < known[0]:
            self._judge_time(known[1].expires_ms)
            return known[1]
        shown = self._read(await self._claims(token))
        self._remembered[digest] = (self._clock() + REMEMBER_S, shown)
        self._remembered.move_to_end(digest)
        if len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        return shown

    def known(self, token: str) -> Shown | None:
        """What a good token says whose signature was checked a moment ago; None: `judge` it."""
        if len(token) > TOKEN_LIMIT or not token.isascii():
            return None
        found = self._remembered.get(hashlib.sha256(token.encode()).digest())
        if found is None or self._clock() >= found[0] or found[1].expires_ms <= self._wall_clock():
            return None
        return found[1]

    def forget(self) -> None:
        """Check every signature anew."""
        self._remembered.clear()

    async def _claims(self, token: str) -> dict[str, Any]:
        """The claims of a token with a good signature, of the right issuer and for the right audience."""
        config = self._config
        try:
            header = jwt.get_unverified_header(token)
            algorithm, kid = header.get("alg"), header.get("kid")
            if algorithm not in config.algorithms:
                raise TokenError("signed by an algorithm that is not allowed")
            key = await self.keys.find(kid, algorithm)
            if key is None:
                raise TokenError("signed by a key that the issuer does not have")
            return jwt.decode(token, key, [algorithm], audience=config.audience, issuer=config.issuer, options=CHECKED)
        except (PyJWTError, ValueError, TypeError, RecursionError) as error:
            # PyJWT's texts may hold a part of the token.
            raise error if isinstance(error, TokenError) else TokenError(type(error).__name__) from None

    def _read(self, claims: dict[str, Any]) -> Shown:
        config = self._config
        expires_ms = _milliseconds(claims["exp"]) + self._leeway_ms
        self._judge_time(expires_ms)
        if "nbf" in claims and _milliseconds(claims["nbf"]) - self._leeway_ms > self._wall_clock():
            raise TokenError("not good yet")
        name = _claim(claims, config.name_claim)
        if not _is_name(name) or not is_principal(name):
            raise TokenError("no usable name in it")
        groups: tuple[str, ...] = ()
        if config.groups_claim is not None:
            groups = _groups(_claim(claims, config.groups_claim))
        wanted = tuple((path, _texts(_claim(claims, path))) for path in self._claims_wanted)
        return Shown(Identity(name, "token", groups, wanted), expires_ms)

    def _judge_time(self, expires_ms: int) -> None:
        if expires_ms <= self._wall_clock():
            raise TokenError("it has expired")


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """A claim by its name, which may have dots, or by a path of names with dots between them; None: not there."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _groups(value: Any) -> tuple[str, ...]:
    """A list of names, or names with spaces between them as in `scope` (RFC 8693 part 4.2); each once, in order."""
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list) or len(names) > GROUPS_LIMIT:
        return ()
    return tuple(sorted({name for name in names if _is_name(name)}))


def _texts(value: Any) -> tuple[str, ...]:
    """A claim as texts: a text, an integer, or a list of them; of anything else none."""
    values = value if isinstance(value, list) else [value]
    texts = [str(one) if isinstance(one, int) and not isinstance(one, bool) else one for one in values]
    return tuple(dict.fromkeys(texts)) if len(texts) <= GROUPS_LIMIT and all(map(_is_name, texts)) else ()


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= NAME_LIMIT and value.isprintable()


def _milliseconds(value: Any) -> int:
    """A NumericDate (RFC 7519 part 2), which is in seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST:
        raise TokenError("a time that is none")
    return int(value * 1000)
