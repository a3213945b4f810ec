"""The subscriptions of one session, except shared ones, and matching of messages against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from gateway.mqtt.routing.router import Match, combine
from gateway.mqtt.state.records import Backlog, Offsets, SessionSubscription
from mapping.mqtt.outgoing import MqttDelivery
from mapping.record import Received
from protocols.mqtt.topics import SubscriptionTrie

REMEMBERED_TOPICS: Final = 1000
"""Maximum number of topics for which a session caches whether its filters match."""
LONGEST_REMEMBERED: Final = 256
"""Maximum length of these topics."""


class Subscriptions:
    """The subscriptions of one session."""

    __slots__ = ("_own_matches", "_trie", "by_filter")

    def __init__(self) -> None:
        self.by_filter: dict[str, SessionSubscription] = {}  # changed only by `put` and `remove`
        self._trie: SubscriptionTrie[int, SessionSubscription] | None = None  # built when needed
        self._own_matches: dict[str, bool] = {}  # cache of `matches_own`

    def put(self, subscription: SessionSubscription) -> None:
        """Add or replace a subscription."""
        self.by_filter[subscription.options.topic_filter] = subscription
        self.forget_matches()

    def remove(self, topic_filter: str) -> bool:
        """Remove a subscription; return whether it existed."""
        self.forget_matches()
        return self.by_filter.pop(topic_filter, None) is not None

    @property
    def lossless(self) -> set[str]:
        """The filters at QoS 1 and 2, and those that have been so and still owe messages."""
        return {name for name, each in self.by_filter.items() if each.options.qos or each.backlog is not None}

    def match(self, record: Received, delivery: MqttDelivery, client_id: str) -> Match | None:
        """Return how the subscriptions together match a record that is read late.

        `delivery` is its MQTT form; `client_id` is the session's, for No Local.
        """
        matching = self._own_trie().match(delivery.topic)
        return combine(delivery, client_id, (subscription.for_record(record) for _, subscription in matching))

    def trim_backlogs(self, reached: Offsets) -> None:
        """Drop what is owed below `reached`: it was offered. Partitions that are missing there owe nothing."""
        self._keep_owed(lambda topic, partition, end: reached.get(topic, {}).get(partition, end) < end)

    def forget_topic(self, deleted: str) -> None:
        """Drop what is owed of a deleted Kafka topic."""
        self._keep_owed(lambda topic, _partition, _end: topic != deleted)

    def _keep_owed(self, is_owed: Callable[[str, int, int], bool]) -> None:
        for subscription in [each for each in self.by_filter.values() if each.backlog is not None]:
            assert subscription.backlog is not None
            owed: Offsets = {}
            for topic, offsets in subscription.backlog.until.items():
                for partition, end in offsets.items():
                    if is_owed(topic, partition, end):
                        owed.setdefault(topic, {})[partition] = end
            backlog = Backlog(subscription.backlog.qos, owed) if owed else None
            self.put(msgspec.structs.replace(subscription, backlog=backlog))

    def matches_own(self, topic: str) -> bool:
        """Whether the session receives its own client's messages to a topic."""
        matches = self._own_matches.get(topic)
        if matches is None:
            matching = self._own_trie().match(topic)
            matches = any(not subscription.options.no_local for _, subscription in matching)
            if len(topic) <= LONGEST_REMEMBERED:
                if len(self._own_matches) >= REMEMBERED_TOPICS:
                    self._own_matches.clear()
                self._own_matches[topic] = matches
        return matches

    def forget_matches(self) -> None:
        """Drop the caches."""
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
