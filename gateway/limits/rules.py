"""Selects the limits of a client: for each kind (`per`) the first matching rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

from gateway.config import ConfigError
from gateway.security.identity import Identity
from gateway.settings.limits import LimitRule, Per

Key = tuple[int, str, str]
"""Identifies a share: the rule's number, the tenant, and the name within it."""


class Chosen(NamedTuple):
    """A rule that applies to a client."""

    rule: LimitRule
    key: Key | None  # the share; None: the connection does not share its limits


class LimitRules:
    """All rules, by kind."""

    def __init__(self, rules: Sequence[LimitRule], listeners: Iterable[str]) -> None:
        """`listeners` are the existing names; raises ConfigError if a rule names another one."""
        known = set(listeners)
        for number, rule in enumerate(rules):
            if rule.listener is not None and rule.listener not in known:
                raise ConfigError(
                    f"limits.rules.{number}.listener: there is no listener {rule.listener!r}; expected one of"
                    f" {', '.join(sorted(known))}"
                )
        # By kind. A rule without any limit counts too: it is an exception to the rules after it.
        self._kinds = [
            found for per in get_args(Per) if (found := [one for one in enumerate(rules) if one[1].per == per])
        ]

    def __len__(self) -> int:
        """Return the number of kinds that have rules."""
        return len(self._kinds)

    def choose(self, identity: Identity, address: str, listener: str) -> list[Chosen]:
        """Return the rules for a client at a listener, at most one per kind.

        Anonymous clients are identified by address. A rule per tenant does not apply to clients without a tenant.
        """
        principals = identity.principals
        found = []
        for rules in self._kinds:
            for number, rule in rules:
                if _is_for(rule, principals, identity.tenant, listener):
                    found.append(Chosen(rule, _key(number, rule, identity, address, listener)))
                    break
        return found


def _is_for(rule: LimitRule, principals: set[str], tenant: str | None, listener: str) -> bool:
    return (
        rule.principal in principals
        and (rule.listener is None or rule.listener == listener)
        and (rule.tenant is None or rule.tenant == tenant)
        and (rule.per != "tenant" or tenant is not None)
    )


def _key(number: int, rule: LimitRule, identity: Identity, address: str, listener: str) -> Key | None:
    if rule.per == "connection":
        return None
    if rule.per == "listener":
        return number, "", listener
    tenant = identity.tenant or ""
    if rule.per == "tenant":
        return number, tenant, ""
    # A leading slash marks an address and a trailing one a login's name, so the two never collide.
    return number, tenant, f"/{address}" if identity.method == "anonymous" else f"{identity.name}/"
