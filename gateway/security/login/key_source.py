"""The keys of a token issuer: a JSON Web Key Set (RFC 7517), validated and bound to algorithms.

The set comes from a file that is read at the start, or from a URL that is fetched periodically.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import ssl
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import structlog
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from gateway.settings.config import ConfigError, OauthConfig

DOCUMENT_LIMIT: Final = 1024 * 1024  # bytes; real documents have a few thousand
KEYS_LIMIT: Final = 100
FITTING: Final[dict[tuple[str, str | None], tuple[str, ...]]] = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
    ("OKP", "Ed448"): ("EdDSA",),
}
"""The algorithms that a key can sign with, by kty and crv (RFC 7518 part 3.1, RFC 8037 part 3.1)."""


class KeySet:
    """The keys of one document.

    Each key is bound to an algorithm when the set is read, so that a token cannot choose another algorithm for it.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[PyJWK]) -> None:
        self._keys = tuple(keys)

    def find(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """Return the key with this id; without an id, the only key of this algorithm."""
        fitting = [key for key in self._keys if key.algorithm_name == algorithm and kid in (None, key.key_id)]
        return fitting[0] if fitting and (kid is not None or len(fitting) == 1) else None


NO_KEYS: Final = KeySet(())


def parse_jwks(document: bytes, algorithms: Iterable[str]) -> KeySet:
    """Parse a key set; raises ValueError if it is none, or has no usable key.

    Keys that none of `algorithms` can use are skipped: an issuer may have them for other services.
    """
    if len(document) > DOCUMENT_LIMIT:
        raise ValueError(f"it has more than {DOCUMENT_LIMIT} bytes")
    try:
        content = json.loads(document)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    entries = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(entries, list) or len(entries) > KEYS_LIMIT:
        raise ValueError(f"expected a JSON object with a list of at most {KEYS_LIMIT} keys")
    allowed = frozenset(algorithms)
    keys = [key for entry in entries if isinstance(entry, dict) for key in _usable(entry, allowed)]
    if not keys:
        raise ValueError(f"no usable key for {', '.join(sorted(allowed))}")
    return KeySet(keys)


def _usable(entry: dict[str, Any], allowed: frozenset[str]) -> list[PyJWK]:
    """Return one key object for each allowed algorithm that the entry can be used with."""
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


log = structlog.get_logger(__name__)

FETCH_LIMIT_S: Final = 5.0
WAIT_LIMIT_S: Final = 6.0  # for a fetch and for parsing the result
WAITING_LIMIT: Final = 1024  # logins that wait for a fetch; each holds a token in memory


def read_keys(path: Path, algorithms: Sequence[str]) -> KeySet:
    """Read `security.oauth.jwks_file`; raises ConfigError if it cannot be used."""
    key = "security.oauth.jwks_file"
    try:
        with path.open("rb") as file:
            return parse_jwks(file.read(DOCUMENT_LIMIT + 1), algorithms)
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{key}: {path}: {error}") from error


class UrlKeys:
    """Keys from a URL. While fetching fails, the keys fetched last stay in use.

    A login waits only if its key is unknown and a fetch is allowed, and for `WAIT_LIMIT_S` at most. Otherwise a client
    that sends invented key ids could delay all logins and make the gateway query the issuer endlessly.
    """

    def __init__(self, config: OauthConfig, *, clock: Callable[[], float]) -> None:
        """Load the CA file; raises ConfigError if it cannot be used. Nothing is fetched before `run`.

        `clock` returns monotonic seconds.
        """
        assert config.jwks_url is not None
        self.fetches = 0  # attempted
        self.failures = 0  # failed fetches
        self._address = config.jwks_url
        self._algorithms = config.algorithms
        self._refresh_s = config.refresh_s
        self._retry_s = config.retry_s
        self._clock = clock
        self._keys = NO_KEYS
        self._tls = _authorities(config.jwks_cafile)
        self._began = -math.inf
        self._fetching = False
        self._waiting = 0
        self._wanted = asyncio.Event()
        self._fetched = asyncio.Event()  # set by the next fetch, then replaced

    async def find(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """Return the issuer's key with this id, or None; may wait for a fetch."""
        key = self._keys.find(kid, algorithm)
        may_come = self._fetching or self._clock() - self._began >= self._retry_s
        if key is None and may_come and self._waiting < WAITING_LIMIT:
            self._wanted.set()
            self._waiting += 1
            try:
                async with asyncio.timeout(WAIT_LIMIT_S):
                    await self._fetched.wait()
            except TimeoutError:
                pass  # answer with the keys at hand
            finally:
                self._waiting -= 1
            key = self._keys.find(kid, algorithm)
        return key

    def refresh(self) -> None:
        """Fetch soon."""
        self._wanted.set()

    async def run(self) -> None:
        """Fetch now, every `refresh_s` seconds and on request, until cancelled."""
        while True:
            self._wanted.clear()
            self._began = self._clock()
            self._fetching = True
            good = await self._fetch()
            self._fetching = False
            self._fetched.set()
            self._fetched = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s if good else self._retry_s):
                    await self._wanted.wait()
            await asyncio.sleep(self._began + self._retry_s - self._clock())

    async def _fetch(self) -> bool:
        self.fetches += 1
        try:
            document = await self._download()
            # In a thread: parsing a hundred keys is slow.
            self._keys = await asyncio.to_thread(parse_jwks, document, self._algorithms)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            self.failures += 1
            log.warning(
                "token keys cannot be fetched, the old ones stay in use",
                url=str(self._address),
                error=type(error).__name__,
            )
            return False
        return True

    async def _download(self) -> bytes:
        """Download the document, at most one byte more than the limit of `parse_jwks`."""
        limits = aiohttp.ClientTimeout(total=FETCH_LIMIT_S)
        async with (
            aiohttp.ClientSession(timeout=limits) as session,
            # No redirects: the configuration trusts only the URL's host.
            session.get(self._address.get_secret_value(), ssl=self._tls, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            try:
                return await response.content.readexactly(DOCUMENT_LIMIT + 1)
            except asyncio.IncompleteReadError as whole:
                return whole.partial


def _authorities(path: Path | None) -> ssl.SSLContext | bool:
    if path is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(path))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"security.oauth.jwks_cafile: {path}: {error}") from error
