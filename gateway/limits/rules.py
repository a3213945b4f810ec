"""Which limits hold for a client: of each kind (`per`) the first rule that is for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

from gateway.config import ConfigError
from gateway.security.identity import Identity
from gateway.settings.limits import LimitRule, Per

Key = tuple[int, str, str]
"""What shares a limit: the rule's number, the tenant, and the name in it."""


class Chosen(NamedTuple):
    """A rule that holds for a client."""

    rule: LimitRule
    key: Key | None  # what has its limits together; None: the connection has them to itself


class LimitRules:
    """All rules, and those that hold for a client."""

    def __init__(self, rules: Sequence[LimitRule], listeners: Iterable[str]) -> None:
        """`listeners`: the names that there are. ConfigError: a rule is for another one."""
        known = set(listeners)
        for number, rule in enumerate(rules):
            if rule.listener is not None and rule.listener not in known:
                raise ConfigError(
                    f"limits.rules.{number}.listener: there is no listener {rule.listener!r}, but"
                    f" {', '.join(sorted(known))}"
                )
        # By kind: a rule without any limit is one too, an exception from those behind it.
        self._kinds = [
            found for per in get_args(Per) if (found := [one for one in enumerate(rules) if one[1].per == per])
        ]

    def __len__(self) -> int:
        """How many kinds of limits there are."""
        return len(self._kinds)

    def choose(self, identity: Identity, address: str, listener: str) -> list[Chosen]:
        """The rules that hold for a client at a listener, at most one of each kind; anonymous ones are told by address.

        A rule per tenant is for nobody who has none.
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
    # Many names of logins have a slash, but none of an anonymous client is in front of it.
    return number, tenant, f"/{address}" if identity.method == "anonymous" else f"{identity.name}/"
