"""Where the keys of tokens come from: a file that is read at the start, or a URL that is fetched again and again."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import structlog
from jwt import PyJWK

from gateway.config import ConfigError, OauthConfig
from gateway.security.jwks import DOCUMENT_LIMIT, NO_KEYS, KeySet, parse_jwks

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
