"""Which web pages may use the gateway, and which host names requests may have."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from gateway.process.ports import listeners
from gateway.security.login.authentication import Authenticator
from gateway.security.origins import Hosts, Origins
from gateway.settings.config import Config, ConfigError, SecurityConfig, load
from tests.support.listeners import entrance

NEAR = ("http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443", "http://LOCALHOST")
FAR = ("https://evil.example", "http://127.0.0.1.evil.example", "http://localhost.evil.example", "null", "", "http://[")
PASSWORDS: dict[str, Any] = {"allow_anonymous": False, "password_file": "users"}
CERTIFICATES: dict[str, Any] = {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}
EVERY: tuple[dict[str, Any], ...] = ({}, PASSWORDS, {**PASSWORDS, **CERTIFICATES}, CERTIFICATES, {"insecure": True})


def allowed(origin: str, security: dict[str, Any], *, secure: bool = False, host: str = "gateway:8080") -> bool:
    return Origins(SecurityConfig(**security)).allow(origin, host, secure=secure)


@pytest.mark.parametrize("security", EVERY)
def test_only_pages_of_this_machine_may_call(security: dict[str, Any]) -> None:
    """Independent of the login methods: a browser remembers passwords and sends certificates by itself."""
    assert [origin for origin in NEAR + FAR if allowed(origin, security)] == list(NEAR)


@pytest.mark.parametrize("origin", NEAR + FAR)
def test_any_page_may_open_what_asks_for_a_password_itself(origin: str) -> None:
    assert Origins(SecurityConfig(**PASSWORDS)).allow(origin, "gateway", secure=False, login_in_protocol=True)


@pytest.mark.parametrize("security", [{}, {**PASSWORDS, **CERTIFICATES}, CERTIFICATES, {"insecure": True}])
def test_but_not_where_the_connection_alone_is_enough(security: dict[str, Any]) -> None:
    (http,) = (one for one in listeners(Config(security=SecurityConfig(**security))) if one.name == "http")
    asks = entrance(Authenticator(SecurityConfig()), *http.logins).needs_explicit_login
    origins = Origins(SecurityConfig(**security))
    found = [one for one in NEAR + FAR if origins.allow(one, "gateway", secure=False, login_in_protocol=asks)]
    assert found == list(NEAR)


def test_the_gateways_own_pages_are_near() -> None:
    assert allowed("https://gateway:8080", CERTIFICATES, secure=True)
    assert not allowed("http://gateway:8080", CERTIFICATES, secure=True)
    assert not allowed("https://gateway", CERTIFICATES, secure=True)
    assert allowed("http://192.0.2.7:8080", {}, host="192.0.2.7:8080")
    assert allowed("https://public.example", {}, host="public.example:443"), "a proxy ends TLS"
    assert not allowed("https://public.example", {}, host="other.example")
    assert not allowed("ftp://gateway:8080", {})


def test_listed_origins_are_all_that_may_connect_beside_its_own() -> None:
    origins = Origins(SecurityConfig(**PASSWORDS, origins=("https://Good.example",)))
    assert origins.allow("https://good.example", "gateway", secure=False, login_in_protocol=True)
    for origin in (*NEAR, "https://good.example:444", "http://good.example"):
        assert not origins.allow(origin, "gateway", secure=True, login_in_protocol=True)
    assert Origins(SecurityConfig(origins=("*",))).allow("null", "gateway", secure=False)
    assert Origins(SecurityConfig(), more=("https://app.example",)).allow("https://app.example", "g", secure=False)


@pytest.mark.parametrize(
    ("site", "mode", "path", "admitted"),
    [
        (None, None, "/topics", True),
        ("none", "navigate", "/topics", True),
        ("same-origin", "cors", "/topics", True),
        ("same-site", "no-cors", "/topics", False),
        ("cross-site", "no-cors", "/topics", False),
        ("cross-site", "navigate", "/topics/t/stream", False),
        ("cross-site", "navigate", "/openapi?x", True),
        ("cross-site", "no-cors", "/openapi", False),
        ("anything new", "cors", "/topics", False),
    ],
)
def test_a_page_that_says_no_origin(site: str | None, mode: str | None, path: str, admitted: bool) -> None:
    said = {"Host": "localhost", "Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
    fields = {name: value for name, value in said.items() if value is not None}
    assert Origins(SecurityConfig()).allow_request(path, fields, secure=False) is admitted
    assert Origins(SecurityConfig(origins=("*",))).allow_request(path, fields, secure=False)


@pytest.mark.parametrize("origin", ["good.example", "https://", "https://good.example/", "://x"])
def test_a_bad_origin_stops_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.origins\[1\]: expected SCHEME://HOST"):
        load(flags={"security": {"origins": [origin]}})


LOCAL_NAMES = (
    "localhost", "LOCALHOST:8080", "localhost.", "127.0.0.1:80", "[::1]:8080", "[::1]", "192.0.2.7", "gateway",
    "my-bridge-bridge-service:8080", "bridge.kafka.svc.cluster.local", "machine.internal", "a.localhost", "",
    socket.gethostname(),
)  # fmt: skip
FOREIGN_NAMES = (
    "evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "local.example",
    "1.2.3.4.5", "xlocalhost.example.",
)  # fmt: skip


@pytest.mark.parametrize("security", [{}, CERTIFICATES, {"insecure": True}])
def test_names_that_a_pages_owner_could_have_pointed_here_are_refused(security: dict[str, Any]) -> None:
    hosts = Hosts(SecurityConfig(**security), login_needed=False)
    assert [host for host in LOCAL_NAMES + FOREIGN_NAMES if hosts.allow(host, secure=False)] == list(LOCAL_NAMES)
    assert all(hosts.allow(host, secure=True) for host in FOREIGN_NAMES), "TLS proves the name"


def test_where_a_login_is_needed_any_name_does_unless_names_are_configured() -> None:
    assert all(Hosts(SecurityConfig(), login_needed=True).allow(host, secure=False) for host in FOREIGN_NAMES)
    assert not Hosts(SecurityConfig(**PASSWORDS), login_needed=False).allow("evil.example", secure=False)
    for login_needed in (False, True):
        hosts = Hosts(SecurityConfig(hosts=("Public.example",)), login_needed=login_needed)
        names = (*LOCAL_NAMES, "public.example:8443", *FOREIGN_NAMES)
        for secure in (False, True):
            assert [host for host in names if hosts.allow(host, secure=secure)] == [*LOCAL_NAMES, "public.example:8443"]
    assert Hosts(SecurityConfig(hosts=("*",)), login_needed=False).allow("evil.example", secure=False)


@pytest.mark.parametrize("name", ["", "http://a", "a:80", "a/b", "*.a", "[::1]"])
def test_a_bad_name_stops_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.hosts\[1\]: expected a name without a port"):
        load(flags={"security": {"hosts": [name]}})
