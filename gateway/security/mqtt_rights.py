"""What an MQTT client may publish and be sent, judged once, in the names that it uses: MQTT topics.

A rule with a `topic` is a filter over MQTT topics here, whatever Kafka topic they lead to; a rule with a `kafka` is
one over Kafka's names (`topic/key`). A message is judged by the first rule that fits, at PUBLISH as at its delivery. A
filter is judged at SUBSCRIBE by the same rules: it is refused if nothing that it matches can be allowed, and with
`partial` false if not everything is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.security.filters import ANY, ONE, covers, is_filter, matches, overlap
from gateway.security.permissions import CACHED_DECISIONS, CACHED_KEY, Key, Permission, Rule, name_of
from mapping.rules import Rules

EVERYTHING: Final = ((ANY,), (ONE, ANY))


class MqttPermission:
    """What one identity may do by one action; remembers its decisions."""

    __slots__ = ("_by_text", "_everything", "_known", "_mapping", "_partial", "_rules")

    def __init__(self, rules: Sequence[Rule], everything: bool, mapping: Rules, *, partial: bool) -> None:
        self._rules = rules
        self._everything = everything
        self._mapping = mapping
        self._partial = partial
        # An MQTT topic has the levels of a Kafka topic and key: without rules over Kafka's names it is judged as such.
        self._by_text = None if any(rule.kafka for rule in rules) else Permission(rules, everything)
        self._known: dict[tuple[str, str, Key], bool] = {}

    def __call__(self, text: str, topic: str, key: Key) -> bool:
        """Whether the action is allowed on a message of MQTT topic `text` that lies in Kafka at `topic`, `key`."""
        if self._everything:
            return True
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

    def of_topic(self, text: str) -> bool:
        """Whether a topic name alone is allowed (a will, a retained message), by its Kafka topic and key."""
        if self._everything:
            return True
        destination = self._mapping.destination(text)
        return self(text, destination.topic, destination.key)

    def filter(self, text: str) -> bool:
        """Whether a client may subscribe to a filter; of `$share/G/F` that is F."""
        if not is_filter(text):
            return False
        if self._everything:
            return True
        levels = text.split("/")
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
