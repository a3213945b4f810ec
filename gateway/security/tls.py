"""TLS: listeners with the same files share one context; certificates are reloaded without a restart."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509

from gateway.settings.config import ConfigError
from gateway.settings.listeners import TlsConfig

log = structlog.get_logger(__name__)

MINIMUM_VERSION: Final = ssl.TLSVersion.TLSv1_2


@dataclass(slots=True)
class _Made:
    context: ssl.SSLContext
    key: str  # for errors
    end: float | None


class Certificates:
    """The TLS contexts of all listeners; listeners with the same files share a context.

    A context has the server's certificate and the client CAs that it trusts. No application protocol (ALPN) is
    announced: one context may serve all protocols, each on its own ports.
    """

    def __init__(self) -> None:
        self._made: dict[TlsConfig, _Made] = {}

    def context(self, config: TlsConfig | None, key: str = "security.tls_") -> ssl.SSLContext | None:
        """Return the context for a listener; None means no TLS.

        Raises ConfigError, which names the setting (it begins with `key`), if a file cannot be used.
        """
        if config is None:
            return None
        if config not in self._made:
            self._made[config] = _Made(_loaded(config, key), key, _end(config))
        return self._made[config].context

    def end(self, config: TlsConfig) -> float | None:
        """Return when the first certificate of a loaded chain ends, in seconds since the epoch; None if it is odd."""
        return self._made[config].end

    def reload(self) -> None:
        """Reload all files into the same contexts. New connections use them; open ones keep their certificate.

        The files are first loaded into a separate context, so a broken chain, or one that does not match its key,
        leaves the old one in use. A client CA that was removed from the file stays trusted until a restart (OpenSSL's
        store can only grow).
        """
        for config, made in self._made.items():
            try:
                _loaded(config, made.key)
                _load(made.context, config, made.key)
            except ConfigError as error:
                log.error("certificates not reloaded, the old ones stay in use", error=str(error))
            else:
                made.end = _end(config)
                log.info("certificates reloaded", file=str(config.cert))


def _end(config: TlsConfig) -> float | None:
    try:
        chain = x509.load_pem_x509_certificates(config.cert.read_bytes())
    except (OSError, ValueError):  # OpenSSL has accepted it, and is less strict
        return None
    return min(certificate.not_valid_after_utc.timestamp() for certificate in chain)


def _loaded(config: TlsConfig, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = MINIMUM_VERSION
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    _load(context, config, key)
    return context


def _load(context: ssl.SSLContext, config: TlsConfig, key: str) -> None:
    for name in ("cert", "key", "client_ca"):
        path: Path | None = getattr(config, name)
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{key}{name}: cannot read {path}: {error.strerror}") from None

    def no_password() -> str:
        # Without this callback OpenSSL would ask on the terminal and block the event loop.
        raise ConfigError(f"{key}key: the key is encrypted; use one without a passphrase")

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
