"""Assigns topic aliases for messages to a client (section 3.3.2.3.4): to the topics that are sent most.

An alias saves the topic's bytes on every PUBLISH but the first, and a client accepts a limited number of aliases. So
that the first topics do not keep them forever, a topic that is sent much more often than the least used topic with an
alias takes that alias over. Uses are counted for a bounded number of topics and halved from time to time, so that old
uses lose their weight.
"""

from __future__ import annotations

from typing import Final

import msgspec

SMALLEST_TOPIC: Final = 4 + 2  # with length prefix; an alias takes three bytes, so shorter topics save nothing
WORTH_AN_ALIAS: Final = 2  # uses; a topic that is sent once gains nothing
TOPICS_PER_ALIAS: Final = 4  # number of counted topics
USES_PER_ALIAS: Final = 64  # uses after which all counts are halved


class _Topic(msgspec.Struct):
    """A counted topic."""

    alias: int = 0  # 0: none
    uses: int = 0  # number of times sent, halved periodically


class TopicAliases:
    """The aliases for messages to one client; they end with the connection [MQTT-3.3.2-7]."""

    __slots__ = ("_least", "_maximum", "_owners", "_topics", "_until_halved")

    def __init__(self, maximum: int) -> None:
        """`maximum` is the largest allowed alias, at least 1 [MQTT-3.1.2-26]."""
        self._maximum = maximum
        self._topics: dict[bytes, _Topic] = {}
        self._owners: list[bytes] = []  # the topic of alias 1, 2, ...
        self._least = 0  # lower bound of the uses of topics with an alias
        self._until_halved = USES_PER_ALIAS * maximum

    def choose(self, topic: bytes) -> int:
        """Count a use of `topic` (encoded as in `PreparedPublish`) and choose its alias.

        Returns:
            An alias that the client knows; or a negated alias that the PUBLISH must set, after which the caller calls
            `give`; or 0 for none.
        """
        self._until_halved -= 1
        if not self._until_halved:
            self._halve()
        entry = self._topics.get(topic)
        if entry is None:
            if len(topic) < SMALLEST_TOPIC:
                return 0
            if len(self._topics) >= TOPICS_PER_ALIAS * self._maximum:
                self._halve()
            entry = self._topics[topic] = _Topic()
        entry.uses += 1
        if entry.alias:
            return entry.alias
        if entry.uses < WORTH_AN_ALIAS:
            return 0
        if len(self._owners) < self._maximum:
            return -len(self._owners) - 1
        return -self._replaceable(entry.uses)

    def give(self, topic: bytes, alias: int) -> None:
        """Note that a PUBLISH has set `alias` to `topic`; a former topic of the alias loses it."""
        if alias > len(self._owners):
            self._owners.append(topic)
        else:
            self._topics[self._owners[alias - 1]].alias = 0
            self._owners[alias - 1] = topic
        self._topics[topic].alias = alias

    def _replaceable(self, uses: int) -> int:
        """Return the least used alias if a topic with `uses` is used more than twice as much; otherwise 0.

        Without this margin, topics with similar use would take the alias from each other with every message.
        """
        if uses <= 2 * self._least:
            return 0
        counts = [self._topics[topic].uses for topic in self._owners]
        self._least = min(counts)
        return counts.index(self._least) + 1 if uses > 2 * self._least else 0

    def _halve(self) -> None:
        """Halve all counts, and drop rarely used topics without an alias."""
        self._until_halved = USES_PER_ALIAS * self._maximum
        self._least //= 2
        kept = {}
        for topic, entry in self._topics.items():
            entry.uses //= 2
            if entry.uses or entry.alias:
                kept[topic] = entry
        self._topics = kept
