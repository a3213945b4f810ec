"""The access list's rules about consumer groups: who else than its owner may read in one, delete it, or look at it.

A rule's `group` is a name, or the beginning of names and a final `*`. The first rule that fits the principal, the
action and the name decides. Where none does, the group is its owner's: `gateway.security.group_names`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from gateway.config import AccessRule, ConfigError
from gateway.security.identity import GROUP_PREFIX, Identity

GroupAction = Literal["read", "delete", "admin"]
"""To be a member of it and commit for it; to end it; to look at it as an administrator."""

ACTIONS: Final = ("read", "delete", "admin", "*")
WILDCARD: Final = "*"


class GroupRule(msgspec.Struct, frozen=True):
    """One compiled rule; `beginning`: `name` is only how names begin."""

    principal: str
    action: str
    name: str
    beginning: bool
    allow: bool

    def speaks_of(self, group: str) -> bool:
        """Whether the rule is about this group."""
        return group.startswith(self.name) if self.beginning else group == self.name


class GroupPermission:
    """What the rules say about one identity."""

    __slots__ = ("_rules",)

    def __init__(self, identity: Identity, rules: Sequence[GroupRule]) -> None:
        self._rules = tuple(rule for rule in rules if identity.is_named(rule.principal))

    def __call__(self, action: GroupAction, group: str) -> bool | None:
        """The verdict of the first rule that fits; None: there is none."""
        for rule in self._rules:
            if rule.action in (WILDCARD, action) and rule.speaks_of(group):
                return rule.allow
        return None


def compile_group_rule(rule: AccessRule, number: int) -> GroupRule:
    """The rule `security.access[number]`, which has a group; ConfigError: it cannot be meant."""
    where = f"security.access[{number}]"
    group = rule.group
    if not group:
        raise ConfigError(f"{where}.group: must not be empty; * is every group")
    if rule.principal in ("", GROUP_PREFIX):
        raise ConfigError(f"{where}.principal: must not be empty; * is everyone")
    if rule.action not in ACTIONS:
        raise ConfigError(f"{where}.action: {rule.action} is for topics, not for groups")
    if rule.topic != "#":
        raise ConfigError(f"{where}: a rule is about topics or about a group, not about both")
    name = group.removesuffix(WILDCARD)
    if WILDCARD in name:
        raise ConfigError(f"{where}.group: {group!r} has a * that is not at its end")
    return GroupRule(rule.principal, rule.action, name, name != group, rule.allow)
