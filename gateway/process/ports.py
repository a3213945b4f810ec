"""The configured listeners, and their checks: no duplicate ports, no accidental exposure, no impossible logins.

The listeners are the `[[listeners]]`, or if there are none, those of the sections (`mqtt.address` and others), which
accept all configured logins and use the TLS of `security`. All other code uses `ListenerSettings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Final

from gateway.settings.config import Address, AmqpConfig, Config, ConfigError, HttpConfig, MqttConfig, SecurityConfig
from gateway.settings.listeners import ListenerConfig, ListenerProtocol, ListenerSettings, TlsConfig
from gateway.settings.values import LoginMethod

LOOPBACK: Final = "127.0.0.1"  # the embedded Kafka listens nowhere else
EVERY_ADDRESS: Final = ("0.0.0.0", "::")  # noqa: S104 - IPv4, and IPv6 (bound without IPv4); only compared with
RESERVED: Final = frozenset({"management", "kafka", "kafka_pid", "pid"})
"""Names that the ready file uses for other values."""
_SHORT: Final[tuple[tuple[ListenerProtocol, str, str], ...]] = (
    ("mqtt", "mqtt", "address"),
    ("amqp", "amqp", "address"),
    ("http", "http", "address"),
    ("mqtt_websocket", "mqtt", "websocket_address"),
    ("amqp_websocket", "amqp", "websocket_address"),
)
"""The listeners of the sections: protocol and name, section, key of the address."""
_NEEDS: Final[dict[LoginMethod, str]] = {
    "anonymous": "security.allow_anonymous",
    "password": "security.password_file or security.plugins",
    "scram": "security.scram_file",
    "token": "security.oauth",
    "certificate": "a client CA (tls.client_ca), or proxy_protocol with security.proxy_common_names",
}


def listeners(config: Config) -> tuple[ListenerSettings, ...]:
    """Return all listeners except management.

    Raises:
        ConfigError: a duplicate name, a login method that is not configured, or a listener at which no client could
            log in; the text names the key.
    """
    configured = _listed(config) if config.listeners else _of_sections(config)
    configured_listeners = tuple(_settings(config.security, key, listener) for key, listener in configured)
    for listener in configured_listeners:
        if not listener.logins:
            raise ConfigError(
                "security.allow_anonymous is false, and neither security.password_file, security.scram_file,"
                " security.plugins, security.oauth nor security.tls_client_ca is set: no client could log in at"
                f" {listener.key}"
            )
    return configured_listeners


def _of_sections(config: Config) -> Iterator[tuple[str, ListenerConfig]]:
    """Yield a listener for each address in the sections, with the address's key."""
    for protocol, section, key in _SHORT:
        settings: MqttConfig | AmqpConfig | HttpConfig = getattr(config, section)
        address: Address | None = getattr(settings, key)
        if address is not None:
            yield (
                f"{section}.{key}",
                ListenerConfig(
                    name=protocol, protocol=protocol, address=address, proxy_protocol=settings.proxy_protocol
                ),
            )


def _listed(config: Config) -> Iterator[tuple[str, ListenerConfig]]:
    """Yield the `[[listeners]]`, with their addresses' keys; addresses in the sections are then not allowed."""
    for section in (config.mqtt, config.amqp, config.http):
        usual = type(section)()
        for key in ("address", "websocket_address", "proxy_protocol"):
            if getattr(section, key, None) != getattr(usual, key, None):
                name = type(section).__name__.removesuffix("Config").lower()
                raise ConfigError(f"{name}.{key}: there are [[listeners]], so it must be set there")
    names: set[str] = set()
    for listener in config.listeners:
        if listener.name in names or listener.name in RESERVED:
            what = "is used twice" if listener.name in names else "is reserved"
            raise ConfigError(f"listeners.{listener.name}: the name {what}: choose another")
        names.add(listener.name)
        yield f"listeners.{listener.name}.address", listener


def _settings(security: SecurityConfig, key: str, listener: ListenerConfig) -> ListenerSettings:
    """Return a listener's settings. `key` is the key of its address."""
    section = key.rpartition(".")[0]
    tls = None if listener.plain else listener.tls or security.tls
    logins = _logins(security, tls, proxied=listener.proxy_protocol)
    if listener.logins is not None:
        for login in listener.logins:
            if login not in logins:
                raise ConfigError(f"{section}.logins: {login} needs {_NEEDS[login]}")
        logins = frozenset(listener.logins)
    return ListenerSettings(
        name=listener.name,
        protocol=listener.protocol,
        address=listener.address,
        key=key,
        tls_key="security.tls_" if listener.tls is None else f"{section}.tls.",
        tls=tls,
        proxy_protocol=listener.proxy_protocol,
        logins=logins,
        max_connections=listener.max_connections,
    )


def _logins(security: SecurityConfig, tls: TlsConfig | None, *, proxied: bool) -> frozenset[LoginMethod]:
    """Return all login methods that are possible at a listener."""
    certified = (tls is not None and tls.client_ca is not None) or (proxied and security.proxy_common_names)
    return security.logins | {"certificate"} if certified else security.logins


def addresses(config: Config) -> list[tuple[str, Address]]:
    """Return the keys and addresses of all listeners, management included."""
    return [
        *((listener.key, listener.address) for listener in listeners(config)),
        ("management.address", config.management.address),
    ]


def check_ports(config: Config) -> None:
    """Raise ConfigError, which names both keys, if two listeners use the same port."""
    taken = addresses(config)
    if config.kafka.bootstrap_servers is None:
        taken.append(("embedded.port", Address(f"{LOOPBACK}:{config.embedded.port}")))
        taken.append(("embedded.controller_port", Address(f"{LOOPBACK}:{config.embedded.controller_port}")))
    clashes = [
        f"{key} and {other_key} are both on port {address.port}: change one of them"
        for (key, address), (other_key, other) in combinations(taken, 2)
        if address.port and address.port == other.port and _overlap(address.host, other.host)
    ]
    if clashes:
        raise ConfigError("\n".join(clashes))


def _overlap(address: str, other: str) -> bool:
    if "localhost" in (address, other):  # both families
        near = (address, other, "127.0.0.1", "::1")
        return address == other or any(
            _overlap(host, other if address == "localhost" else address) for host in near[2:]
        )
    return address == other or (
        (":" in address) == (":" in other) and (address in EVERY_ADDRESS or other in EVERY_ADDRESS)
    )


def check_proxies(config: Config) -> None:
    """Raise ConfigError if a listener expects PROXY headers but no proxies are trusted."""
    for listener in listeners(config):
        if listener.proxy_protocol and not config.security.trusted_proxies:
            section = listener.key.rpartition(".")[0]
            raise ConfigError(
                f"{section}.proxy_protocol: needs security.trusted_proxies, the networks of the balancers"
            )


def check_exposure(config: Config) -> list[str]:
    """Refuse a listener beyond loopback without authentication, unless `security.insecure` is set.

    Beyond loopback the management listener asks for a password (see `gateway.observe.management`), so it needs a
    password check; client certificates are not enough.

    Returns:
        Warnings about allowed but risky settings, for the log.

    Raises:
        ConfigError: the text names the key of every such listener.
    """
    security = config.security
    exposed = [listener for listener in listeners(config) if not listener.address.is_loopback]
    open_ones = [(listener.key, listener.address) for listener in exposed if not listener.authenticates]
    in_clear = [
        (listener.key, listener.address, "passwords" if "password" in listener.logins else "tokens")
        for listener in exposed
        if listener.tls is None and not listener.logins.isdisjoint(("password", "token"))
    ]
    management = config.management.address
    if not management.is_loopback:
        if not security.takes_passwords:
            open_ones.append(("management.address", management))
        if security.tls is None and security.takes_passwords:
            in_clear.append(("management.address", management, "passwords"))
    warnings = [
        f"{key}: {address} can be reached from other machines without authentication" for key, address in open_ones
    ]
    if open_ones and not security.insecure:
        raise ConfigError(
            "; ".join(warnings)
            + " (set security.allow_anonymous = false with security.password_file, security.scram_file,"
            " security.password_source, security.plugins or security.oauth, or security.tls_require_client_cert;"
            " for one of [[listeners]], logins without anonymous; or allow it with security.insecure or --insecure)"
        )
    return warnings + [f"{key}: {address} accepts {what} unencrypted: it has no TLS" for key, address, what in in_clear]
