"""Where a token for Kafka comes from (SASL OAUTHBEARER, RFC 7628): a file, an issuer's token endpoint, AWS's signer."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote_plus

import aiohttp
from aiokafka.errors import KafkaConnectionError

from gateway.settings.kafka import KafkaOauthConfig
from gateway.settings.values import ConfigError

FETCH_LIMIT_S: Final = 10.0
LARGEST: Final = 64 * 1024
"""Bytes of a token, a password, or an answer of the endpoint; real ones have some thousand at most."""
FRESH: Final = 0.5
"""So much of its life a token is shown to Kafka before another one is asked for: a connection's login ends with it."""
UNKNOWN_LIFE_S: Final = 60.0
"""What is taken for the life of a token that does not say it."""
MSK_MODULE: Final = "aws_msk_iam_sasl_signer.MSKAuthTokenProvider"
_WORD: Final = re.compile(r"[a-z_]{1,40}")


class LoginError(KafkaConnectionError):  # type: ignore[misc]  # aiokafka carries no types
    """There is nothing to log in with, or Kafka does not take it; the text says why, without a secret."""


class Token(NamedTuple):
    """What Kafka is shown."""

    value: str
    ends: float | None  # seconds since the epoch; None: not known
    fresh_until: float  # when another one should be asked for, likewise


class TokenSource(Protocol):
    """Gives tokens."""

    async def fetch(self) -> Token:
        """A new token. Raises LoginError."""


def token_source(config: KafkaOauthConfig) -> TokenSource:
    """The configured one; ConfigError when there is none, or it cannot work."""
    if config.token_file is not None:
        return FileTokens(config.token_file)
    if config.token_url is not None:
        return EndpointTokens(config)
    if config.msk_region is not None:
        return MskTokens(config.msk_region)
    raise ConfigError('kafka.sasl_mechanism = "OAUTHBEARER" needs kafka.oauth.token_file, token_url or msk_region')


def read_secret(key: str, path: Path) -> str:
    """What stands in a file alone, without the blanks around it; ConfigError names the key and never the content."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1).decode("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path} is no text") from None
    if not text or len(text) > LARGEST:
        raise ConfigError(f"{key}: {path} is empty, or longer than {LARGEST} bytes")
    return text


def end_of(token: str) -> float | None:
    """When a JSON Web Token says that it ends; None: it is none, or does not say so. Kafka checks its signature."""
    try:
        part = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


class FileTokens:
    """A file that somebody else keeps up to date; it is read for each connection."""

    def __init__(self, path: Path) -> None:
        """ConfigError when there is no token in it now; one that has ended may be replaced before it is needed."""
        self._path = path
        self._read()

    def _read(self) -> str:
        return read_secret("kafka.oauth.token_file", self._path)

    async def fetch(self) -> Token:
        """What is in the file. Raises LoginError: nothing, or a token that has ended."""
        try:
            value = self._read()
        except ConfigError as error:
            raise LoginError(str(error)) from None
        ends, now = end_of(value), time.time()
        if ends is not None and ends <= now:
            raise LoginError(f"kafka.oauth.token_file: the token in {self._path} has ended {now - ends:.0f} s ago")
        return Token(value, ends, fresh_until=0.0)


class EndpointTokens:
    """The client credentials of RFC 6749, part 4.4."""

    def __init__(self, config: KafkaOauthConfig) -> None:
        """ConfigError: a file that is named cannot be used."""
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
        """Ask the endpoint. Raises LoginError."""
        url = self._config.token_url
        assert url is not None
        form = {"grant_type": "client_credentials"}
        if self._config.scope is not None:
            form["scope"] = self._config.scope
        try:
            # Both in the form of a web form, as RFC 6749 part 2.3.1 has it, so that a colon in a name parts nothing.
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
        return _granted(str(url), status, body, time.time())


def _granted(url: str, status: int, body: bytes, now: float) -> Token:
    """The token in an endpoint's answer (RFC 6749, part 5)."""
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
    if isinstance(life, int | float) and not isinstance(life, bool) and life > 0:
        return Token(value, now + life, now + FRESH * life)
    ends = end_of(value)
    return Token(value, ends, now + FRESH * (UNKNOWN_LIFE_S if ends is None else max(0.0, ends - now)))


class MskTokens:
    """Tokens for AWS's MSK, signed here with the credentials that AWS's library finds; they are good for minutes."""

    def __init__(self, region: str) -> None:
        """ConfigError: the package is missing, which is imported only here."""
        self._region = region
        try:
            signer = importlib.import_module(MSK_MODULE)
        except ImportError:
            raise ConfigError(
                "kafka.oauth.msk_region needs the package of the extra msk: pip install trivium[msk]"
            ) from None
        self._sign: Callable[[str], Any] = signer.generate_auth_token

    async def fetch(self) -> Token:
        """Sign one, in a thread: the library may ask the machine's metadata service. Raises LoginError."""
        try:
            value, ends_ms = await asyncio.wait_for(asyncio.to_thread(self._sign, self._region), FETCH_LIMIT_S)
        except Exception as error:  # of AWS's library, which has many
            raise LoginError(f"no token for MSK: AWS's library says {type(error).__name__}") from None
        now, ends = time.time(), ends_ms / 1000
        return Token(value, ends, now + FRESH * (ends - now))
