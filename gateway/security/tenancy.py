"""What logins ask about tenants (ADR 0079). Tenants are an optional part; without it no client has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from gateway.runtime.parts import load
from gateway.security.identity import Identity
from gateway.settings.config import Config
from gateway.settings.installed import need
from gateway.settings.listeners import ListenerSettings
from mapping.tenants import NO_TENANTS, Tenancy

AssignTenant = Callable[[Identity, Mapping[str, Any] | None], Identity]
"""Assigns the tenant to a client that has logged in, given its certificate as from `SSLObject.getpeercert`.

Raises:
    NoTenantError: the client must be refused; the text is for the client.
"""


class NoTenantError(Exception):
    """The client is refused because its login gives no tenant or no valid one."""


def without_tenant(identity: Identity, _peercert: Mapping[str, Any] | None) -> Identity:
    """Return the identity unchanged: there are no tenants."""
    return identity


class TenantSource(Protocol):
    """Finds the tenants of clients that have logged in."""

    tenancy: Tenancy

    def assigner(self, listener: str) -> AssignTenant:
        """Return the function that assigns tenants to the clients of a listener."""
        ...

    def is_operator(self, identity: Identity) -> bool:
        """Return whether a client of the management port has no tenant: a tenant's rights cover only its own names."""
        ...

    def statistics(self) -> msgspec.Struct | None:
        """Return the counts for the metrics."""
        ...


class _NoTenants:
    """No client has a tenant; a `TenantSource`."""

    tenancy = NO_TENANTS

    @staticmethod
    def assigner(_listener: str) -> AssignTenant:
        return without_tenant

    @staticmethod
    def is_operator(_identity: Identity) -> bool:
        return True

    @staticmethod
    def statistics() -> None:
        return None


NOBODY: Final[TenantSource] = _NoTenants()
"""The source of a gateway without tenants."""


def tenant_source(config: Config, listeners: Sequence[ListenerSettings]) -> TenantSource:
    """Return the configured source.

    Raises:
        ConfigError: a source can never name a tenant at any of the listeners, or tenants are not installed.
    """
    part = need("tenants", "security.tenants.sources") if config.security.tenants.enabled else load("tenants")
    if part is None:
        return NOBODY
    source: TenantSource = part.Tenants(config.security, listeners)
    return source
