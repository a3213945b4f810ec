"""Sources of Kafka tokens (SASL OAUTHBEARER, RFC 7628): a file, an issuer's token endpoint, AWS's signer."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import math
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote_plus

import aiohttp
from aiokafka.errors import KafkaConnectionError

from gateway.settings.kafka import KafkaOauthConfig
from gateway.settings.values import ConfigError

FETCH_LIMIT_S: Final = 10.0
LARGEST: Final = 64 * 1024
"""Largest token, password or endpoint answer in bytes; real ones have a few thousand at most."""
FRESH: Final = 0.5
"""Share of a token's lifetime after which the next one is fetched: a connection's login expires with its token."""
UNKNOWN_LIFE_S: Final = 60.0
"""Assumed lifetime of a token that does not state it."""
LONGEST_LIFE_S: Final = 366 * 86400.0
"""A longer lifetime, such as JSON's Infinity, counts as not stated: the token would never be fetched again."""
MSK_MODULE: Final = "aws_msk_iam_sasl_signer.MSKAuthTokenProvider"
_WORD: Final = re.compile(r"[a-z_]{1,40}")


class LoginError(KafkaConnectionError):  # type: ignore[misc]  # aiokafka carries no types
    """There are no usable credentials, or Kafka rejects them; the text says why, without a secret."""


class Token(NamedTuple):
    """A token for Kafka."""

    value: str
    ends: float | None  # expiry in seconds since the epoch, or None when unknown
    fresh_until: float  # when the next token should be fetched, in seconds since the epoch


TokenSource = Callable[[], Awaitable[Token]]
"""Fetches a new token. Raises LoginError."""


def token_source(config: KafkaOauthConfig) -> TokenSource:
    """Return the configured token source. Raises ConfigError when none is configured or it cannot be used."""
    if config.token_file is not None:
        return _file_tokens(config.token_file)
    if config.token_url is not None:
        return EndpointTokens(config).fetch
    if config.msk_region is not None:
        return _msk_tokens(config.msk_region)
    raise ConfigError('kafka.sasl_mechanism = "OAUTHBEARER" needs kafka.oauth.token_file, token_url or msk_region')


def read_secret(key: str, path: Path) -> str:
    """Return a file's content, stripped. Raises ConfigError, which names the key and never the content."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1).decode("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path} is not UTF-8 text") from None
    if not text or len(text) > LARGEST:
        raise ConfigError(f"{key}: {path} is empty, or longer than {LARGEST} bytes")
    return text


def expiry_of(token: str) -> float | None:
    """Return the `exp` of a JSON Web Token, or None if it has none. The signature is for Kafka to check."""
    try:
        part = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        ends = float(claims["exp"])
        return ends if math.isfinite(ends) else None
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def _file_tokens(path: Path) -> TokenSource:
    """Return the source for a file that another program keeps up to date; it is read for each connection.

    Raises:
        ConfigError: the file has no token. An expired one may be replaced before it is needed.
    """
    key = "kafka.oauth.token_file"
    read_secret(key, path)

    async def fetch() -> Token:
        try:
            value = read_secret(key, path)
        except ConfigError as error:
            raise LoginError(str(error)) from None
        ends, now = expiry_of(value), time.time()
        if ends is not None and ends <= now:
            raise LoginError(f"{key}: the token in {path} expired {now - ends:.0f} s ago")
        return Token(value, ends, fresh_until=0.0)

    return fetch


class EndpointTokens:
    """The client credentials grant of RFC 6749, part 4.4."""

    def __init__(self, config: KafkaOauthConfig) -> None:
        """Raise ConfigError when a configured file cannot be used."""
        self._config = config
        self._secret()
        self._tls()

    def _secret(self) -> str:
        path, secret = self._config.client_secret_file, self._config.client_secret
        if path is not None:
            return read_secret("kafka.oauth.client_secret_file", path)
        assert secret is not None
        return secret.get_secret_value()

    def _tls(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self._config.cafile)
        except (OSError, ssl.SSLError) as error:
            why = getattr(error, "strerror", None) or "no certificates in PEM"
            raise ConfigError(f"kafka.oauth.cafile: {self._config.cafile}: {why}") from None

    async def fetch(self) -> Token:
        """Request a token from the endpoint. Raises LoginError."""
        url = self._config.token_url
        assert url is not None
        form = {"grant_type": "client_credentials"}
        if self._config.scope is not None:
            form["scope"] = self._config.scope
        try:
            # Both are form-encoded (RFC 6749 part 2.3.1), so that a colon in the client id is no separator.
            login = f"{quote_plus(self._config.client_id or '')}:{quote_plus(self._secret())}".encode()
            headers = {"Accept": "application/json", "Authorization": f"Basic {base64.b64encode(login).decode()}"}
            timeout = aiohttp.ClientTimeout(total=FETCH_LIMIT_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(
                    url.get_secret_value(), data=form, headers=headers, ssl=self._tls(), allow_redirects=False
                ) as answer,
            ):
                status, body = answer.status, await answer.content.read(LARGEST + 1)
                while len(body) <= LARGEST and (more := await answer.content.read(LARGEST)):
                    body += more
        except ConfigError as error:
            raise LoginError(str(error)) from None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise LoginError(f"no token: {url} does not answer ({type(error).__name__})") from None
        return _parse_answer(str(url), status, body, time.time())


def _parse_answer(url: str, status: int, body: bytes, now: float) -> Token:
    """Return the token in an endpoint's answer (RFC 6749, part 5). Raises LoginError."""
    try:
        answer = json.loads(body) if len(body) <= LARGEST else None
    except (ValueError, RecursionError):
        answer = None
    said = answer if isinstance(answer, dict) else {}
    value, life = said.get("access_token"), said.get("expires_in")
    if status != 200 or not isinstance(value, str) or not value.isascii() or not value.isprintable() or not value:
        code = said.get("error")
        words = f" ({code})" if isinstance(code, str) and _WORD.fullmatch(code) else ""
        raise LoginError(f"no token: {url} answers {status}{words}{', without one' if status == 200 else ''}")
    if isinstance(life, int | float) and not isinstance(life, bool) and 0 < life <= LONGEST_LIFE_S:
        return Token(value, now + life, now + FRESH * life)
    ends = expiry_of(value)
    return Token(value, ends, now + FRESH * (UNKNOWN_LIFE_S if ends is None else max(0.0, ends - now)))


def _msk_tokens(region: str) -> TokenSource:
    """Return the source for AWS MSK: tokens for minutes, signed here with the credentials that AWS's library finds.

    Raises:
        ConfigError: AWS's signer is not installed. It is imported only here.
    """
    try:
        sign = importlib.import_module(MSK_MODULE).generate_auth_token
    except ImportError:
        raise ConfigError(
            "kafka.oauth.msk_region needs the package of the extra msk: pip install trivium[msk]"
        ) from None

    async def fetch() -> Token:
        try:  # in a thread: the library may query the machine's metadata service
            value, ends_ms = await asyncio.wait_for(asyncio.to_thread(sign, region), FETCH_LIMIT_S)
        except Exception as error:  # AWS's library raises many kinds
            raise LoginError(f"no token for MSK: AWS's library says {type(error).__name__}") from None
        now, ends = time.time(), ends_ms / 1000
        return Token(value, ends, now + FRESH * (ends - now))

    return fetch
