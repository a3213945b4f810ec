"""Unfinished deliveries of a kept session, and the offsets up to which the log was offered to it.

The log is the queue of such a session. This module holds the packet identifiers of the records in flight and, per
partition, the offset below which everything was offered (`reached`). After a reconnect the log is read again from the
first unfinished record: a record in flight is resent under its old identifier [MQTT-4.4.0-1], any other below `reached`
is finished, and the rest is new.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from gateway.mqtt.state.records import PUBCOMP, InflightMessage, Offsets
from mapping.record import Received
from protocols.mqtt.states import UNLIMITED

Partition = tuple[str, int]
"""Kafka topic and partition."""

NO_TOPIC: Final = ""
"""Replaces the topic name of a delivery in flight whose topic was deleted."""


class Rereading(msgspec.Struct, frozen=True, gc=False):
    """The classification of a record that is read again."""

    entry: InflightMessage | None = None  # in flight: resend it as this delivery
    finished: bool = False  # offered before: skip it
    unclear: bool = False  # a gateway that died may have sent it
    lost: tuple[InflightMessage, ...] = ()  # deliveries in flight whose records are no longer in the log


NEW = Rereading()
FINISHED = Rereading(finished=True)
UNCLEAR = Rereading(unclear=True)


class InflightMessages:
    """The deliveries in flight of one session, in the order in which they were sent."""

    __slots__ = ("_ids", "_last", "_offered", "_unclear_until", "_waiting", "reached", "topic_ids")

    def __init__(
        self,
        messages: Iterable[InflightMessage] = (),
        reached: Offsets | None = None,
        topic_ids: Mapping[str, str] | None = None,
    ) -> None:
        """Start with the contents of an in-flight record."""
        self._ids: dict[int, InflightMessage | None] = {message.packet_id: message for message in messages}
        self._last = 0
        self._waiting: dict[Partition, collections.deque[InflightMessage]] = {}
        self._offered: dict[Partition, int] = {}  # offsets below which all was offered before the reconnect
        self._unclear_until = 0
        self.reached: Offsets = reached if reached is not None else {}
        self.topic_ids: Mapping[str, str] = topic_ids if topic_ids is not None else {}  # of the topics in `reached`

    def __len__(self) -> int:
        """Return the number of packet identifiers in use."""
        return len(self._ids)

    def __contains__(self, packet_id: int) -> bool:
        """Whether the identifier is in use."""
        return packet_id in self._ids

    def entries(self) -> tuple[InflightMessage, ...]:
        """Return the deliveries that the in-flight record stores."""
        return tuple(entry for entry in self._ids.values() if entry is not None)

    # sending

    def begin(self, record: Received | None, stage: int, name: str = "") -> int:
        """Start a delivery under an unused packet identifier [MQTT-2.2.1-4].

        `record` is None for a shared subscription's message, which is not resent. `stage` is the packet that the client
        must answer with. `name` is the MQTT topic of a retained message.
        """
        packet_id = self._last % UNLIMITED + 1
        while packet_id in self._ids:
            packet_id = packet_id % UNLIMITED + 1
        self._last = packet_id
        self._ids[packet_id] = (
            None
            if record is None
            else InflightMessage(packet_id, record.topic, record.partition, record.offset, stage, name)
        )
        return packet_id

    def find(self, packet_id: int) -> InflightMessage | None:
        """Return the delivery under a packet identifier."""
        return self._ids.get(packet_id)

    def end(self, packet_id: int) -> None:
        """End a delivery and free its packet identifier."""
        self._ids.pop(packet_id, None)

    # reconnecting

    def forget_recreated(self, topic_ids: Mapping[str, str]) -> None:
        """Forget the state of topics whose ids have changed: they were deleted and created again."""
        for topic, topic_id in topic_ids.items():
            if self.topic_ids.get(topic, topic_id) != topic_id:
                self.forget(topic)

    def reset_truncated(self, ends: Offsets) -> None:
        """Reset partitions whose log ends (`ends`) below the reached offset.

        Such a topic was created again (on a broker without topic ids) or truncated, and all its records are new.
        """
        for topic, partitions in ends.items():
            for partition, end in partitions.items():
                if end < self.reached.get(topic, {}).get(partition, 0):
                    self.reached[topic][partition] = 0

    def rewind(
        self, unclear_until: int, wanted: Offsets, others: Offsets
    ) -> tuple[dict[Partition, int], list[InflightMessage], list[InflightMessage]]:
        """Prepare for reading the log again, after the session got a connection.

        Args:
            unclear_until: epoch milliseconds until which a gateway that died may have sent messages that are in no
                in-flight record, or 0.
            wanted: the live reader's positions in the partitions of the subscriptions. A partition that is not in
                `reached` was created while the client was away, and is read from its beginning.
            others: the same for partitions that only deliveries in flight need.

        Returns:
            The start offset for each partition; the deliveries that need no reading (PUBREL is due, or the message is
            retained); and the deliveries whose partitions no longer exist.
        """
        self._waiting.clear()
        self._unclear_until = unclear_until
        # A missing partition was deleted while the client was away; if it is created again, all its records are new.
        self._offered = {
            (topic, partition): offset
            for topic, offsets in self.reached.items()
            for partition, offset in offsets.items()
            if partition in wanted.get(topic, ()) or partition in others.get(topic, ())
        }
        starts: dict[Partition, int] = {}
        for topic, partitions in wanted.items():
            for partition in partitions:
                starts[topic, partition] = self._offered.setdefault((topic, partition), 0)
        at_once: list[InflightMessage] = []
        lost: list[InflightMessage] = []
        for packet_id, entry in list(self._ids.items()):
            if entry is None:
                del self._ids[packet_id]
            elif entry.stage == PUBCOMP or entry.name:
                at_once.append(entry)
            else:
                place = (entry.topic, entry.partition)
                here = others.get(entry.topic, {}).get(entry.partition)
                if place not in starts:
                    if here is None:
                        lost.append(entry)
                        continue
                    self._offered[place] = here  # only the deliveries in flight are wanted from it
                self._waiting.setdefault(place, collections.deque()).append(entry)
                starts[place] = min(starts.get(place, entry.offset), entry.offset)
        for place, waiting in self._waiting.items():
            self._waiting[place] = collections.deque(sorted(waiting, key=lambda entry: entry.offset))
        return starts, at_once, lost

    def forget(self, topic: str) -> list[InflightMessage]:
        """Drop the state of a deleted Kafka topic; a new topic of that name is offered from its beginning.

        Returns:
            The deliveries that were to be read again, now lost. Others may still be acknowledged until `rewind`.
        """
        lost: list[InflightMessage] = []
        self.reached.pop(topic, None)
        for place in [place for place in self._offered if place[0] == topic]:
            del self._offered[place]
            lost += filter(self._is_unsent, self._waiting.pop(place, ()))
        for entry in self._ids.values():
            if entry is not None and entry.topic == topic and not entry.name:
                entry.topic = NO_TOPIC
        return lost

    @property
    def is_rereading(self) -> bool:
        """Whether some of the log is still read again."""
        return bool(self._offered)

    def classify(self, record: Received) -> Rereading:
        """Classify a record that is read again; call it once for each record, when it can be sent."""
        place = (record.topic, record.partition)
        offered = self._offered.get(place)
        if offered is None:
            return NEW
        waiting = self._waiting.get(place)
        if waiting and waiting[0].offset < record.offset:
            lost = []
            while waiting and waiting[0].offset < record.offset:
                entry = waiting.popleft()
                if self._is_unsent(entry):
                    lost.append(entry)
            return msgspec.structs.replace(self.classify(record), lost=tuple(lost))
        if waiting and waiting[0].offset == record.offset:
            entry = waiting.popleft()
            return Rereading(entry) if self._is_unsent(entry) else FINISHED
        if record.offset < offered:
            return FINISHED
        if record.timestamp <= self._unclear_until:
            return UNCLEAR
        if not waiting:
            del self._offered[place]
        return NEW

    def _is_unsent(self, entry: InflightMessage) -> bool:
        """Whether a delivery must be resent, because the client has not answered it."""
        return self._ids.get(entry.packet_id) is entry and entry.stage != PUBCOMP

    def offered(self, live: Offsets) -> Offsets:
        """Return the offsets up to which the log was offered: `live`, but at least those before the reconnect."""
        for (topic, partition), offered in self._offered.items():
            partitions = live.get(topic)
            if partitions is None:
                partitions = live[topic] = {}
            partitions[partition] = max(partitions.get(partition, 0), offered)
        return live
