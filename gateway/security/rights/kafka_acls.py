"""Kafka's ACLs as rules of the access list (`security.access_source = "kafka"`).

The decision follows Kafka's StandardAuthorizer. An ACL applies if it matches the resource (by name, prefix or `*`), the
principal (or `User:*`) and the host (or `*`). A deny ACL takes precedence over all allow ACLs; without a matching allow
ACL access is denied. If no ACL at all names a resource, `security.allow_everyone_if_no_acl_found` decides. Allowing
Read, Write, Delete or Alter implies Describe; allowing AlterConfigs implies DescribeConfigs; deny ACLs imply nothing.
Kafka does not expose its `super.users`, so these principals need ACLs here.

| Kafka | here |
|---|---|
| Write, Read on a topic | publish, subscribe |
| Create (or on the cluster), Delete, AlterConfigs, DescribeConfigs on a topic | the operations of `admin` on topics |
| Describe on a topic | to see that the topic exists |
| Read, Delete, Describe on a group | `read`, `delete`, `admin` on groups; owning a group gives no rights |
| Alter on the cluster | `admin` on everything |
| Write on a transactional id | transactions of the AMQP client with that container-id |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from gateway.kafka.cluster.rights import AclOperation as KafkaOp
from gateway.kafka.driver.acl_requests import ALL, CLUSTER, GROUP, TOPIC, TRANSACTIONAL_ID, Acl
from gateway.runtime.recent import Recent
from gateway.security.identity import Identity
from gateway.security.rights.access_rules import CACHED_RULES
from gateway.security.rights.filters import ANY, Beginning, Level
from gateway.security.rights.permissions import WILDCARD, ClientRules, GroupRule, Operation, Rule
from gateway.security.throttle import plain_host
from gateway.security.variables import CLAIM, COMMON_NAME, NAME, VariableSlot, parse, values_of
from gateway.settings.config import ConfigError, SecurityConfig

EVERYBODY: Final = "User:*"
ANONYMOUS: Final = "User:ANONYMOUS"
CLUSTERS_NAME: Final = "kafka-cluster"
"""The name of the only `CLUSTER` resource."""

_IMPLYING: Final = {
    KafkaOp.DESCRIBE: frozenset({KafkaOp.DESCRIBE, KafkaOp.READ, KafkaOp.WRITE, KafkaOp.DELETE, KafkaOp.ALTER}),
    KafkaOp.DESCRIBE_CONFIGS: frozenset({KafkaOp.DESCRIBE_CONFIGS, KafkaOp.ALTER_CONFIGS}),
}
_OF_TOPICS: Final[dict[Operation, KafkaOp]] = {
    "create": KafkaOp.CREATE,
    "delete": KafkaOp.DELETE,
    "configure": KafkaOp.ALTER_CONFIGS,
    "inspect": KafkaOp.DESCRIBE_CONFIGS,
    "describe": KafkaOp.DESCRIBE,
}
_OF_GROUPS: Final = {"read": KafkaOp.READ, "delete": KafkaOp.DELETE, "admin": KafkaOp.DESCRIBE}
_TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_EVERYTHING: Final = Rule(WILDCARD, (ANY,), True, kafka=True)
_KINDS: Final = frozenset({TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID})


class _AclEntry:
    """An ACL and the equivalent rule."""

    __slots__ = ("acl", "rule")

    def __init__(self, acl: Acl) -> None:
        self.acl = acl
        self.rule: Rule | GroupRule
        if acl.kind == TOPIC:
            self.rule = Rule(WILDCARD, _levels(acl), acl.allow, kafka=True)
        else:
            name, beginning = ("", True) if acl.name == WILDCARD and not acl.prefixed else (acl.name, acl.prefixed)
            self.rule = GroupRule(WILDCARD, name, beginning, acl.allow, kafka=True)


class AclBook:
    """A cluster's ACLs as an `authorization.Rulebook`."""

    everything = False
    by_client_id = False

    def __init__(
        self, acls: Iterable[Acl], principal: VariableSlot, *, everyone: bool, before: AclBook | None = None
    ) -> None:
        """Compile the ACLs.

        `principal` is the template of a client's Kafka principal, see `principal_of`. `everyone` is
        `security.allow_everyone_if_no_acl_found`. `before` is the book in force until now, with the same settings.
        """
        self.acls = self.relevant(acls)
        self._changed: set[str] | None = None  # principals whose ACLs changed; None means any may have
        if before is not None and not everyone:
            changed = {acl.principal for acl in self.acls ^ before.acls}
            self._changed = None if EVERYBODY in changed else changed
        self.by_certificate = principal.variable == COMMON_NAME
        self._principal = principal
        self._everyone = everyone
        self._entries: dict[str, list[_AclEntry]] = {}
        self._named: dict[int, dict[Rule | GroupRule, None]] = {kind: {} for kind in _KINDS}  # with any ACL
        for acl in sorted(self.acls):
            if acl.kind == TOPIC and acl.name != WILDCARD and not _TOPIC_NAME.fullmatch(acl.name):
                continue  # no topic name equals it or starts with it
            entry = _AclEntry(acl._replace(host=plain_host(acl.host)))
            self._entries.setdefault(acl.principal, []).append(entry)
            if everyone:
                self._named[acl.kind][msgspec.structs.replace(entry.rule, allow=False)] = None
        self._known: Recent[tuple[str, str], ClientRules] = Recent(CACHED_RULES)

    @staticmethod
    def relevant(acls: Iterable[Acl]) -> frozenset[Acl]:
        """Return the ACLs on resources that matter here."""
        return frozenset(acl for acl in acls if acl.kind in _KINDS)

    def may_change_for(self, identity: Identity) -> bool:
        """Return whether the client's rules may differ from those of the previous book."""
        return self._changed is None or self._name_of(identity) in self._changed

    def _name_of(self, identity: Identity) -> str | None:
        return ANONYMOUS if identity.method == "anonymous" else principal_of(identity, self._principal)

    def rules_for(self, identity: Identity, client_id: str | None, host: str) -> ClientRules:
        """Return the rules that apply to one client connecting from `host`."""
        name = self._name_of(identity)
        if name is None or name not in self._entries:
            name = EVERYBODY
        entries = self._entries.get(name, [])
        if name != EVERYBODY:
            entries = [*entries, *self._entries.get(EVERYBODY, ())]
        if any(entry.acl.host != WILDCARD for entry in entries):
            host = plain_host(host)
            entries = [entry for entry in entries if entry.acl.host in {WILDCARD, host}]
        else:
            host = WILDCARD
        rules = self._known.get((name, host))
        if rules is None:
            rules = self._known[name, host] = self._compile(entries)
        return rules

    def _compile(self, entries: Sequence[_AclEntry]) -> ClientRules:
        operations = {ours: self._of_topics(entries, kafkas) for ours, kafkas in _OF_TOPICS.items()}
        if self._cluster(entries, KafkaOp.CREATE):
            operations["create"] = (_EVERYTHING,)
        return ClientRules(
            publish=self._of_topics(entries, KafkaOp.WRITE),
            subscribe=self._of_topics(entries, KafkaOp.READ),
            admin=(_EVERYTHING,) if self._cluster(entries, KafkaOp.ALTER) else (),
            groups=tuple(
                msgspec.structs.replace(rule, action=action)
                for action, operation in _OF_GROUPS.items()
                for rule in self._of_names(entries, operation, GROUP)
            ),
            operations=operations,
            transactions=self._of_names(entries, KafkaOp.WRITE, TRANSACTIONAL_ID),
        )

    def _of_topics(self, entries: Sequence[_AclEntry], operation: KafkaOp) -> tuple[Rule, ...]:
        rules = self._rules(entries, operation, TOPIC)
        return (*rules, _EVERYTHING) if self._everyone else rules

    def _of_names(self, entries: Sequence[_AclEntry], operation: KafkaOp, kind: int) -> tuple[GroupRule, ...]:
        """Return rules that decide for every name."""
        return (
            *self._rules(entries, operation, kind),
            GroupRule(WILDCARD, "", True, self._everyone, kafka=True),
        )

    def _rules(self, entries: Sequence[_AclEntry], operation: KafkaOp, kind: int) -> tuple[Any, ...]:
        """Return the rules of the ACLs that apply to an operation on resources of a kind, deny rules first."""
        allowing = _IMPLYING.get(operation, {operation})
        about = [entry for entry in entries if entry.acl.kind == kind]
        denied = (one.rule for one in about if not one.acl.allow and one.acl.operation in (operation, ALL))
        allowed = (one.rule for one in about if one.acl.allow and one.acl.operation in (ALL, *allowing))
        return (*denied, *allowed, *(self._named[kind] if self._everyone else ()))

    def _cluster(self, entries: Sequence[_AclEntry], operation: KafkaOp) -> bool:
        rules = self._of_names(entries, operation, CLUSTER)
        return next(rule.allow for rule in rules if rule.applies_to(CLUSTERS_NAME))


def principal_template(config: SecurityConfig) -> VariableSlot:
    """Parse `security.access_principal`; raises ConfigError if the template would not tell clients apart."""
    where = "security.access_principal"
    template = parse(config.access_principal, where)
    if not isinstance(template, VariableSlot) or not config.access_principal.startswith("User:"):
        raise ConfigError(f"{where}: expected User: and a variable, such as User:{{name}}")
    if template.variable not in (NAME, COMMON_NAME) and not template.variable.startswith(CLAIM):
        raise ConfigError(f"{where}: {{{template.variable}}} does not identify a client")
    return template


def principal_of(identity: Identity, template: VariableSlot) -> str | None:
    """Return the client's Kafka principal. None means that it has no value for the variable, or several."""
    values = values_of(template.variable, identity, None)
    return f"{template.before}{values[0]}{template.after}" if len(values) == 1 and values[0] else None


def _levels(acl: Acl) -> tuple[Level, ...]:
    if acl.name == WILDCARD and not acl.prefixed:
        return (ANY,)
    return (Beginning(acl.name) if acl.prefixed else acl.name, ANY)
