"""Deliveries of a kept session that its client has not acknowledged to the end, and how far the log was offered to it.

The queue of such a session is the log. What is kept here is which records are in flight under which packet
identifiers, and per partition the offset below which everything was offered (`reached`). After a reconnect the log is
read again from the first unfinished record: one that is in flight is sent again under its old identifier
[MQTT-4.4.0-1], one below `reached` was finished, and the rest is new.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from gateway.mqtt.state.records import PUBCOMP, InflightMessage, Places
from mapping.record import Received
from protocols.mqtt.states import UNLIMITED

Place = tuple[str, int]
"""Kafka topic and partition."""

NOWHERE: Final = ""
"""In the place of the topic of a delivery in flight whose record is gone with its topic."""


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """What a record that is read again is."""

    entry: InflightMessage | None = None  # it is in flight: send it again as that
    finished: bool = False  # it was offered before and needs nothing
    unclear: bool = False  # it may have been sent before, by a gateway that died
    lost: tuple[InflightMessage, ...] = ()  # deliveries in flight whose records are not in the log any more


NEW = Verdict()
FINISHED = Verdict(finished=True)
UNCLEAR = Verdict(unclear=True)


class InflightMessages:
    """The deliveries in flight of one session, in the order in which they were sent."""

    __slots__ = ("_ids", "_last", "_offered", "_unclear_until", "_waiting", "reached", "topic_ids")

    def __init__(
        self,
        messages: Iterable[InflightMessage] = (),
        reached: Places | None = None,
        topic_ids: Mapping[str, str] | None = None,
    ) -> None:
        """Begin with what an in-flight record says."""
        self._ids: dict[int, InflightMessage | None] = {message.packet_id: message for message in messages}
        self._last = 0
        self._waiting: dict[Place, collections.deque[InflightMessage]] = {}
        self._offered: dict[Place, int] = {}  # what is below was offered before the session came back
        self._unclear_until = 0
        self.reached: Places = reached if reached is not None else {}
        self.topic_ids: Mapping[str, str] = topic_ids if topic_ids is not None else {}  # of what is in `reached`

    def __len__(self) -> int:
        """Packet identifiers in use."""
        return len(self._ids)

    def __contains__(self, packet_id: int) -> bool:
        """Whether the identifier is in use."""
        return packet_id in self._ids

    def entries(self) -> tuple[InflightMessage, ...]:
        """What an in-flight record tells of them."""
        return tuple(entry for entry in self._ids.values() if entry is not None)

    # sending

    def begin(self, record: Received | None, stage: int, name: str = "") -> int:
        """A delivery gets a packet identifier that is not in use [MQTT-2.2.1-4].

        `record` None: it is not sent again (a shared subscription's). `stage`: what the client owes. `name`: the MQTT
        topic of a retained message.
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
        """The delivery under an identifier."""
        return self._ids.get(packet_id)

    def end(self, packet_id: int) -> None:
        """The client has it, or it is given up: the identifier is free."""
        self._ids.pop(packet_id, None)

    # coming back

    def compare(self, topic_ids: Mapping[str, str]) -> None:
        """Forget what is of topics that have other ids now: they were deleted and made again meanwhile."""
        for topic, found in topic_ids.items():
            if self.topic_ids.get(topic, found) != found:
                self.forget(topic)

    def fit(self, ends: Places) -> None:
        """Fit what was reached into the log, which seems to end (`ends`) below that in some partitions.

        Where it does, it was made anew (its broker tells no ids) or cut, and all of it is new.
        """
        for topic, partitions in ends.items():
            for partition, end in partitions.items():
                if end < self.reached.get(topic, {}).get(partition, 0):
                    self.reached[topic][partition] = 0

    def rewind(
        self, unclear_until: int, wanted: Places, others: Places
    ) -> tuple[dict[Place, int], list[InflightMessage], list[InflightMessage]]:
        """The session has a connection again.

        Args:
            unclear_until: epoch milliseconds up to which a gateway that died may have sent what no in-flight record
                tells; 0: there is nothing such.
            wanted: how far the log is fanned out in the partitions that the subscriptions need. One that is not in
                the record appeared while the client was away: all of it is wanted.
            others: the same of those that only deliveries in flight need.

        Returns:
            Where to read each partition from; what needs no reading: the deliveries that were received already (PUBREL
            is due) and the retained ones; and those whose partitions do not exist any more.
        """
        self._waiting.clear()
        self._unclear_until = unclear_until
        # What is not there was deleted while the client was away: should it be there again, all of it is new.
        self._offered = {
            (topic, partition): offset
            for topic, places in self.reached.items()
            for partition, offset in places.items()
            if partition in wanted.get(topic, ()) or partition in others.get(topic, ())
        }
        starts: dict[Place, int] = {}
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
                    self._offered[place] = here  # nothing but what is in flight is wanted of what is there
                self._waiting.setdefault(place, collections.deque()).append(entry)
                starts[place] = min(starts.get(place, entry.offset), entry.offset)
        for place, waiting in self._waiting.items():
            self._waiting[place] = collections.deque(sorted(waiting, key=lambda entry: entry.offset))
        return starts, at_once, lost

    def forget(self, topic: str) -> list[InflightMessage]:
        """A Kafka topic was deleted: of another one of its name nothing was offered, and what is in flight is lost.

        Returns:
            What waited to be read again. The rest was sent; should it not be acknowledged, it is lost with `rewind`.
        """
        lost: list[InflightMessage] = []
        self.reached.pop(topic, None)
        for place in [place for place in self._offered if place[0] == topic]:
            del self._offered[place]
            lost += filter(self._is_unsent, self._waiting.pop(place, ()))
        for entry in self._ids.values():
            if entry is not None and entry.topic == topic and not entry.name:
                entry.topic = NOWHERE
        return lost

    @property
    def is_back(self) -> bool:
        """Whether some of the log is still read a second time."""
        return bool(self._offered)

    def judge(self, record: Received) -> Verdict:
        """What a record is to a session that came back; call it once it can be sent."""
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
            return msgspec.structs.replace(self.judge(record), lost=tuple(lost))
        if waiting and waiting[0].offset == record.offset:
            entry = waiting.popleft()
            return Verdict(entry) if self._is_unsent(entry) else FINISHED
        if record.offset < offered:
            return FINISHED
        if record.timestamp <= self._unclear_until:
            return UNCLEAR
        if not waiting:
            del self._offered[place]
        return NEW

    def _is_unsent(self, entry: InflightMessage) -> bool:
        """Whether it is to be sent again; not when the client has answered before."""
        return self._ids.get(entry.packet_id) is entry and entry.stage != PUBCOMP

    def places(self, live: Places) -> Places:
        """How far the log was offered: `live`, but never behind what was reached before."""
        for (topic, partition), offered in self._offered.items():
            partitions = live.get(topic)
            if partitions is None:
                partitions = live[topic] = {}
            partitions[partition] = max(partitions.get(partition, 0), offered)
        return live
