"""Refuses to listen beyond this machine without authentication, unless the configuration allows it explicitly."""

from __future__ import annotations

from gateway.config import Config, ConfigError
from gateway.ports import listeners


def check_exposure(config: Config) -> list[str]:
    """Refuse a listener beyond loopback that does not authenticate, unless `security.insecure`.

    The management listener asks for a password when `/metrics` is to be seen from elsewhere (see
    `gateway.observe.management`), so it needs somebody who checks passwords: a certificate alone does not do.

    Returns:
        Warnings: what is allowed and still worth a line in the log.

    Raises:
        ConfigError: names every such listener's key.
    """
    security = config.security
    exposed = [(key, address) for key, address in listeners(config) if not address.is_loopback]
    passwords = security.password_file is not None or bool(security.plugins)
    open_ones = [
        f"{key}: {address} can be reached from other machines without authentication"
        for key, address in exposed
        if not (passwords if key == "management.address" else security.authenticates) or not security.authenticates
    ]
    if open_ones and not security.insecure:
        raise ConfigError(
            "; ".join(open_ones)
            + " (set security.allow_anonymous = false with security.password_file, security.scram_file,"
            " security.plugins or security.oauth, or security.tls_require_client_cert; or allow it with"
            " security.insecure or --insecure)"
        )
    warnings = list(open_ones)
    if security.tls_cert is None and (passwords or security.oauth.enabled):
        secrets = "passwords" if passwords else "tokens"
        warnings += [
            f"{key}: {address} takes {secrets} unencrypted: security.tls_cert is not set" for key, address in exposed
        ]
    return warnings
