"""Who may do what: the access list, one for the three protocols.

A rule's `topic` is an MQTT filter over names in the words of the protocol that asks: MQTT topics for MQTT, and for AMQP
and HTTP the Kafka topic, with the record's key behind a slash. Under the default mapping both are the same. A rule's
`kafka` is such a filter over Kafka's names for every protocol, MQTT too. A name of one level (`sensors`) stands for
all that is below it (`sensors/#`).

The first rule that fits the principal, the action and the name decides. Without any rule everything is allowed to
everyone who came in; as soon as there is one, what no rule allows is denied.

Who reads whole topics (AMQP receivers, consumer groups) is granted them only as a whole: the first rule that has any
name in common with the topic must be an allow rule that covers all of it, or be followed by one that does, with no deny
rule that overlaps before it. Two allow rules that cover it only together do not grant it. Filters of MQTT are judged by
`gateway.security.permissions`.

A rule's `group` is a consumer group's name, or the beginning of names and a final `*`; it says who else than the
owner (`gateway.security.group_names`) may read in the group, delete it, or look at it. Again the first that fits
decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from gateway.config import AccessRule, ConfigError
from gateway.security.filters import ANY, ONE
from gateway.security.identity import GROUP_PREFIX, Identity
from gateway.security.permissions import MqttPermission, Permission, Rule
from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name
from mapping.rules import Rules
from protocols.mqtt.topics import is_valid_filter

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
        """The verdict of the first rule that fits; None: there is none, so that the group's owner alone may."""
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


CACHED_GRANTS: Final = 2048


class Grant:
    """What one identity may do. Take one per connection: a known `publish(topic, key)` is a look-up or two."""

    __slots__ = ("admin", "group", "identity", "mqtt_publish", "mqtt_subscribe", "publish", "subscribe")

    def __init__(
        self,
        identity: Identity,
        rules: Sequence[Rule],
        group_rules: Sequence[GroupRule],
        mapping: Rules,
        *,
        partial: bool,
    ) -> None:
        everything = not rules
        self.identity = identity  # whose
        self.group = GroupPermission(identity, group_rules)
        to_publish = [rule for rule in rules if rule.concerns(identity, "publish")]
        to_subscribe = [rule for rule in rules if rule.concerns(identity, "subscribe")]
        self.publish = Permission(to_publish, everything)  # publish, subscribe, admin: in Kafka's names
        self.subscribe = Permission(to_subscribe, everything)
        self.admin = Permission([rule for rule in rules if rule.concerns(identity, "admin")], everything)
        # mqtt_publish, mqtt_subscribe: in those of MQTT
        self.mqtt_publish = MqttPermission(to_publish, everything, mapping, partial=partial)
        self.mqtt_subscribe = MqttPermission(to_subscribe, everything, mapping, partial=partial)


class AccessList:
    """The rules of `security.access`, compiled and checked."""

    def __init__(self, rules: Sequence[AccessRule] = (), mapping: Rules | None = None, *, partial: bool = True) -> None:
        """Compile the rules.

        `mapping` leads from MQTT topics to Kafka (None: the default one). With `partial` an MQTT filter is granted of
        which a part is denied, and that part is not delivered.

        Raises:
            ConfigError: a rule that cannot be meant; names `security.access[i]`.
        """
        self._mapping = mapping if mapping is not None else Rules()
        self._partial = partial
        self._rules = tuple(_compiled(rule, number) for number, rule in enumerate(rules) if rule.group is None)
        self._group_rules = tuple(
            compile_group_rule(rule, number) for number, rule in enumerate(rules) if rule.group is not None
        )
        self._grants: dict[Identity, Grant] = {}

    def doubtful(self) -> list[str]:
        """What to warn of: rules about a topic that seem to mean Kafka's, which for MQTT clients has another name."""
        return [
            f'security.access: topic = "{"/".join(rule.levels)}" is about MQTT topics for MQTT clients; the mapping'
            f" leads others to Kafka topic {rule.levels[0]}: write kafka = ... if you mean that"
            for rule in self._rules
            if not rule.kafka and rule.levels[0] not in (ANY, ONE) and self._mapping.is_target(rule.levels[0])
        ]

    def for_identity(self, identity: Identity) -> Grant:
        """The rights of `identity`, shared by all its connections."""
        grant = self._grants.get(identity)
        if grant is None:
            if len(self._grants) >= CACHED_GRANTS:
                self._grants.clear()  # connections keep theirs
            grant = self._grants[identity] = Grant(
                identity, self._rules, self._group_rules, self._mapping, partial=self._partial
            )
        return grant


def _compiled(rule: AccessRule, number: int) -> Rule:
    where = f"security.access[{number}]"
    if rule.principal in ("", GROUP_PREFIX):
        raise ConfigError(f"{where}.principal: must not be empty; * is everyone")
    if rule.action in ("read", "delete"):
        raise ConfigError(f"{where}.action: {rule.action} is for consumer groups: the rule needs a group")
    if rule.kafka is not None and rule.topic != "#":
        raise ConfigError(f"{where}: a rule has a topic or a kafka, not both")
    key, text = ("topic", rule.topic) if rule.kafka is None else ("kafka", rule.kafka)
    if not is_valid_filter(text, shared=False):
        raise ConfigError(f"{where}.{key}: {text!r} is neither a name nor an MQTT filter")
    levels = text.split("/")
    wild = levels[0] in (ANY, ONE)
    if rule.kafka is not None and not wild and not is_topic_name(levels[0].removeprefix(INTERNAL_TOPIC_PREFIX)):
        raise ConfigError(f"{where}.kafka: {text!r} can match nothing: {levels[0]!r} is no Kafka topic")
    if len(levels) == 1 and not wild:
        levels.append(ANY)
    return Rule(rule.principal, rule.action, tuple(levels), rule.allow, rule.kafka is not None)
