"""Where shared subscriptions begin.

Kafka's group offsets say where a group goes on. They do not say where one of its filters began: a group may have read a
topic for another filter long before, and a topic may be created while the only member is away. So the log's ends at the
first SUBSCRIBE are kept for each group and filter, as long as Kafka knows the group.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection
from typing import Protocol
from weakref import WeakSet

import msgspec
from aiokafka import TopicPartition

from gateway.kafka.cluster.cluster_admin import DEAD
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.groups.membership import Groups
from gateway.mqtt.routing.router import TOPIC_ID_BYTES
from gateway.mqtt.state.records import Offsets, ShareRecord
from gateway.mqtt.state.share_table import END, ShareTable
from mapping.record import Received


class ShareStore(Protocol):
    """Stores the records of shared subscriptions."""

    shares: ShareTable

    def put_share(self, name: str, value: bytes | None) -> None:
        """Write a record, until Kafka has stored it."""


class Start(msgspec.Struct, eq=False, weakref=True):
    """Where one shared subscription began."""

    record: ShareRecord
    offsets: dict[TopicPartition, int]  # the log's ends then, in topics that were not recreated since
    is_old: bool  # it existed before: topics in which its group has committed nothing are newer
    skips: bool  # what is older is not for it; False where it may be as old as the group

    def is_after(self, record: Received) -> bool:
        """Whether the record is older than the subscription."""
        # A plain tuple is equal to a TopicPartition, and cheaper: each record of a shared subscription comes here.
        return self.skips and record.offset < self.offsets.get((record.topic, record.partition), 0)


class ShareStarts:
    """Finds the starts of shared subscriptions, and keeps them."""

    def __init__(self, groups: Groups, lookup: Lookup, store: ShareStore) -> None:
        self._groups = groups
        self._lookup = lookup
        self._store = store
        self._used: WeakSet[Start] = WeakSet()
        self._ids: dict[str, str] = {}  # of the topics of these
        lookup.add_listener(lambda _: self._check_topic_ids())

    async def find(self, group: str, topic_filter: str, topics: Collection[str]) -> Start:
        """Return where a subscription began; one that is new begins now, at the ends of `topics`.

        Raises:
            Refused: Kafka does not answer.
        """
        name, table = f"{group}{END}{topic_filter}", self._store.shares
        record = table.find(name)
        is_old = record is not None
        if record is None:
            # A group that has no record but exists is native clients', AMQP's, or of a gateway that wrote no records.
            unknown = not table.knows(group) and (await self._groups.admin.group(group)).state != DEAD
            record = await self._begin(topics, unknown=unknown)
            if table.add(name, record):
                self._store.put_share(name, table.records[name])
        start = Start(record, self._valid(record), is_old, not record.unknown)
        self._used.add(start)
        self._ids |= record.topic_ids
        return start

    async def _begin(self, topics: Collection[str], *, unknown: bool) -> ShareRecord:
        existing = await self._lookup.existing(topics)
        ends = await self._lookup.ends([tp for tps in existing.values() for tp in tps], led=True)
        offsets: Offsets = {}
        for tp, end in ends.items():
            if self._id(tp.topic):  # without ids a recreated topic would go unnoticed
                offsets.setdefault(tp.topic, {})[tp.partition] = end
        return ShareRecord(offsets, {topic: self._id(topic) for topic in offsets}, unknown)

    def _valid(self, record: ShareRecord) -> dict[TopicPartition, int]:
        """Return a record's offsets in topics that were not recreated since."""
        return {
            TopicPartition(topic, partition): offset
            for topic, offsets in record.offsets.items()
            if record.topic_ids.get(topic) == self._id(topic)
            for partition, offset in offsets.items()
        }

    def _check_topic_ids(self) -> None:
        """Drop offsets in topics that were recreated: all their records are newer."""
        changed = [topic for topic, known in self._ids.items() if self._id(topic) not in {"", known}]
        if not changed:
            return
        for topic in changed:
            del self._ids[topic]
        for start in self._used:
            start.offsets = self._valid(start.record)

    def _id(self, topic: str) -> str:
        return b64encode(self._lookup.identity(topic)[:TOPIC_ID_BYTES]).decode()

    def forget(self, group: str) -> None:
        """Forget the subscriptions of a group that Kafka has deleted."""
        for name in self._store.shares.of_group(group):
            self._store.shares.apply(name, None)
            self._store.put_share(name, None)
