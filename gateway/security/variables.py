"""Variables in the access list: one rule for a fleet.

`{name}` is the proven name, `{client}` the client id (AMQP: the container-id; HTTP has none), `{group}` each of the
groups of a bearer token, `{claim:a.b}` a claim of it, `{cn}` the common name of the client's certificate, `{tenant}`
its tenant. A level, or a group's name, has one at most: of two, a client could choose one so that both together make
another client's.

A value that is empty, or has a character which separates levels or matches others (`/`, `+`, `#`), is good for no rule
that allows: so nobody widens its rights by the name that it chooses. A rule that denies is then about every value: so
nobody escapes it, either.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import msgspec

from gateway.config import AccessRule, ConfigError, SecurityConfig
from gateway.security.identity import ANONYMOUS_NAME, EVERYONE, Identity
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


class Slot(msgspec.Struct, frozen=True):
    """A text with a variable in it."""

    before: str
    variable: str
    after: str

    def values(self, identity: Identity, client_id: str | None, avoid: str = "") -> tuple[list[str], bool]:
        """What the text is for one client, and whether that is all: False where a value is none, or cannot be used.

        A value with a character of `avoid` cannot be used.
        """
        found = values_of(self.variable, identity, client_id)
        good = [value for value in found if value and _SPECIAL.isdisjoint(value) and not set(avoid) & set(value)]
        return [f"{self.before}{value}{self.after}" for value in good], len(good) == len(found) > 0


def parse(text: str, where: str) -> str | Slot:
    """A level, or a group's name, of a rule.

    Raises:
        ConfigError: a brace that is not closed or not opened, a variable that there is not, or more than one; names
            `where` and the text.
    """
    found = list(_BRACES.finditer(text))
    if set("{}") & set(_BRACES.sub("", text)):
        raise ConfigError(f"{where}: {text!r} has a brace without its other one")
    for match in found:
        variable = match[1]
        if variable not in KNOWN and not (variable.startswith(CLAIM) and variable != CLAIM):
            raise ConfigError(f"{where}: {match[0]} in {text!r} is no variable; expected {EXPECTED}")
    if not found:
        return text
    if len(found) > 1:
        raise ConfigError(f"{where}: {text!r} has two variables with no / between: clients could pass for each other")
    return Slot(text[: found[0].start()], found[0][1], text[found[0].end() :])


def split(text: str) -> list[str]:
    """The levels of a filter; a claim's name may have a slash, such as `{claim:https://example.com/tenant}`."""
    return _LEVELS.findall(text)


def without(text: str) -> str:
    """The text with a letter in the place of each variable."""
    return _BRACES.sub("x", text)


def claims_in(config: SecurityConfig) -> tuple[str, ...]:
    """The claims that the rules ask for, or who a client is to Kafka."""
    names = [name for rule in config.access for name in _variables(rule)] + _BRACES.findall(config.access_principal)
    return tuple(sorted({name.removeprefix(CLAIM) for name in names if name.startswith(CLAIM)}))


def check_logins(config: SecurityConfig, logins: Collection[LoginMethod]) -> None:
    """ConfigError: a rule asks for what none of the `logins`, which listeners take, says of a client."""
    for number, rule in enumerate(config.access):
        for variable in _variables(rule):
            why = _never(variable, rule.principal, config, logins)
            if why is not None:
                raise ConfigError(f"security.access[{number}]: {{{variable}}} can never have a value: {why}")
    if config.access_source == "kafka":
        for variable in _BRACES.findall(config.access_principal):
            why = _never(variable, EVERYONE, config, logins) if variable != NAME else None
            if why is not None:
                raise ConfigError(f"security.access_principal: {{{variable}}} can never have a value: {why}")


def _variables(rule: AccessRule) -> list[str]:
    return [name for text in (rule.topic, rule.kafka, rule.group) if text is not None for name in _BRACES.findall(text)]


def _never(variable: str, principal: str, config: SecurityConfig, logins: Collection[LoginMethod]) -> str | None:
    """Why no client of a rule can have a variable; None: one can."""
    if variable == CLIENT:
        return None
    if variable == TENANT:
        return None if config.tenants.enabled else "security.tenants.sources is not set"
    if principal == ANONYMOUS_NAME:
        return "anonymous clients prove nothing"
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
    """What a variable stands for, as a client says it: several, one or none."""
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
