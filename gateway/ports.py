"""Which addresses the gateway and its embedded broker listen on: no port twice, none for everybody by accident."""

from __future__ import annotations

from itertools import combinations

from gateway.config import Address, Config, ConfigError
from gateway.embedded.storage import HOST

EVERY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared with, not bound to


def listeners(config: Config) -> list[tuple[str, Address]]:
    """Every listener's key and address."""
    addresses = [
        ("mqtt.address", config.mqtt.address),
        ("mqtt.websocket_address", config.mqtt.websocket_address),
        ("amqp.address", config.amqp.address),
        ("amqp.websocket_address", config.amqp.websocket_address),
        ("http.address", config.http.address),
        ("management.address", config.management.address),
    ]
    return [(key, address) for key, address in addresses if address is not None]


def check_ports(config: Config) -> None:
    """Refuse two listeners on one port; ConfigError: names both keys."""
    taken = listeners(config)
    if config.kafka.bootstrap_servers is None:
        taken.append(("embedded.port", Address(f"{HOST}:{config.embedded.port}")))
        taken.append(("embedded.controller_port", Address(f"{HOST}:{config.embedded.controller_port}")))
    clashes = [
        f"{one_key} and {other_key} are both on port {one.port}: give one of them another"
        for (one_key, one), (other_key, other) in combinations(taken, 2)
        if one.port and one.port == other.port and _meet(one.host, other.host)
    ]
    if clashes:
        raise ConfigError("\n".join(clashes))


def _meet(one: str, other: str) -> bool:
    one, other = ("127.0.0.1" if host == "localhost" else host for host in (one, other))
    return one == other or not EVERY_ADDRESS.isdisjoint((one, other))


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
