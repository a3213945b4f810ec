"""Which addresses the gateway and its embedded broker listen on: no port twice."""

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
