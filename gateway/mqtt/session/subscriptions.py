"""What one session has subscribed to, but for its shared subscriptions; and what of its own messages that matches."""

from __future__ import annotations

from typing import Final

from gateway.mqtt.routing.router import Match, combine
from gateway.mqtt.state.records import Wish
from mapping.mqtt import Delivery
from protocols.mqtt.topics import SubscriptionTrie

HEARD: Final = 1000
"""Topics of which a session remembers whether its own filters match."""


class Subscriptions:
    """The subscriptions of one session.

    Attributes:
        by_filter: as subscribed; changed by `put` and `remove` only.
    """

    __slots__ = ("_heard", "_trie", "by_filter")

    def __init__(self) -> None:
        self.by_filter: dict[str, Wish] = {}
        self._trie: SubscriptionTrie[int, Wish] | None = None  # made when it is asked for
        self._heard: dict[str, bool] = {}  # what `hears` has found

    def put(self, wish: Wish) -> None:
        """Add or replace one."""
        self.by_filter[wish.options.topic_filter] = wish
        self.forget_matches()

    def remove(self, topic_filter: str) -> bool:
        """Take one out; whether there was one."""
        self.forget_matches()
        return self.by_filter.pop(topic_filter, None) is not None

    @property
    def lossless(self) -> set[str]:
        """The filters of those at QoS 1 and 2."""
        return {name for name, wish in self.by_filter.items() if wish.options.qos}

    def match(self, delivery: Delivery, client_id: str) -> Match | None:
        """How they match a message together; `client_id`: the session's, for No Local."""
        return combine(delivery, client_id, (wish for _, wish in self._own_trie().match(delivery.topic)))

    def hears(self, topic: str) -> bool:
        """Whether the session is sent what its own client publishes to a topic."""
        heard = self._heard.get(topic)
        if heard is None:
            if len(self._heard) >= HEARD:
                self._heard.clear()
            matching = self._own_trie().match(topic)
            heard = self._heard[topic] = any(not wish.options.no_local for _, wish in matching)
        return heard

    def forget_matches(self) -> None:
        """Give up what can be found again."""
        self._trie = None
        if self._heard:
            self._heard = {}

    def _own_trie(self) -> SubscriptionTrie[int, Wish]:
        trie = self._trie
        if trie is None:
            trie = self._trie = SubscriptionTrie()
            for topic_filter, wish in self.by_filter.items():
                trie.add(topic_filter, 0, wish)
        return trie
