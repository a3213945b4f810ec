"""Topics of a group that were deleted and recreated: positions in the former topics do not count."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topic_info import TopicIdentity
from gateway.kafka.groups.delivery.assignment import AssignedPartition


class RecreatedTopics(msgspec.Struct, eq=False):
    """Finds recreated topics of one group member in Kafka's metadata.

    A commit that was in flight when a topic was deleted may be stored for the new topic. So committed offsets of a
    recreated topic are ignored until this member has committed in all of the topic's partitions that it owns.
    """

    _lookup: Lookup
    _identities: dict[str, TopicIdentity] = {}
    _distrusted: set[str] = set()
    _seen: object = None  # the metadata of the last check

    def watch(self, topics: Collection[str]) -> None:
        """Set the topics that the group reads from now on."""
        known = self._identities
        self._identities = {topic: known.get(topic) or TopicIdentity(self._lookup.identity(topic)) for topic in topics}
        self._distrusted.intersection_update(topics)

    def check(self) -> list[str]:
        """Return the topics that were recreated since the last call."""
        if self._seen is self._lookup.topics:
            return []
        self._seen = self._lookup.topics
        recreated = [
            topic for topic, identity in self._identities.items() if identity.becomes(self._lookup.identity(topic))
        ]
        self._distrusted.update(recreated)
        return recreated

    def trusts(self, topic: str) -> bool:
        """Whether the committed offsets of a topic count."""
        return topic not in self._distrusted

    def note_commits(self, assignment: Iterable[AssignedPartition]) -> None:
        """Trust the commits of topics whose partitions in `assignment` all have one, made by this member."""
        if self._distrusted:
            lacking = {assigned.partition.topic for assigned in assignment if assigned.committed is None}
            ours = {assigned.partition.topic for assigned in assignment}
            self._distrusted -= ours - lacking
