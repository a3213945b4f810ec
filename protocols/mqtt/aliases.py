"""Which topics get an alias on the way to a client (section 3.3.2.3.4): those it is sent most.

An alias saves a topic's bytes on every PUBLISH but the first, and a client grants only so many. First come, first
served would give them away for ever to whatever was sent first; here a topic that is sent much more often than the
least used topic with an alias takes that alias over. Uses are counted for a bounded number of topics and halved from
time to time, so that what was busy once does not stay so.
"""

from __future__ import annotations

from typing import Final

SMALLEST_TOPIC: Final = 4 + 2  # with its length in front; the alias takes three bytes: a shorter topic saves nothing
WORTH_AN_ALIAS: Final = 2  # uses: a topic that is sent once has nothing to gain
TOPICS_PER_ALIAS: Final = 4  # how many topics are counted
USES_PER_ALIAS: Final = 64  # how many uses are counted until all are halved


class _Topic:
    """A topic that is counted."""

    __slots__ = ("alias", "uses")

    def __init__(self) -> None:
        self.alias = 0  # its alias at the client; 0: none
        self.uses = 0  # how often it was sent, halved with age


class TopicAliases:
    """The aliases of one connection's outgoing direction; they end with it [MQTT-3.3.2-7]."""

    __slots__ = ("_least", "_maximum", "_owners", "_topics", "_until_halved")

    def __init__(self, maximum: int) -> None:
        """`maximum`: the largest alias that may be used, 1 or more [MQTT-3.1.2-26]."""
        self._maximum = maximum
        self._topics: dict[bytes, _Topic] = {}
        self._owners: list[bytes] = []  # the topic of alias 1, 2, ...
        self._least = 0  # no topic with an alias has fewer uses
        self._until_halved = USES_PER_ALIAS * maximum

    def choose(self, topic: bytes) -> int:
        """Count a use of `topic`, as `PreparedPublish` has it, and say what stands for it.

        Returns:
            An alias that the client knows; or a negative one, that `give` gives to this topic once the PUBLISH that
            says so is on its way; or 0.
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
        return -self._taken_over(entry.uses)

    def give(self, topic: bytes, alias: int) -> None:
        """The client was told that `alias` stands for `topic` now; a topic that had it has none any more."""
        if alias > len(self._owners):
            self._owners.append(topic)
        else:
            self._topics[self._owners[alias - 1]].alias = 0
            self._owners[alias - 1] = topic
        self._topics[topic].alias = alias

    def _taken_over(self, uses: int) -> int:
        """Give the least used alias if a topic of `uses` is used more than twice as much; otherwise 0.

        Twice: topics that are used alike would otherwise take it from each other with every message.
        """
        if uses <= 2 * self._least:
            return 0
        counts = [self._topics[topic].uses for topic in self._owners]
        self._least = min(counts)
        return counts.index(self._least) + 1 if uses > 2 * self._least else 0

    def _halve(self) -> None:
        """Let counts age; a topic without an alias that is hardly used is no longer counted."""
        self._until_halved = USES_PER_ALIAS * self._maximum
        self._least //= 2
        kept = {}
        for topic, entry in self._topics.items():
            entry.uses //= 2
            if entry.uses or entry.alias:
                kept[topic] = entry
        self._topics = kept
