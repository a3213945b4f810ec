"""A client's tenant: from the first source that names one, which must be a single valid name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import ValidationError

from gateway.process.ports import listeners
from gateway.security.identity import Identity
from gateway.security.tenancy import NoTenantError
from gateway.settings.config import Config, ConfigError, SecurityConfig
from gateway.tenants.tenants import COUNTED_TENANTS, OTHERS, Tenants

PATH: Final = Path("unread")
OAUTH: Final = {"jwks_file": PATH, "issuer": "i", "audience": ["a"], "groups_claim": "groups"}
CERTIFICATE: Final = {
    "subject": ((("organizationName", "acme"),), (("organizationalUnitName", "u1"), ("organizationalUnitName", "u2")))
}


def made(security: SecurityConfig) -> Tenants:
    return Tenants(security, listeners(Config(security=security)))


def tenants(*sources: str, required: bool = True) -> Tenants:
    config: dict[str, Any] = {"sources": sources, "required": required}
    return made(
        SecurityConfig(oauth=OAUTH, tls_cert=PATH, tls_key=PATH, tls_client_ca=PATH, password_file=PATH, tenants=config)  # type: ignore[arg-type]
    )


def client(name: str = "ann", *groups: str, **claims: tuple[str, ...]) -> Identity:
    return Identity(name, "token", groups, tuple(claims.items()))


@pytest.mark.parametrize(
    ("sources", "who", "certificate", "tenant"),
    [
        (["claim:org"], client(org=("acme",)), None, "acme"),
        (["certificate:O"], client(), CERTIFICATE, "acme"),
        (["group:tenant-*"], client("ann", "admins", "tenant-acme"), None, "acme"),
        (["listener"], client(), None, "mqtt"),
        (["user"], client("acme/ann"), None, "acme"),
        (["user"], client("acme/ann/phone"), None, "acme"),
        (["claim:org", "user"], client("other/ann", org=("acme",)), None, "acme"),
        (["claim:org", "certificate:O", "user"], client("other/ann"), None, "other"),
        (["claim:org", "user", "listener"], client(), None, "mqtt"),
    ],
)
def test_the_first_source_that_says_one(
    sources: list[str], who: Identity, certificate: dict[str, Any] | None, tenant: str
) -> None:
    assert tenants(*sources).assigner("mqtt")(who, certificate).tenant == tenant


@pytest.mark.parametrize(
    ("source", "who", "why"),
    [
        ("claim:org", client(), "no tenant"),
        ("claim:org", client(org=("a", "b")), "several"),
        ("claim:org", client(org=("a.b",)), "not a name"),
        ("claim:org", client(org=("a_b",)), "not a name"),
        ("certificate:OU", client(), "several"),
        ("group:*", client("ann", "a", "b"), "several"),
        ("user", client("a.b/ann"), "not a name"),
        ("user", client("/ann"), "not a name"),
        ("user", client("ann"), "no tenant"),
        ("user", Identity("acme/ann", "anonymous"), "no tenant"),
    ],
)
def test_who_is_refused(source: str, who: Identity, why: str) -> None:
    found = tenants(source)
    with pytest.raises(NoTenantError, match=why):
        found.assigner("http")(who, CERTIFICATE)
    assert found.statistics().refused_total == 1
    # What says something that cannot be is no client without a tenant, either, nor another source's.
    lenient = tenants(source, "listener", required=False)
    if why == "no tenant":
        assert lenient.assigner("http")(who, CERTIFICATE).tenant == "http"
        assert tenants(source, required=False).assigner("http")(who, CERTIFICATE).tenant is None
    else:
        with pytest.raises(NoTenantError, match=why):
            lenient.assigner("http")(who, CERTIFICATE)


def test_without_a_source_there_are_no_tenants() -> None:
    found = made(SecurityConfig())
    who = client("acme/ann")
    assert found.assigner("mqtt")(who, CERTIFICATE) is who
    assert not found.tenancy.enabled


def test_a_tenants_client_has_no_right_on_the_management_port() -> None:
    """Its right `admin` covers only its tenant's names."""
    found = tenants("user", "listener")
    assert found.is_operator(client("root"))
    assert not found.is_operator(client("acme/root"))


def test_the_metrics_are_bounded() -> None:
    place = (found := tenants("user")).assigner("mqtt")
    for number in range(COUNTED_TENANTS + 5):
        place(client(f"t{number}/x"), None)
    counts = found.statistics()
    assert len(counts.logins_total) == COUNTED_TENANTS + 1
    assert counts.logins_total[OTHERS] == 5


@pytest.mark.parametrize("source", ["claim:", "certificate:L", "group:a*b", "group:a", "token", ""])
def test_a_source_that_there_is_not(source: str) -> None:
    with pytest.raises(ValidationError, match="expected claim:NAME"):
        SecurityConfig(tenants={"sources": [source]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "key"),
    [("claim:org", "oauth"), ("group:a*", "oauth"), ("certificate:O", "tls_client_ca"), ("user", "anonymous")],
)
def test_a_source_that_can_say_nothing_stops_the_start(source: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"security.tenants.sources\[1\]: .*{key}"):
        made(SecurityConfig(tenants={"sources": [source]}))  # type: ignore[arg-type]
