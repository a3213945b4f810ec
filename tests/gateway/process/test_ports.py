"""The listeners of a configuration, and the errors of invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.process.ports import check_exposure, check_ports, check_proxies, listeners
from gateway.settings.config import Config, ConfigError, load
from gateway.settings.listeners import ListenerSettings

TLS = {"cert": "c", "key": "k"}
CERTIFIED = {**TLS, "client_ca": "a", "require_client_cert": True}
PASSWORDS = {"password_file": "users"}


def check(config: Config) -> None:
    check_ports(config)
    check_proxies(config)
    check_exposure(config)


def one(name: str, port: int = 0, **settings: Any) -> dict[str, Any]:
    return {"name": name, "protocol": "mqtt", "address": f"127.0.0.1:{port}", **settings}


def configured(*entries: dict[str, Any], **sections: Any) -> Config:
    return Config(listeners=entries, **sections)


def by_name(config: Config) -> dict[str, ListenerSettings]:
    return {found.name: found for found in listeners(config)}


def test_the_sections_addresses_are_listeners_by_default() -> None:
    security = {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a", **PASSWORDS}
    found = by_name(Config(security=security, amqp={"websocket_address": "127.0.0.1:0", "proxy_protocol": True}))
    assert list(found) == ["mqtt", "amqp", "http", "amqp_websocket"]
    assert {name for name, settings in found.items() if settings.proxy_protocol} == {"amqp", "amqp_websocket"}
    assert found["mqtt"].tls == Config(security=security).security.tls is not None
    assert found["mqtt"].logins == {"anonymous", "password", "certificate"}


def test_listeners_with_tls_logins_and_limits() -> None:
    found = by_name(
        configured(
            one("local", 1883, plain=True, logins=["anonymous"]),
            one("mqtts", 8883, address="[::]:8883", tls=CERTIFIED, logins=["certificate"], max_connections=5),
            one("passwords", 8884, address="0.0.0.0:8884", logins=["password", "scram"]),
            one("inner", protocol="http", proxy_protocol=True, plain=True),
            security={**PASSWORDS, "scram_file": "s", "tls_cert": "c", "tls_key": "k"},
        )
    )
    assert list(found) == ["local", "mqtts", "passwords", "inner"]
    assert [settings.tls is not None for settings in found.values()] == [False, True, True, False]
    assert [settings.authenticates for settings in found.values()] == [False, True, True, False]
    assert found["mqtts"].max_connections == 5
    assert found["inner"].logins == {"anonymous", "password", "scram"}


@pytest.mark.parametrize(
    ("entries", "sections", "told"),
    [
        ([one("a"), one("a")], {}, "listeners.a: the name is used twice"),
        ([one("management")], {}, "listeners.management: the name is reserved"),
        ([one("a", 7001), one("b", 7001)], {}, "listeners.a.address and listeners.b.address are both on port 7001"),
        ([one("a")], {"mqtt": {"address": "127.0.0.1:7"}}, "mqtt.address: there are [[listeners]]"),
        ([one("a")], {"amqp": {"proxy_protocol": True}}, "amqp.proxy_protocol: there are [[listeners]]"),
        ([one("a", logins=["password"])], {}, "listeners.a.logins: password needs security.password_file"),
        ([one("a", logins=["scram"])], {}, "listeners.a.logins: scram needs security.scram_file"),
        ([one("a", logins=["token"])], {}, "listeners.a.logins: token needs security.oauth"),
        ([one("a", tls=TLS, logins=["certificate"])], {}, "listeners.a.logins: certificate needs a client CA"),
        (
            [one("a", logins=["anonymous"])],
            {"security": {"allow_anonymous": False, **PASSWORDS}},
            "listeners.a.logins: anonymous needs security.allow_anonymous",
        ),
        ([one("a")], {"security": {"allow_anonymous": False}}, "no client could log in at listeners.a.address"),
        ([one("a", proxy_protocol=True)], {}, "listeners.a.proxy_protocol: needs security.trusted_proxies"),
        ([one("a", address="0.0.0.0:0")], {}, "listeners.a.address: 0.0.0.0:0 can be reached"),
    ],
)
def test_an_impossible_configuration_is_refused(entries: list[Any], sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(configured(*entries, **sections))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (one("Big"), "listeners[1].name"),
        (one("a", protocol="smtp"), "listeners[1].protocol"),
        (one("a", tls={"cert": "c"}), "listeners[1].tls.key"),
        (one("a", tls={**TLS, "require_client_cert": True}), "listeners[1].tls: require_client_cert needs client_ca"),
        (one("a", tls=TLS, plain=True), "listeners[1]: plain and tls exclude each other"),
        (one("a", logins=[]), "listeners[1].logins"),
        (one("a", logins=["kerberos"]), "listeners[1].logins[1]"),
        (one("a", max_connections=0), "listeners[1].max_connections"),
    ],
)
def test_a_bad_entry_is_named_by_its_place(entry: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags={"listeners": [entry]})
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [
        ("0.0.0.0:7", "127.0.0.1:7", True),
        ("[::]:7", "[::1]:7", True),
        ("[::]:7", "0.0.0.0:7", False),
        ("[::]:7", "127.0.0.1:7", False),
        ("[::1]:7", "localhost:7", True),
        ("[::]:7", "localhost:7", True),
    ],
)
def test_ipv6_ports_are_separate(first: str, second: str, meet: bool) -> None:
    config = configured(one("a", address=first), one("b", address=second), security={"insecure": True})
    if meet:
        with pytest.raises(ConfigError, match=r"listeners\.a\.address and listeners\.b\.address"):
            check_ports(config)
    else:
        check_ports(config)
