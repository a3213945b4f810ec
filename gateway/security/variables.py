"""Variables in the access list, so that one rule serves a fleet of clients.

`{name}` is the authenticated name, `{client}` the client id (AMQP: the container-id; HTTP has none), `{group}` each
group of a bearer token, `{claim:a.b}` a claim of the token, `{cn}` the common name of the client's certificate,
`{tenant}` its tenant. A topic level or a group name may contain one variable at most: with two, a client could choose
one value so that both together equal another client's.

A value that is empty or contains a separator or wildcard (`/`, `+`, `#`) disables an allow rule, so a client cannot
widen its rights by choosing a name. A deny rule then applies to every value, so a client cannot escape it either.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import msgspec

from gateway.security.identity import ANONYMOUS_NAME, EVERYONE, Identity
from gateway.settings.config import AccessRule, ConfigError, SecurityConfig
from gateway.settings.values import LoginMethod

NAME: Final = "name"
CLIENT: Final = "client"
GROUP: Final = "group"
COMMON_NAME: Final = "cn"
TENANT: Final = "tenant"
CLAIM: Final = "claim:"
KNOWN: Final = (NAME, CLIENT, GROUP, COMMON_NAME, TENANT)
EXPECTED: Final = "{name}, {client}, {group}, {cn}, {tenant} or {claim:NAME}"

_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_LEVELS: Final = re.compile(r"(?:^|/)((?:\{[^{}]*\}|[^/])*)")
_SPECIAL: Final = frozenset("/+#\0")


class VariableSlot(msgspec.Struct, frozen=True):
    """A text that contains a variable."""

    before: str
    variable: str
    after: str

    def values(self, identity: Identity, client_id: str | None, avoid: str = "") -> tuple[list[str], bool]:
        """Return the texts for one client and whether they are complete: False if a value is missing or unusable.

        A value that contains a character of `avoid` is unusable.
        """
        parts = values_of(self.variable, identity, client_id)
        good = [value for value in parts if value and _SPECIAL.isdisjoint(value) and not set(avoid) & set(value)]
        return [f"{self.before}{value}{self.after}" for value in good], len(good) == len(parts) > 0


def parse(text: str, where: str) -> str | VariableSlot:
    """Parse a topic level or a group name of a rule; it has one known variable at most.

    Raises ConfigError, which names `where`.
    """
    matches = list(_BRACES.finditer(text))
    if set("{}") & set(_BRACES.sub("", text)):
        raise ConfigError(f"{where}: {text!r} has unbalanced braces")
    for match in matches:
        variable = match[1]
        if variable not in KNOWN and not (variable.startswith(CLAIM) and variable != CLAIM):
            raise ConfigError(f"{where}: {match[0]} in {text!r} is not a variable; expected {EXPECTED}")
    if not matches:
        return text
    if len(matches) > 1:
        raise ConfigError(
            f"{where}: {text!r} has two variables without a / in between: clients could impersonate each other"
        )
    return VariableSlot(text[: matches[0].start()], matches[0][1], text[matches[0].end() :])


def split(text: str) -> list[str]:
    """Split a filter into levels; a claim name may contain slashes, as in `{claim:https://example.com/tenant}`."""
    return _LEVELS.findall(text)


def without(text: str) -> str:
    """Return the text with each variable replaced by a letter."""
    return _BRACES.sub("x", text)


def claims_in(config: SecurityConfig) -> tuple[str, ...]:
    """Return the claims used in the rules and in `security.access_principal`."""
    names = [name for rule in config.access for name in _variables(rule)] + _BRACES.findall(config.access_principal)
    return tuple(sorted({name.removeprefix(CLAIM) for name in names if name.startswith(CLAIM)}))


def check_logins(config: SecurityConfig, logins: Collection[LoginMethod]) -> None:
    """Raise ConfigError if a rule uses a variable that none of the listeners' `logins` can give a value."""
    for number, rule in enumerate(config.access, 1):
        for variable in _variables(rule):
            why = never(variable, rule.principal, config, logins)
            if why is not None:
                raise ConfigError(f"security.access[{number}]: {{{variable}}} can never have a value: {why}")
    if config.access_source == "kafka":
        for variable in _BRACES.findall(config.access_principal):
            why = never(variable, EVERYONE, config, logins) if variable != NAME else None
            if why is not None:
                raise ConfigError(f"security.access_principal: {{{variable}}} can never have a value: {why}")


def _variables(rule: AccessRule) -> list[str]:
    return [name for text in (rule.topic, rule.kafka, rule.group) if text is not None for name in _BRACES.findall(text)]


def never(variable: str, principal: str, config: SecurityConfig, logins: Collection[LoginMethod]) -> str | None:
    """Return why no client of a rule can have a value for a variable, or None if one can."""
    if variable == CLIENT:
        return None
    if variable == TENANT:
        return None if config.tenants.enabled else "security.tenants.sources is not set"
    if principal == ANONYMOUS_NAME:
        return "anonymous clients do not authenticate"
    if variable == COMMON_NAME:
        return None if "certificate" in logins else "security.tls_client_ca is not set"
    if variable == NAME:
        return None if set(logins) - {"anonymous"} else "every client is anonymous"
    if "token" not in logins:
        return "security.oauth is not set"
    if variable == GROUP and config.oauth.groups_claim is None:
        return "security.oauth.groups_claim is not set"
    return None


def values_of(variable: str, identity: Identity, client_id: str | None) -> tuple[str, ...]:
    """Return the client's values for a variable: several, one or none."""
    if variable == NAME:
        return () if identity.method == "anonymous" else (identity.name,)
    if variable == CLIENT:
        return () if client_id is None else (client_id,)
    if variable == GROUP:
        return identity.groups
    if variable == COMMON_NAME:
        return () if identity.common_name is None else (identity.common_name,)
    if variable == TENANT:
        return () if identity.tenant is None else (identity.tenant,)
    return dict(identity.claims).get(variable.removeprefix(CLAIM), ())
