"""Who may do what: the access list, one for the three protocols.

A rule speaks about names of the form `topic/key` (or `topic`, for a record without a key), where `topic` is a Kafka
topic. Under the default mapping that is the MQTT topic itself. A rule's `topic` is an MQTT filter over such names; a
plain Kafka topic (`sensors`) stands for all its keys (`sensors/#`).

The first rule that fits the principal, the action and the name decides. Without any rule everything is allowed to
everyone who came in; as soon as there is one, what no rule allows is denied.

A subscription is granted only as a whole: the first rule that has any name in common with the filter must be an allow
rule that covers all of it, or be followed by one that does, with no deny rule that overlaps before it. Two allow
rules that cover a filter only together do not grant it.

Rules with a `group` are a list of their own, about consumer groups: `gateway.security.group_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from gateway.config import AccessRule, ConfigError
from gateway.security.filters import ANY, ONE, covers, is_filter, matches, overlap
from gateway.security.group_rules import GroupAction, GroupPermission, GroupRule, compile_group_rule
from gateway.security.identity import GROUP_PREFIX, Identity
from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name

Action = Literal["publish", "subscribe", "admin"]
Key = str | bytes | None

CACHED_DECISIONS: Final = 1024  # per grant and action; a client that uses more names pays for the look-up
CACHED_KEY: Final = 128  # length; with the two others a bound on the memory: 128 KiB of keys per grant and action
CACHED_GRANTS: Final = 2048
SHARE_PREFIX: Final = "$share/"


class Rule(msgspec.Struct, frozen=True):
    """One compiled rule."""

    principal: str
    action: str
    levels: tuple[str, ...]
    allow: bool

    def concerns(self, identity: Identity, action: Action) -> bool:
        """Whether the rule speaks about this client and action."""
        return self.action in ("*", action) and identity.is_named(self.principal)


class Permission:
    """What one identity may do by one action; remembers its decisions."""

    __slots__ = ("_by_key", "_everything", "_rules", "_topics")

    def __init__(self, rules: Sequence[Rule], everything: bool) -> None:
        self._rules = rules
        self._everything = everything
        self._topics: dict[str, bool] = {}  # topics whose key does not matter
        self._by_key: dict[tuple[str, Key], bool] = {}

    def __call__(self, topic: str, key: Key = None) -> bool:
        """Whether the action is allowed on a record of Kafka topic `topic` with `key`."""
        known = self._topics.get(topic)
        if known is None:
            known = self._by_key.get((topic, key))
            if known is None:
                return self._decide(topic, key)
        return known

    def _decide(self, topic: str, key: Key) -> bool:
        if len(self._topics) >= CACHED_DECISIONS:
            self._topics.clear()
        if self._everything:
            self._topics[topic] = True
            return True
        whole = self.uniform(topic)
        if whole is not None:
            self._topics[topic] = whole
            return whole
        name = name_of(topic, key)
        allowed = next((rule.allow for rule in self._rules if matches(rule.levels, name)), False)
        if key is None or len(key) <= CACHED_KEY:
            if len(self._by_key) >= CACHED_DECISIONS:
                self._by_key.clear()
            self._by_key[topic, key] = allowed
        return allowed

    def uniform(self, topic: str) -> bool | None:
        """The decision for `topic` when the key does not matter; None when it does."""
        if self._everything:
            return True
        subtree = (topic, ANY)
        found: bool | None = None
        for rule in self._rules:
            if not overlap(rule.levels, subtree):
                continue
            if found is not None and rule.allow != found:
                return None
            found = rule.allow
            if covers(rule.levels, subtree):
                return found
        # What no rule reached is denied.
        return False if not found else None

    def some(self, topic: str) -> bool:
        """Whether it is allowed for some key of `topic` (an AMQP link whose keys come with the messages)."""
        if self._everything:
            return True
        subtree = (topic, ANY)
        for rule in self._rules:
            if rule.allow and overlap(rule.levels, subtree):
                return True
            if not rule.allow and covers(rule.levels, subtree):
                return False
        return False

    def filter(self, mqtt_filter: str) -> bool:
        """Whether it is allowed for every name that the filter matches; `$share/G/F` is judged as F."""
        if self._everything:
            return True
        if mqtt_filter.startswith(SHARE_PREFIX):
            mqtt_filter = mqtt_filter[len(SHARE_PREFIX) :].partition("/")[2]
        if not is_filter(mqtt_filter):
            return False
        wanted = mqtt_filter.split("/")
        for rule in self._rules:
            if not overlap(rule.levels, wanted):
                continue
            if not rule.allow:
                return False
            if covers(rule.levels, wanted):
                return True
        return False

    def whole_topic(self, topic: str) -> bool:
        """Whether it is allowed for every record of `topic` (AMQP receivers, HTTP consumers)."""
        return self.filter(f"{topic}/{ANY}")


class Grant:
    """What one identity may do. Take one per connection: a known `publish(topic, key)` is a look-up or two."""

    __slots__ = ("_groups", "admin", "identity", "publish", "subscribe")

    def __init__(
        self, identity: Identity, rules: Sequence[Rule], everything: bool, group_rules: Sequence[GroupRule] = ()
    ) -> None:
        self.identity = identity
        self._groups = GroupPermission(identity, group_rules)
        self.publish = Permission([rule for rule in rules if rule.concerns(identity, "publish")], everything)
        self.subscribe = Permission([rule for rule in rules if rule.concerns(identity, "subscribe")], everything)
        self.admin = Permission([rule for rule in rules if rule.concerns(identity, "admin")], everything)

    def group(self, action: GroupAction, group: str) -> bool | None:
        """What the list says about an action on a consumer group; None: nothing, so that its owner alone may."""
        return self._groups(action, group)


class AccessList:
    """The rules of `security.access`, compiled and checked."""

    def __init__(self, rules: Sequence[AccessRule] = ()) -> None:
        """Compile the rules.

        Raises:
            ConfigError: a rule that cannot be meant; names `security.access[i]`.
        """
        self._rules = tuple(_compiled(rule, number) for number, rule in enumerate(rules) if rule.group is None)
        self._group_rules = tuple(
            compile_group_rule(rule, number) for number, rule in enumerate(rules) if rule.group is not None
        )
        self._grants: dict[Identity, Grant] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is no rule about topics, so that everything is allowed with them."""
        return not self._rules

    def for_identity(self, identity: Identity) -> Grant:
        """The rights of `identity`, shared by all its connections."""
        grant = self._grants.get(identity)
        if grant is None:
            if len(self._grants) >= CACHED_GRANTS:
                self._grants.clear()  # connections keep theirs
            grant = self._grants[identity] = Grant(identity, self._rules, not self._rules, self._group_rules)
        return grant

    def allowed(self, identity: Identity, action: Action, topic: str, key: Key = None) -> bool:
        """Whether `identity` may do `action` with a record of Kafka topic `topic` and `key`."""
        grant = self.for_identity(identity)
        permission: Permission = getattr(grant, action)
        return permission(topic, key)

    def allowed_filter(self, identity: Identity, mqtt_filter: str) -> bool:
        """Whether `identity` may subscribe to the whole of `mqtt_filter`."""
        return self.for_identity(identity).subscribe.filter(mqtt_filter)


def name_of(topic: str, key: Key) -> list[str]:
    """The levels of the name that the access list knows a record by."""
    if key is None:
        return [topic]
    text = key if isinstance(key, str) else key.decode("utf-8", "backslashreplace")
    return [topic, *text.split("/")]


def _compiled(rule: AccessRule, number: int) -> Rule:
    where = f"security.access[{number}]"
    if rule.principal in ("", GROUP_PREFIX):
        raise ConfigError(f"{where}.principal: must not be empty; * is everyone")
    if rule.action in ("read", "delete"):
        raise ConfigError(f"{where}.action: {rule.action} is for consumer groups: the rule needs a group")
    if not is_filter(rule.topic):
        raise ConfigError(f"{where}.topic: {rule.topic!r} is neither a Kafka topic nor an MQTT filter")
    levels = rule.topic.split("/")
    if levels[0] not in (ANY, ONE) and not is_topic_name(levels[0].removeprefix(INTERNAL_TOPIC_PREFIX)):
        raise ConfigError(f"{where}.topic: {rule.topic!r} can match nothing: {levels[0]!r} is no Kafka topic")
    if len(levels) == 1 and levels[0] not in (ANY, ONE):
        levels.append(ANY)
    return Rule(rule.principal, rule.action, tuple(levels), rule.allow)
