"""The keys of an issuer of tokens: a JSON Web Key Set (RFC 7517), checked and bound to algorithms.

It comes from a file that is read at the start, or a URL that is fetched again and again.
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

from gateway.config import ConfigError, OauthConfig

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


log = structlog.get_logger(__name__)

FETCH_LIMIT_S: Final = 5.0
WAIT_LIMIT_S: Final = 6.0  # for a fetch and for reading what it brought
WAITING_LIMIT: Final = 1024  # logins that wait for a fetch: each holds a token


class FileKeys:
    """The keys in a file."""

    def __init__(self, path: Path, algorithms: Sequence[str]) -> None:
        """Read the file; ConfigError when it cannot be used."""
        self._path = path
        self._algorithms = algorithms
        self._keys = self.read()

    def read(self) -> KeySet:
        """What is in the file now; ConfigError when it cannot be used."""
        key = "security.oauth.jwks_file"
        try:
            with self._path.open("rb") as file:
                return parse_jwks(file.read(DOCUMENT_LIMIT + 1), self._algorithms)
        except OSError as error:
            raise ConfigError(f"{key}: {self._path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{key}: {self._path}: {error}") from error

    def use(self, keys: KeySet) -> None:
        """Believe these from now on."""
        self._keys = keys

    async def find(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """The key of this name; None when the issuer has none like that."""
        return self._keys.find(kid, algorithm)


class UrlKeys:
    """The keys at a URL; while that fails, those that it gave last.

    A login waits only when its key is unknown and a fetch may bring it, and for `WAIT_LIMIT_S` at most: otherwise a
    stranger who makes up names of keys could have everybody's login wait, and the issuer asked for ever.
    """

    def __init__(self, config: OauthConfig, *, clock: Callable[[], float]) -> None:
        """Nothing is fetched before `run`; ConfigError when the authorities' file cannot be used.

        `clock` gives monotonic seconds.
        """
        assert config.jwks_url is not None
        self.fetches = 0  # that were tried
        self.failures = 0  # of these
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
        self._fetched = asyncio.Event()  # of the next fetch; then another one takes its place

    async def find(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """The key of this name; None when the issuer has none like that."""
        key = self._keys.find(kid, algorithm)
        may_come = self._fetching or self._clock() - self._began >= self._retry_s
        if key is None and may_come and self._waiting < WAITING_LIMIT:
            self._wanted.set()
            self._waiting += 1
            try:
                async with asyncio.timeout(WAIT_LIMIT_S):
                    await self._fetched.wait()
            except TimeoutError:
                pass  # what is known now is the answer
            finally:
                self._waiting -= 1
            key = self._keys.find(kid, algorithm)
        return key

    def refresh(self) -> None:
        """Fetch soon."""
        self._wanted.set()

    async def run(self) -> None:
        """Fetch now, every `refresh_s` seconds, and when somebody asks for it; for ever."""
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
            # In a thread: a hundred keys take their time.
            self._keys = await asyncio.to_thread(parse_jwks, document, self._algorithms)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            self.failures += 1
            log.warning(
                "the keys of tokens cannot be fetched, the old ones stay",
                url=str(self._address),
                error=type(error).__name__,
            )
            return False
        return True

    async def _download(self) -> bytes:
        """At most one byte more than the limit of `parse_jwks`."""
        limits = aiohttp.ClientTimeout(total=FETCH_LIMIT_S)
        document = bytearray()
        async with (
            aiohttp.ClientSession(timeout=limits) as session,
            # Not led elsewhere: the URL's host is who the configuration trusts.
            session.get(self._address.get_secret_value(), ssl=self._tls, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            async for part in response.content.iter_chunked(65536):
                document += part
                if len(document) > DOCUMENT_LIMIT:
                    break
        return bytes(document[: DOCUMENT_LIMIT + 1])


def _authorities(path: Path | None) -> ssl.SSLContext | bool:
    if path is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(path))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"security.oauth.jwks_cafile: {path}: {error}") from error
