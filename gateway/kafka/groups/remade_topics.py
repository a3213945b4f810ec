"""Topics of a group that were deleted and made again: positions in the former ones do not count."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topic_info import TopicIdentity
from gateway.kafka.groups.assignment import AssignedPartition


class RemadeTopics:
    """Compares the topics of one member of a group with Kafka's metadata.

    A commit that was on its way when a topic was deleted may land in the new one. So after a topic was made again no
    committed offset of it is believed, until we have committed in all of its partitions that are ours.
    """

    __slots__ = ("_doubted", "_identities", "_lookup", "_seen")

    def __init__(self, lookup: Lookup) -> None:
        """`lookup`: has the metadata."""
        self._lookup = lookup
        self._identities: dict[str, TopicIdentity] = {}
        self._doubted: set[str] = set()
        self._seen: object = None  # the metadata of the last look

    def follow(self, topics: Collection[str]) -> None:
        """The group reads these from now on."""
        known = self._identities
        self._identities = {topic: known.get(topic) or TopicIdentity(self._lookup.identity(topic)) for topic in topics}
        self._doubted.intersection_update(topics)

    def look(self) -> list[str]:
        """The topics that were made again since the last look."""
        if self._seen is self._lookup.topics:
            return []
        self._seen = self._lookup.topics
        found = [
            topic for topic, identity in self._identities.items() if identity.becomes(self._lookup.identity(topic))
        ]
        self._doubted.update(found)
        return found

    def believes(self, topic: str) -> bool:
        """Whether what is committed in a topic counts."""
        return topic not in self._doubted

    def committed(self, assignment: Iterable[AssignedPartition]) -> None:
        """These are ours; the reader has just committed, or is about to be given others."""
        if self._doubted:
            lacking = {assigned.partition.topic for assigned in assignment if assigned.committed is None}
            ours = {assigned.partition.topic for assigned in assignment}
            self._doubted -= ours - lacking
