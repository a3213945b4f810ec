"""The permission of one identity for one action: over Kafka's names, and for MQTT clients over MQTT topics.

The first matching rule decides about a message, at PUBLISH as well as at its delivery. The same rules decide about a
filter at SUBSCRIBE: it is refused if nothing that it matches can be allowed, and with `partial` false if not everything
is.

Connections keep permissions and check every message with them, so new rules are set in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from gateway.security.rights.filters import ANY, ONE, Level, covers, matches, overlap
from mapping.rules import Rules
from mapping.tenants import EVERYTHING as ALL_NAMES
from mapping.tenants import Names
from protocols.mqtt.topics import is_valid_filter

Action = Literal["publish", "subscribe", "admin"]
GroupAction = Literal["read", "delete", "admin"]
"""Joining a group and committing for it; deleting it; inspecting it as an administrator."""
Key = str | bytes | None

WILDCARD: Final = "*"
CACHED_DECISIONS: Final = 1024  # per grant and action; more names cost an evaluation of the rules
CACHED_KEY: Final = 128  # longest cached key: bounds the memory to 128 KiB of keys per grant and action
CACHED_TOPIC: Final = 249  # longest cached topic: Kafka's limit, which the first level of an MQTT topic may exceed


class Rule(msgspec.Struct, frozen=True):
    """One rule with its variables replaced for one client. `kafka`: it applies to Kafka's names, in every protocol."""

    action: str
    levels: tuple[Level, ...]
    allow: bool
    kafka: bool = False

    def has_action(self, action: Action) -> bool:
        """Return whether the rule applies to this action."""
        return self.action in (WILDCARD, action)


class GroupRule(msgspec.Struct, frozen=True):
    """A group rule for one client. `beginning`: `name` is a prefix.

    `kafka`: it applies to Kafka's full names.
    """

    action: str
    name: str
    beginning: bool
    allow: bool
    kafka: bool = False

    def applies_to(self, group: str) -> bool:
        """Return whether the rule applies to this group."""
        return group.startswith(self.name) if self.beginning else group == self.name


Operation = Literal["create", "delete", "configure", "inspect", "describe"]
"""The parts of the right `admin`, and seeing that a topic exists. Only Kafka's ACLs distinguish them."""


class ClientRules(msgspec.Struct, frozen=True):
    """The rules for one client, by action."""

    publish: Sequence[Rule]
    subscribe: Sequence[Rule]
    admin: Sequence[Rule]
    groups: Sequence[GroupRule]
    operations: Mapping[Operation, Sequence[Rule]] | None = None  # None: `admin` on a topic includes them all
    transactions: Sequence[GroupRule] | None = None  # None: every client may


class Permission:
    """One identity's permission for one action, with cached decisions. Topics outside its namespace are denied."""

    __slots__ = ("_by_key", "_everything", "_names", "_rules", "_topics")

    def __init__(self, rules: Sequence[Rule], everything: bool = False, names: Names = ALL_NAMES) -> None:
        self._everything = everything
        self._names = names
        self._topics: dict[str, bool | None] = {}  # the decision of `uniform`
        self._by_key: dict[tuple[str, Key], bool] = {}
        self.renew(rules)

    def renew(self, rules: Sequence[Rule]) -> None:
        """Replace the rules in place."""
        names = self._names
        self._rules = [_whole(rule, names) for rule in rules] if names.prefix else rules
        self._topics.clear()
        self._by_key.clear()

    def __call__(self, topic: str, key: Key = None) -> bool:
        """Return whether the action is allowed on a record of Kafka topic `topic` with `key`."""
        known = self._topics.get(topic)
        if known is None:
            known = self._by_key.get((topic, key))
            if known is None:
                return self._decide(topic, key)
        return known

    def _decide(self, topic: str, key: Key) -> bool:
        is_short = len(topic) <= CACHED_TOPIC
        if topic not in self._topics:
            if len(self._topics) >= CACHED_DECISIONS:
                self._topics.clear()
            whole = self.uniform(topic)
            if is_short:
                self._topics[topic] = whole
            if whole is not None:
                return whole
        name = name_of(topic, key)
        allowed = next((rule.allow for rule in self._rules if matches(rule.levels, name)), False)
        if is_short and (key is None or len(key) <= CACHED_KEY):
            if len(self._by_key) >= CACHED_DECISIONS:
                self._by_key.clear()
            self._by_key[topic, key] = allowed
        return allowed

    def uniform(self, topic: str) -> bool | None:
        """Return the decision for `topic` if it is the same for every key, else None."""
        if not self.some(topic):
            return False
        return True if self._everything or _allows(self._rules, lambda _: (topic, ANY), partial=False) else None

    def some(self, topic: str) -> bool:
        """Return whether the action is allowed for some key of `topic` (an AMQP link whose messages carry keys)."""
        return self._names.has(topic) and (
            self._everything or _allows(self._rules, lambda _: (topic, ANY), partial=True)
        )

    def whole(self, name_filter: str) -> bool:
        """Return whether the action is allowed for every name in the client's namespace that the filter matches."""
        if self._everything:
            return True
        wanted = name_filter.split("/")
        return is_valid_filter(name_filter, shared=False) and _allows(self._rules, lambda _: wanted, partial=False)

    def whole_topic(self, topic: str) -> bool:
        """Return whether the action is allowed for every record of `topic` (AMQP receivers, HTTP consumers)."""
        return self._names.has(topic) and self.whole(f"{topic}/{ANY}")


def _whole(rule: Rule, names: Names) -> Rule:
    """Translate a rule to Kafka's full names. A wildcard at the first level covers all that the client may name."""
    first, *rest = rule.levels
    if rule.kafka or first in (ANY, ONE):
        return rule
    assert isinstance(first, str), "only Kafka's rules have beginnings"
    return Rule(rule.action, (names.topic(first), *rest), rule.allow)


def name_of(topic: str, key: Key) -> list[str]:
    """Return the levels of a record's name in the access list."""
    if key is None:
        return [topic]
    text = key if isinstance(key, str) else key.decode("utf-8", "backslashreplace")
    return [topic, *text.split("/")]


EVERYTHING: Final = ((ANY,), (ONE, ANY))


class MqttPermission:
    """One MQTT identity's permission for one action, with cached decisions."""

    __slots__ = (
        "_by_place", "_by_text", "_everything", "_known", "_mapping", "_names", "_partial", "_rules", "_unruled",
    )  # fmt: skip

    def __init__(
        self, rules: Sequence[Rule], everything: bool, mapping: Rules, names: Names = ALL_NAMES, *, partial: bool
    ) -> None:
        self._unruled = everything
        self._everything = everything and names is ALL_NAMES
        self._names = names
        self._mapping = mapping
        self._partial = partial
        self._known: dict[tuple[str, str, Key], bool] = {}
        self.renew(rules)

    def renew(self, rules: Sequence[Rule]) -> None:
        """Replace the rules in place."""
        self._rules = rules
        self._known.clear()
        # An MQTT topic has the levels of a Kafka topic and key. Without `kafka` rules a `Permission` over the topic's
        # text decides; with only `kafka` rules a `Permission` over its place in Kafka does.
        of_kafka = [rule.kafka for rule in rules]
        self._by_text = None if any(of_kafka) else Permission(rules, self._unruled)
        self._by_place = Permission(rules) if of_kafka and all(of_kafka) else None

    def __call__(self, text: str, topic: str, key: Key) -> bool:
        """Return whether the action is allowed on MQTT topic `text`, which is stored in Kafka at `topic`, `key`."""
        if self._everything:
            return True
        if self._names is not ALL_NAMES:
            if not self._has(text):
                return False
            text = self._names.own_mqtt(text)
        if self._by_place is not None:
            return self._by_place(topic, key)
        if self._by_text is not None:
            first, slash, rest = text.partition("/")
            return self._by_text(first, rest if slash else None)
        known = self._known.get((text, topic, key))
        if known is None:
            known = self._decide(text, name_of(topic, key))
            if len(text) <= CACHED_KEY and (key is None or len(key) <= CACHED_KEY):
                if len(self._known) >= CACHED_DECISIONS:
                    self._known.clear()
                self._known[text, topic, key] = known
        return known

    def _decide(self, text: str, topics: Sequence[str]) -> bool:
        levels = text.split("/")
        fitting = (rule.allow for rule in self._rules if matches(rule.levels, topics if rule.kafka else levels))
        return next(fitting, False)

    def _has(self, text: str) -> bool:
        """Return whether a topic or filter is in the client's namespace. No tenant has `$` names or overlong ones."""
        names = self._names
        if not names.has_mqtt(text):
            return False
        return not names.mount or (not text.startswith("$", len(names.mount)) and is_valid_filter(text, shared=False))

    def of_topic(self, text: str) -> bool:
        """Return whether the action is allowed on a topic name (a will, a retained message), mapped to Kafka here."""
        if self._everything:
            return True
        destination = self._mapping.destination(text)
        return self(text, destination.topic, destination.key)

    def filter(self, text: str) -> bool:
        """Return whether a client may subscribe to a filter; for `$share/G/F` pass F."""
        if not is_valid_filter(text, shared=False):
            return False
        if self._everything:
            return True
        if not self._has(text) or self._unruled:
            return self._has(text)
        levels = self._names.own_mqtt(text).split("/")
        if ONE not in levels and ANY not in levels:
            return self.of_topic(text)
        topics = self._mapping.kafka_filter(text)
        return _allows(self._rules, lambda rule: topics if rule.kafka else levels, partial=self._partial)


def _allows(rules: Iterable[Rule], filter_for: Callable[[Rule], Sequence[str] | None], *, partial: bool) -> bool:
    """Return whether the rules allow all names that a filter matches, or some of them if `partial`.

    `filter_for` gives the filter in the names of a rule; None if no single filter describes where the messages are in
    Kafka.
    """
    for rule in rules:
        wanted = filter_for(rule)
        if wanted is not None and not overlap(rule.levels, wanted):
            continue
        covered = covers(rule.levels, wanted) if wanted is not None else rule.levels in EVERYTHING
        if rule.allow and (covered or partial):
            return True
        if not rule.allow and (covered or not partial):
            return False
    return False
