"""TLS: one context for all listeners with the same files, a new certificate without a restart."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import structlog

from gateway.config import ConfigError
from gateway.settings.listeners import TlsConfig

log = structlog.get_logger(__name__)

MINIMUM_VERSION: Final = ssl.TLSVersion.TLSv1_2


class Tls:
    """The server's certificate, and whose client certificates it believes.

    No application protocol (ALPN) is announced: one context may serve all protocols, and each has ports of its own.
    """

    def __init__(self, config: TlsConfig, key: str = "security.tls_") -> None:
        """Load the certificate chain, the key and the client authorities; keys in errors begin with `key`.

        Raises:
            ConfigError: a file that cannot be used; names the key.
        """
        self._config = config
        self._key = key
        self.context = _loaded(config, key)
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
            _loaded(self._config, self._key)
            _load(self.context, self._config, self._key)
        except ConfigError as error:
            self.failed_reloads += 1
            log.error("certificates not reloaded, the old ones stay", error=str(error))
            return False
        self.reloads += 1
        log.info("certificates reloaded", file=str(self._config.cert))
        return True


class Certificates:
    """The TLS of all listeners; those with the same files share a context."""

    def __init__(self) -> None:
        self._made: dict[TlsConfig, Tls] = {}

    def context(self, config: TlsConfig | None, key: str = "security.tls_") -> ssl.SSLContext | None:
        """What to open TLS connections with; None: plain text.

        Raises:
            ConfigError: a file that cannot be used; names its key, which begins with `key`.
        """
        if config is None:
            return None
        if config not in self._made:
            self._made[config] = Tls(config, key)
        return self._made[config].context

    def reload(self) -> None:
        """Load all files anew; what is broken leaves the old one in use."""
        for tls in self._made.values():
            tls.reload()


def _loaded(config: TlsConfig, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = MINIMUM_VERSION
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    _load(context, config, key)
    return context


def _load(context: ssl.SSLContext, config: TlsConfig, key: str) -> None:
    for name in ("cert", "key", "client_ca"):
        path: Path | None = getattr(config, name)
        if path is not None:
            _check_readable(f"{key}{name}", path)

    def no_password() -> str:
        # Without this OpenSSL would ask on the terminal and stop the event loop for it.
        raise ConfigError(f"{key}key: the key is encrypted; give one without a pass phrase")

    try:
        context.load_cert_chain(config.cert, config.key, password=no_password)
    except ssl.SSLError as error:
        what = error.reason or "not PEM"
        raise ConfigError(f"{key}cert, {key}key: cannot be used together ({what})") from None
    if config.client_ca is not None:
        try:
            context.load_verify_locations(config.client_ca)
        except ssl.SSLError as error:
            raise ConfigError(f"{key}client_ca: {error.reason or 'not PEM'}") from None
        required = config.require_client_cert
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL


def _check_readable(key: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
