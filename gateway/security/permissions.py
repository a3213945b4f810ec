"""What one identity may do by one action, in Kafka's names: `topic/key`, or `topic` for a record without a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from gateway.security.filters import ANY, covers, is_filter, matches, overlap
from gateway.security.identity import Identity

Action = Literal["publish", "subscribe", "admin"]
Key = str | bytes | None

CACHED_DECISIONS: Final = 1024  # per grant and action; a client that uses more names pays for the look-up
CACHED_KEY: Final = 128  # length; with the two others a bound on the memory: 128 KiB of keys per grant and action


class Rule(msgspec.Struct, frozen=True):
    """One compiled rule; `kafka`: it is about Kafka's names, in every protocol."""

    principal: str
    action: str
    levels: tuple[str, ...]
    allow: bool
    kafka: bool = False

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

    def whole(self, name_filter: str) -> bool:
        """Whether it is allowed for every name that the filter matches."""
        if self._everything:
            return True
        if not is_filter(name_filter):
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
        return self.whole(f"{topic}/{ANY}")


def name_of(topic: str, key: Key) -> list[str]:
    """The levels of the name that the access list knows a record by."""
    if key is None:
        return [topic]
    text = key if isinstance(key, str) else key.decode("utf-8", "backslashreplace")
    return [topic, *text.split("/")]
