"""Which web pages may open a WebSocket."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import ConfigError, SecurityConfig, load
from gateway.security.origins import Origins

NEAR = ("http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443", "http://LOCALHOST")
FAR = ("https://evil.example", "http://127.0.0.1.evil.example", "http://localhost.evil.example", "null", "", "http://[")
PASSWORDS: dict[str, Any] = {"allow_anonymous": False, "password_file": "users"}
CERTIFICATES: dict[str, Any] = {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}


def allowed(origin: str, security: dict[str, Any], *, secure: bool = False, host: str = "gateway:8080") -> bool:
    return Origins(SecurityConfig(**security)).allow(origin, host, secure=secure)


@pytest.mark.parametrize("origin", NEAR + FAR)
def test_any_page_may_connect_where_a_password_is_needed_or_anybody_may(origin: str) -> None:
    assert allowed(origin, PASSWORDS)
    assert allowed(origin, {"insecure": True})


@pytest.mark.parametrize("security", [{}, {**PASSWORDS, **CERTIFICATES}, {**CERTIFICATES, "insecure": True}])
def test_else_only_pages_of_this_machine(security: dict[str, Any]) -> None:
    security = {**security, "allow_anonymous": False} if "insecure" in security else security
    assert [origin for origin in NEAR + FAR if allowed(origin, security)] == list(NEAR)


def test_over_tls_the_gateways_own_host_is_near() -> None:
    assert allowed("https://gateway:8080", CERTIFICATES, secure=True)
    assert not allowed("http://gateway:8080", CERTIFICATES, secure=True)
    assert not allowed("https://gateway", CERTIFICATES, secure=True)
    assert not allowed("https://gateway:8080", {}), "without TLS a host's name proves nothing"


def test_listed_origins_are_all_that_may_connect() -> None:
    origins = Origins(SecurityConfig(**PASSWORDS, websocket_origins=("https://Good.example",)))
    assert origins.allow("https://good.example", "gateway", secure=False)
    for origin in (*NEAR, "https://good.example:444", "http://good.example"):
        assert not origins.allow(origin, "gateway", secure=True)
    assert Origins(SecurityConfig(websocket_origins=("*",))).allow("null", "gateway", secure=False)


@pytest.mark.parametrize("origin", ["good.example", "https://", "https://good.example/", "://x"])
def test_a_bad_origin_stops_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.websocket_origins\.0: expected SCHEME://HOST"):
        load(flags={"security": {"websocket_origins": [origin]}})
