"""Assigns a tenant to each client, from the first configured source that names one (ADR 0079).

The source must give exactly one valid tenant name (`mapping.tenants.is_tenant`). Otherwise the client is refused; it
never falls back to another source or to no tenant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec

from gateway.security.identity import EVERYONE, Identity, subject_values
from gateway.security.tenancy import AssignTenant, NoTenantError, without_tenant
from gateway.security.variables import CLAIM, GROUP, NAME, never
from gateway.settings.config import Config, ConfigError, SecurityConfig
from gateway.settings.listeners import ListenerSettings
from mapping.dead_letters import TOPIC_FIELD
from mapping.rules import RuleError, Rules, RuleText
from mapping.tenant_rules import TenantRules
from mapping.tenants import Tenancy, is_tenant, tenant_of
from telemetry.statistics import counter, gauge

COUNTED_TENANTS: Final = 200
"""Tenants with their own counters in the metrics, in order of first login; the others are counted together."""
OTHERS: Final = "(others)"

_FIELDS: Final = {"O": "organizationName", "OU": "organizationalUnitName", "CN": "commonName"}
_VARIABLES: Final = {"claim": CLAIM, "group": GROUP, "user": NAME}
"""The variables of the access list whose values come from the same place as a source's."""


class TenantsStatistics(msgspec.Struct, frozen=True):
    """Logins by tenant, since the start."""

    tenants: Annotated[int, gauge("tenants that have logged in since the start and are counted separately")]
    logins_total: Annotated[dict[str, int], counter("logins and HTTP requests", "tenant")]
    refused_total: Annotated[int, counter("clients refused because they have no tenant")]


class Tenants:
    """Finds the tenants of clients that have logged in."""

    def __init__(self, config: SecurityConfig, listeners: Sequence[ListenerSettings]) -> None:
        """Validate the sources; raises ConfigError if a source can never name a tenant at any of the listeners."""
        self.tenancy = Tenancy(config.tenants.enabled)
        self._sources = [source.partition(":")[::2] for source in config.tenants.sources]
        self._required = config.tenants.required
        self._logins: Counter[str] = Counter()
        self._refused = 0
        for number, (kind, what) in enumerate(self._sources, 1):
            why = _never(kind, what, config, listeners)
            if why is not None:
                raise ConfigError(f"security.tenants.sources[{number}]: can never name a tenant: {why}")

    def assigner(self, listener: str) -> AssignTenant:
        """Return the function that assigns tenants to the clients of a listener."""
        return partial(self._assign, listener) if self._sources else without_tenant

    def _assign(self, listener: str, identity: Identity, peercert: Mapping[str, Any] | None) -> Identity:
        try:
            tenant = self._find(identity, peercert, listener)
        except NoTenantError:
            self._refused += 1
            raise
        if tenant is None:
            return identity
        if tenant in self._logins or len(self._logins) < COUNTED_TENANTS:
            self._logins[tenant] += 1
        else:
            self._logins[OTHERS] += 1
        return msgspec.structs.replace(identity, tenant=tenant)

    def _find(self, identity: Identity, peercert: Mapping[str, Any] | None, listener: str) -> str | None:
        for kind, what in self._sources:
            names = _names(kind, what, identity, peercert, listener)
            if not names:
                continue
            if len(names) > 1:
                raise NoTenantError("the login names several tenants")
            if not is_tenant(names[0]):
                raise NoTenantError("the login's tenant is not a name of letters, digits and -")
            return names[0]
        if self._required:
            raise NoTenantError("the login names no tenant")
        return None

    def is_operator(self, identity: Identity) -> bool:
        """Return whether a client of the management port has no tenant: a tenant's rights cover only its own names."""
        return not any(_names(kind, what, identity, None, "") for kind, what in self._sources if kind != "listener")

    def statistics(self) -> TenantsStatistics:
        """Return the current counts."""
        return TenantsStatistics(len(self._logins), dict(self._logins), self._refused)


def _names(kind: str, what: str, identity: Identity, cert: Mapping[str, Any] | None, listener: str) -> Sequence[str]:
    """Return the tenant names that a source gives for a client: none, one or several."""
    if kind == "claim":
        return dict(identity.claims).get(what, ())
    if kind == "certificate":
        return subject_values(cert, _FIELDS[what])
    if kind == "group":
        prefix = what.removesuffix("*")
        return [group.removeprefix(prefix) for group in identity.groups if group.startswith(prefix)]
    if kind == "listener":
        return [listener]
    tenant, slash, _ = identity.name.partition("/")
    return [tenant] if slash and identity.method != "anonymous" else ()


def _never(kind: str, what: str, config: SecurityConfig, listeners: Sequence[ListenerSettings]) -> str | None:
    """Return why a source can never name a tenant, or None if it can."""
    logins = {login for listener in listeners for login in listener.logins}
    if kind == "listener":
        return None
    if kind == "certificate":
        asked = any(listener.tls is not None and listener.tls.client_ca is not None for listener in listeners)
        return None if asked or (what == "CN" and "certificate" in logins) else "security.tls_client_ca is not set"
    return never(_VARIABLES[kind], EVERYONE, config, logins)


def tenant_rules(config: Config, texts: Iterable[RuleText], dotted: Iterable[str] | None) -> Rules:
    """Compile mapping rules for tenants; RuleError if a configured topic would be a tenant's."""
    topics = {
        "amqp.reply_topic": config.amqp.reply_topic,
        "http.reply_topic": config.http.reply_topic,
        "presence.topic": config.presence.topic or "",
        "amqp.dead_letter_topic": (config.amqp.dead_letter_topic or "").replace(TOPIC_FIELD, "t"),
    }
    for key, name in topics.items():
        if tenant_of(name) is not None:
            raise RuleError(f"{key}: with tenants, {name!r} is a topic of tenant {tenant_of(name)!r}")
    return TenantRules(texts, catch_all=config.mapping.catch_all_topic, dotted=dotted)
