"""TLS: one context for every listener, a new certificate without a restart."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import structlog

from gateway.config import ConfigError, SecurityConfig

log = structlog.get_logger(__name__)

MINIMUM_VERSION: Final = ssl.TLSVersion.TLSv1_2


class Tls:
    """The server's certificate, and whose client certificates it believes.

    No application protocol (ALPN) is announced: one context serves three protocols, and each has a port of its own.
    """

    def __init__(self, config: SecurityConfig) -> None:
        """Load the certificate chain, the key and the client authorities.

        Raises:
            ConfigError: a file that cannot be used; names the key.
        """
        self._config = config
        self.context = _loaded(config)
        self.reloads = 0
        self.failed_reloads = 0

    def reload(self) -> bool:
        """Load the files anew into the same context; new connections get them, open ones keep theirs.

        The files are tried in a context of their own first: a broken chain, or one that does not go with its key,
        leaves the old one in use. A client authority that was taken out of its file stays believed until a restart
        (OpenSSL's store can only grow).

        Returns:
            Whether the new files are in use.
        """
        try:
            _loaded(self._config)
            _load(self.context, self._config)
        except ConfigError as error:
            self.failed_reloads += 1
            log.error("certificates not reloaded, the old ones stay", error=str(error))
            return False
        self.reloads += 1
        log.info("certificates reloaded")
        return True


def make_tls(config: SecurityConfig) -> Tls | None:
    """TLS as configured; None when there is no certificate."""
    return Tls(config) if config.tls_cert is not None else None


def _loaded(config: SecurityConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = MINIMUM_VERSION
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    _load(context, config)
    return context


def _load(context: ssl.SSLContext, config: SecurityConfig) -> None:
    assert config.tls_cert is not None
    assert config.tls_key is not None
    for key in ("tls_cert", "tls_key", "tls_client_ca"):
        path: Path | None = getattr(config, key)
        if path is not None:
            _check_readable(f"security.{key}", path)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except ssl.SSLError as error:
        what = error.reason or "not PEM"
        raise ConfigError(f"security.tls_cert, security.tls_key: cannot be used together ({what})") from None
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except ssl.SSLError as error:
            raise ConfigError(f"security.tls_client_ca: {error.reason or 'not PEM'}") from None
        required = config.tls_require_client_cert
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL


def _check_readable(key: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal and stop the event loop for it.
    raise ConfigError("security.tls_key: the key is encrypted; give one without a pass phrase")
