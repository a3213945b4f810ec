"""The gateway's credentials for Kafka: client certificate, password, tokens, always as current as their source.

A process has one `Login` per Kafka cluster. aiokafka's clients pass it to their connections (as their token provider),
and each connection reads its credentials from it when it connects. So changed files need no restart, and a client that
lives for months never uses expired credentials (ADR 0073).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog
from aiokafka.abc import AbstractTokenProvider
from cryptography import x509

from gateway.kafka.driver.tokens import LoginError, Token, read_secret, token_source
from gateway.runtime.failures import Repeats
from gateway.runtime.files import stamp
from gateway.runtime.spawn import start_contained
from gateway.settings.kafka import KafkaConfig
from gateway.settings.values import ConfigError
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)

RETRY_S: Final = 2.0
"""Pause after a failed token request, since many clients may want a token."""
LOG_INTERVAL_S: Final = 60.0
"""Interval between two identical log lines."""


class KafkaLoginStatistics(msgspec.Struct):
    """Statistics of the gateway's logins to Kafka."""

    tokens: Annotated[int, counter("tokens fetched from a file, an issuer or AWS's signer")] = 0
    token_failures: Annotated[int, counter("failed attempts to fetch a token")] = 0
    refused: Annotated[int, counter("failed logins to Kafka, including TLS errors")] = 0
    renewed: Annotated[int, counter("connections replaced before their login expired")] = 0
    reloads: Annotated[int, counter("reloads of the client certificate and the authorities")] = 0
    failed_reloads: Annotated[int, counter("failed reloads, after which the old files stay in use")] = 0
    certificate_ends: Annotated[
        float, gauge("expiry of the client certificate in seconds since 1970; 0 without one")
    ] = 0.0


class Login(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka carries no types
    """The credentials of this process for one Kafka cluster.

    Attributes:
        problem: why the last login failed, as a sentence; None when it succeeded.
        counts: what has happened so far.
    """

    def __init__(self, config: KafkaConfig) -> None:
        """Read all files.

        Raises:
            ConfigError: a value is missing or cannot be used; the text names the key.
        """
        self.config = config
        self.problem: str | None = None
        self.counts = KafkaLoginStatistics()
        self._logged = Repeats(LOG_INTERVAL_S)
        self._tls: ssl.SSLContext | None = None
        self._stamps: tuple[object, ...] = ()
        if config.security_protocol.endswith("SSL"):
            self._stamps = self._file_stamps()
            self._tls = self._load_tls()
        self._tokens = None
        self._token: Token | None = None
        self._failed: tuple[str, float] | None = None
        self._fetching: asyncio.Task[None] | None = None
        if config.security_protocol.startswith("SASL"):
            if config.sasl_mechanism == "OAUTHBEARER":
                self._tokens = token_source(config.oauth)
            elif config.sasl_username is None or self.password is None:
                raise ConfigError(
                    "kafka.sasl_username and kafka.sasl_password (or sasl_password_file) are needed for SASL"
                )

    # Credentials of a connection

    @property
    def context(self) -> ssl.SSLContext | None:
        """The TLS context of the current files. Unusable files are logged, and the former context stays in use."""
        if self._tls is not None:
            stamps = self._file_stamps()
            if stamps != self._stamps:
                self._stamps = stamps
                self._reload_tls()
        return self._tls

    @property
    def password(self) -> str | None:
        """The password for PLAIN and SCRAM. Raises ConfigError when its file cannot be read."""
        path, secret = self.config.sasl_password_file, self.config.sasl_password
        if path is not None:
            return read_secret("kafka.sasl_password_file", path)
        return None if secret is None else secret.get_secret_value()

    async def token(self) -> str:
        """Return a valid token, fetching a new one when the last is no longer fresh. Raises LoginError."""
        token = self._token
        if token is None or time.time() >= token.fresh_until:
            if self._fetching is None:
                self._fetching = start_contained(self._fetch(), "token for Kafka")
            await asyncio.shield(self._fetching)
            token = self._token
        if token is None:
            raise LoginError("no token" if self._failed is None else self._failed[0])
        return token.value

    def extensions(self) -> Mapping[str, str]:
        """Return the SASL extensions that are sent with the token."""
        return self.config.oauth.extensions

    async def _fetch(self) -> None:
        """Fetch a token; while that fails, the last one stays in use until it expires."""
        assert self._tokens is not None
        try:
            if self._failed is not None and time.monotonic() < self._failed[1] + RETRY_S:
                return
            try:
                self._token = await self._tokens()
                self._failed = None
                self.counts.tokens += 1
            except LoginError as error:
                self.counts.token_failures += 1
                self._failed = (str(error), time.monotonic())
                token = self._token
                if token is None or token.ends is None or token.ends <= time.time():
                    self._token = None
        finally:
            self._fetching = None

    def _file_stamps(self) -> tuple[object, ...]:
        """Return values that change when one of the files does."""
        files = (self.config.ssl_cafile, self.config.ssl_certfile, self.config.ssl_keyfile)
        return tuple(stamp(path) for path in files if path is not None)

    def _reload_tls(self) -> None:
        try:
            self._tls = self._load_tls()
        except ConfigError as error:
            self.counts.failed_reloads += 1
            log.error("could not reload the certificates for Kafka, the old ones stay in use", error=str(error))
            return
        self.counts.reloads += 1
        log.info("reloaded the certificates for Kafka")

    def _load_tls(self) -> ssl.SSLContext:
        config = self.config
        for key in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
            path: Path | None = getattr(config, key)
            if path is not None:
                try:
                    path.open("rb").close()
                except OSError as error:
                    raise ConfigError(f"kafka.{key}: cannot read {path}: {error.strerror}") from None
        try:
            context = ssl.create_default_context(cafile=config.ssl_cafile)
        except ssl.SSLError as error:
            raise ConfigError(f"kafka.ssl_cafile: {config.ssl_cafile}: {error.reason or 'not PEM'}") from None
        if config.ssl_certfile is not None:
            password = config.ssl_key_password
            try:
                context.load_cert_chain(
                    config.ssl_certfile,
                    config.ssl_keyfile,
                    password=_no_password if password is None else password.get_secret_value(),
                )
            except ssl.SSLError as error:
                what = error.reason or "not PEM, or another password"
                raise ConfigError(f"kafka.ssl_certfile, kafka.ssl_keyfile: cannot be used together ({what})") from None
            self.counts.certificate_ends = _expiry_of(config.ssl_certfile)
        return context

    # Results of a login

    def login_failed(self, why: str) -> None:
        """Record and log that a login failed."""
        self.counts.refused += 1
        self.problem = why
        if self._logged.suppressed(why) is not None:
            log.error("cannot log in to Kafka", error=why)

    def login_succeeded(self) -> None:
        """Record that a login succeeded."""
        if self.problem is not None:
            self.problem = None
            self._logged = Repeats(LOG_INTERVAL_S)
            log.info("logging in to Kafka works again")

    def reload(self) -> None:
        """Reload everything for future connections; open ones are not affected."""
        if self._tls is not None:
            self._stamps = self._file_stamps()
            self._reload_tls()
        if self._token is not None:
            self._token = Token(self._token.value, self._token.ends, fresh_until=0.0)
        self._failed = None


class Logins:
    """All logins of the process: one, except in tests."""

    def __init__(self) -> None:
        self._logins: list[Login] = []

    def of(self, config: KafkaConfig) -> Login | None:
        """Return the login for a configuration, or None for PLAINTEXT.

        Raises:
            ConfigError: a value is missing or cannot be used; the text names the key.
        """
        if config.security_protocol == "PLAINTEXT":
            return None
        for login in self._logins:
            if login.config == config:
                return login
        login = Login(config)
        self._logins.append(login)
        return login

    def reload(self) -> None:
        """Reload all files and tokens."""
        for login in self._logins:
            login.reload()

    @property
    def problem(self) -> str | None:
        """Why the last login to Kafka failed, as a sentence; None when it succeeded."""
        return next((login.problem for login in self._logins if login.problem is not None), None)

    def statistics(self) -> KafkaLoginStatistics:
        """Return the statistics of the process's login."""
        return msgspec.structs.replace(self._logins[-1].counts) if self._logins else KafkaLoginStatistics()


logins: Final = Logins()
"""The logins of this process."""


def _expiry_of(path: Path) -> float:
    """Return when the first certificate of a file expires. Raises ConfigError when it has expired already."""
    try:
        ends = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        raise ConfigError(f"kafka.ssl_certfile: {path}: no certificate") from None
    if ends <= datetime.now(UTC):
        raise ConfigError(f"kafka.ssl_certfile: the certificate in {path} has expired on {ends:%Y-%m-%d %H:%M} UTC")
    return ends.timestamp()


def _no_password() -> str:
    # Without this OpenSSL would prompt on the terminal and block the event loop.
    raise ConfigError("kafka.ssl_keyfile: the key is encrypted, and kafka.ssl_key_password is not set")
