"""What one identity may do by one action: in Kafka's names, and for MQTT's clients in those that they use.

Kafka's are `topic/key`, or `topic` for a record without a key. An MQTT client is judged in the names that it uses: a
rule with a `topic` is a filter over MQTT topics for it, whatever Kafka topic they lead to; a rule with a `kafka` is one
over Kafka's names. A message is judged by the first rule that fits, at PUBLISH as at its delivery. A filter is judged
at SUBSCRIBE by the same rules: it is refused if nothing that it matches can be allowed, and with `partial` false if not
everything is.

Connections keep permissions, and ask them for each message. So permissions get new rules in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from gateway.security.filters import ANY, ONE, Level, covers, matches, overlap
from mapping.rules import Rules
from mapping.tenants import EVERYTHING as ALL_NAMES
from mapping.tenants import Names
from protocols.mqtt.topics import is_valid_filter

Action = Literal["publish", "subscribe", "admin"]
GroupAction = Literal["read", "delete", "admin"]
"""To be a member of a group and commit for it; to end it; to look at it as an administrator."""
Key = str | bytes | None

WILDCARD: Final = "*"
CACHED_DECISIONS: Final = 1024  # per grant and action; a client that uses more names pays for the look-up
CACHED_KEY: Final = 128  # length; with the two others a bound on the memory: 128 KiB of keys per grant and action


class Rule(msgspec.Struct, frozen=True):
    """One rule as it is for one client; `kafka`: it is about Kafka's names, in every protocol."""

    action: str
    levels: tuple[Level, ...]
    allow: bool
    kafka: bool = False

    def concerns(self, action: Action) -> bool:
        """Whether the rule speaks about this action."""
        return self.action in (WILDCARD, action)


class GroupRule(msgspec.Struct, frozen=True):
    """A rule about names of groups as it is for one client; `beginning`: `name` is only how names begin.

    `kafka`: it is about Kafka's whole names.
    """

    action: str
    name: str
    beginning: bool
    allow: bool
    kafka: bool = False

    def speaks_of(self, group: str) -> bool:
        """Whether the rule is about this group."""
        return group.startswith(self.name) if self.beginning else group == self.name


class GroupPermission:
    """What the rules say to one identity about groups."""

    __slots__ = ("_names", "_rules")

    def __init__(self, rules: Sequence[GroupRule], names: Names) -> None:
        self._rules = rules
        self._names = names

    def __call__(self, action: GroupAction, group: str) -> bool | None:
        """The verdict of the first rule that fits; None: there is none, so that the group's owner alone may."""
        if not self._names.has(group):
            return False
        own = self._names.own(group)
        for rule in self._rules:
            if rule.action in (WILDCARD, action) and rule.speaks_of(group if rule.kafka else own):
                return rule.allow
        return None

    def renew(self, rules: Sequence[GroupRule]) -> None:
        """Judge by these from now on."""
        self._rules = rules


Operation = Literal["create", "delete", "configure", "inspect", "describe"]
"""What the right `admin` is made of, and to see that a topic is there; Kafka's ACLs tell them apart."""


class ClientRules(msgspec.Struct, frozen=True):
    """The rules for one client, by what they are about."""

    publish: Sequence[Rule]
    subscribe: Sequence[Rule]
    admin: Sequence[Rule]
    groups: Sequence[GroupRule]
    operations: Mapping[Operation, Sequence[Rule]] | None = None  # None: who has `admin` on a topic may do them all
    transactions: Sequence[GroupRule] | None = None  # None: everybody may


class Permission:
    """What one identity may do by one action; remembers its decisions. Nothing, where it has no names for a topic."""

    __slots__ = ("_by_key", "_everything", "_names", "_rules", "_topics")

    def __init__(self, rules: Sequence[Rule], everything: bool = False, names: Names = ALL_NAMES) -> None:
        self._everything = everything
        self._names = names
        self._topics: dict[str, bool] = {}  # topics whose key does not matter
        self._by_key: dict[tuple[str, Key], bool] = {}
        self.renew(rules)

    def renew(self, rules: Sequence[Rule]) -> None:
        """Judge by these from now on."""
        names = self._names
        self._rules = [_whole(rule, names) for rule in rules] if names.prefix else rules
        self._topics.clear()
        self._by_key.clear()

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
        if not self._names.has(topic):
            return False
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
        if not self._names.has(topic):
            return False
        if self._everything:
            return True
        subtree = (topic, ANY)
        for rule in self._rules:
            if rule.allow and overlap(rule.levels, subtree):
                return True
            if not rule.allow and covers(rule.levels, subtree):
                return False
        return False

    def whole(self, name_filter: str) -> bool:
        """Whether it is allowed for every name that the filter matches, of those that the client has names for."""
        if self._everything:
            return True
        if not is_valid_filter(name_filter, shared=False):
            return False
        wanted = name_filter.split("/")
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
        return self._names.has(topic) and self.whole(f"{topic}/{ANY}")


def _whole(rule: Rule, names: Names) -> Rule:
    """A rule in a client's own names, over Kafka's: a wildcard at the first level is about all that the client has."""
    first, *rest = rule.levels
    if rule.kafka or first in (ANY, ONE):
        return rule
    assert isinstance(first, str), "only Kafka's rules have beginnings"
    return Rule(rule.action, (names.topic(first), *rest), rule.allow)


def name_of(topic: str, key: Key) -> list[str]:
    """The levels of the name that the access list knows a record by."""
    if key is None:
        return [topic]
    text = key if isinstance(key, str) else key.decode("utf-8", "backslashreplace")
    return [topic, *text.split("/")]


EVERYTHING: Final = ((ANY,), (ONE, ANY))


class MqttPermission:
    """What one identity may do by one action; remembers its decisions."""

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
        """Judge by these from now on."""
        self._rules = rules
        self._known.clear()
        # An MQTT topic has the levels of a Kafka topic and key: without rules over Kafka's names it is judged as such,
        # and with no others by its place in Kafka alone.
        of_kafka = [rule.kafka for rule in rules]
        self._by_text = None if any(of_kafka) else Permission(rules, self._unruled)
        self._by_place = Permission(rules) if of_kafka and all(of_kafka) else None

    def __call__(self, text: str, topic: str, key: Key) -> bool:
        """Whether the action is allowed on a message of MQTT topic `text` that lies in Kafka at `topic`, `key`."""
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

    def _decide(self, text: str, place: Sequence[str]) -> bool:
        levels = text.split("/")
        fitting = (rule.allow for rule in self._rules if matches(rule.levels, place if rule.kafka else levels))
        return next(fitting, False)

    def _has(self, text: str) -> bool:
        """Whether the client has a name for an MQTT topic or a filter: with `$`, or too long, they are no tenant's."""
        names = self._names
        if not names.has_mqtt(text):
            return False
        return not names.mount or (not text.startswith("$", len(names.mount)) and is_valid_filter(text, shared=False))

    def of_topic(self, text: str) -> bool:
        """Whether a topic name alone is allowed (a will, a retained message), by its Kafka topic and key."""
        if self._everything:
            return True
        destination = self._mapping.destination(text)
        return self(text, destination.topic, destination.key)

    def filter(self, text: str) -> bool:
        """Whether a client may subscribe to a filter; of `$share/G/F` that is F."""
        if not is_valid_filter(text, shared=False):
            return False
        if self._everything:
            return True
        if not self._has(text) or self._unruled:
            return self._has(text)
        levels = self._names.own_mqtt(text).split("/")
        if ONE not in levels and ANY not in levels:
            return self.of_topic(text)
        place = self._mapping.kafka_filter(text)
        for rule in self._rules:
            touches, holds = _relation(rule, place if rule.kafka else levels)
            if not touches:
                continue
            if rule.allow:
                if holds or self._partial:
                    return True
            elif holds or not self._partial:
                return False
        return False


def _relation(rule: Rule, wanted: Sequence[str] | None) -> tuple[bool, bool]:
    """Whether a rule may be about something that a filter matches, and whether it is about all of it for certain.

    `wanted` None: where in Kafka the filter's messages lie is not said by one filter.
    """
    if wanted is None:
        return True, rule.levels in EVERYTHING
    return overlap(rule.levels, wanted), covers(rule.levels, wanted)
