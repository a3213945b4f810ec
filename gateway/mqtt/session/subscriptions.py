"""What one session has subscribed to, but for its shared subscriptions; and what of its own messages that matches."""

from __future__ import annotations

from typing import Final

from gateway.mqtt.routing.router import Match, combine
from gateway.mqtt.state.records import SessionSubscription
from mapping.mqtt.outgoing import Delivery
from protocols.mqtt.topics import SubscriptionTrie

REMEMBERED_TOPICS: Final = 1000
"""Topics of which a session remembers whether its own filters match."""


class Subscriptions:
    """The subscriptions of one session."""

    __slots__ = ("_own_matches", "_trie", "by_filter")

    def __init__(self) -> None:
        self.by_filter: dict[str, SessionSubscription] = {}  # as subscribed; changed by `put` and `remove` only
        self._trie: SubscriptionTrie[int, SessionSubscription] | None = None  # made when it is asked for
        self._own_matches: dict[str, bool] = {}  # what `matches_own` has found

    def put(self, subscription: SessionSubscription) -> None:
        """Add or replace one."""
        self.by_filter[subscription.options.topic_filter] = subscription
        self.forget_matches()

    def remove(self, topic_filter: str) -> bool:
        """Take one out; whether there was one."""
        self.forget_matches()
        return self.by_filter.pop(topic_filter, None) is not None

    @property
    def lossless(self) -> set[str]:
        """The filters of those at QoS 1 and 2."""
        return {name for name, subscription in self.by_filter.items() if subscription.options.qos}

    def match(self, delivery: Delivery, client_id: str) -> Match | None:
        """How they match a message together; `client_id`: the session's, for No Local."""
        return combine(
            delivery, client_id, (subscription for _, subscription in self._own_trie().match(delivery.topic))
        )

    def matches_own(self, topic: str) -> bool:
        """Whether the session is sent what its own client publishes to a topic."""
        found = self._own_matches.get(topic)
        if found is None:
            if len(self._own_matches) >= REMEMBERED_TOPICS:
                self._own_matches.clear()
            matching = self._own_trie().match(topic)
            found = self._own_matches[topic] = any(not subscription.options.no_local for _, subscription in matching)
        return found

    def forget_matches(self) -> None:
        """Give up what can be found again."""
        self._trie = None
        if self._own_matches:
            self._own_matches = {}

    def _own_trie(self) -> SubscriptionTrie[int, SessionSubscription]:
        trie = self._trie
        if trie is None:
            trie = self._trie = SubscriptionTrie()
            for topic_filter, subscription in self.by_filter.items():
                trie.add(topic_filter, 0, subscription)
        return trie
