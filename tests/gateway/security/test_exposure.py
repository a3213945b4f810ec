"""No listener is reachable from other machines without authentication, unless `insecure` is set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.process.ports import check_exposure
from gateway.settings.config import (
    AmqpConfig,
    Config,
    ConfigError,
    HttpConfig,
    ManagementConfig,
    MqttConfig,
    SecurityConfig,
)

EVERYWHERE = "0.0.0.0:0"
PASSWORDS = {"allow_anonymous": False, "password_file": Path("passwords")}
CERTIFICATES = {
    "tls_cert": Path("c"), "tls_key": Path("k"), "tls_client_ca": Path("a"), "tls_require_client_cert": True,
}  # fmt: skip
SECTIONS = {"mqtt": MqttConfig, "amqp": AmqpConfig, "http": HttpConfig, "management": ManagementConfig}


def config(*exposed: str, **security: Any) -> Config:
    sections: dict[str, Any] = {name: SECTIONS[name](address=EVERYWHERE) for name in exposed}
    return Config(security=SecurityConfig(**security), **sections)


def test_loopback_needs_nothing() -> None:
    assert check_exposure(config()) == []


@pytest.mark.parametrize("listener", SECTIONS)
def test_an_open_listener_is_refused_by_name(listener: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{listener}\.address: 0\.0\.0\.0:0 can be reached"):
        check_exposure(config(listener))


def test_all_of_them_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_exposure(config("mqtt", "http"))
    assert "mqtt.address" in str(caught.value)
    assert "http.address" in str(caught.value)
    assert "amqp.address" not in str(caught.value)


@pytest.mark.parametrize("section", ["mqtt", "amqp"])
def test_the_websocket_listeners_are_some_of_them(section: str) -> None:
    open_one: dict[str, Any] = {section: SECTIONS[section](websocket_address=EVERYWHERE)}
    with pytest.raises(ConfigError, match=rf"^{section}\.websocket_address: 0\.0\.0\.0:0 can be reached"):
        check_exposure(Config(**open_one))
    (warning,) = check_exposure(Config(**open_one, security=SecurityConfig(**PASSWORDS)))
    assert warning.startswith(f"{section}.websocket_address: 0.0.0.0:0 accepts passwords unencrypted")


def test_insecure_allows_it_and_warns() -> None:
    warnings = check_exposure(config("mqtt", insecure=True))
    assert len(warnings) == 1
    assert warnings[0].startswith("mqtt.address")


def test_anonymous_beside_passwords_is_still_open() -> None:
    with pytest.raises(ConfigError, match=r"^mqtt\.address"):
        check_exposure(config("mqtt", password_file=Path("passwords")))


def test_passwords_protect_but_not_in_clear() -> None:
    warnings = check_exposure(config(*SECTIONS, **PASSWORDS))
    assert [line.partition(":")[0] for line in warnings] == [f"{name}.address" for name in SECTIONS]
    assert all("unencrypted" in line for line in warnings)
    assert check_exposure(config(*SECTIONS, **PASSWORDS, tls_cert=Path("c"), tls_key=Path("k"))) == []


def test_certificates_protect_the_clients_and_not_management() -> None:
    assert check_exposure(config("mqtt", "amqp", "http", **CERTIFICATES)) == []
    with pytest.raises(ConfigError, match=r"^management\.address"):
        check_exposure(config("mqtt", "management", **CERTIFICATES))
