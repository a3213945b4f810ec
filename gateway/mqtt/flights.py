"""Deliveries of a kept session that its client has not acknowledged to the end, and how far the log was offered to it.

The queue of such a session is the log. What is kept here is which records are on the way under which packet
identifiers, and per partition the offset below which everything was offered (`reached`). After a reconnect the log is
read again from the first unfinished record: one that is on the way is sent again under its old identifier
[MQTT-4.4.0-1], one below `reached` was finished, and the rest is new.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import msgspec

from gateway.mqtt.records import Flight, Places
from mapping.record import Received
from protocols.mqtt.states import UNLIMITED

PUBACK, PUBREC, PUBCOMP = 1, 2, 3  # what is awaited: the stages of a flight

Place = tuple[str, int]
"""Kafka topic and partition."""


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """What a record that is read again is.

    Attributes:
        flight: it is on the way: send it again as that.
        finished: it was offered before and needs nothing.
        unclear: it may have been sent before, by a gateway that died.
    """

    flight: Flight | None = None
    finished: bool = False
    unclear: bool = False


NEW = Verdict()
FINISHED = Verdict(finished=True)
UNCLEAR = Verdict(unclear=True)


class Flights:
    """The deliveries on the way of one session, in the order in which they were sent."""

    __slots__ = ("_floors", "_ids", "_last", "_unclear_until", "_waiting", "reached")

    def __init__(self, flights: Iterable[Flight] = (), reached: Places | None = None) -> None:
        """Begin with what a flight record says."""
        self._ids: dict[int, Flight | None] = {flight.packet_id: flight for flight in flights}
        self._last = 0
        self._waiting: dict[Place, collections.deque[Flight]] = {}
        self._floors: dict[Place, int] = {}  # what is below was offered before the session came back
        self._unclear_until = 0
        self.reached: Places = reached if reached is not None else {}

    def __len__(self) -> int:
        """Packet identifiers in use."""
        return len(self._ids)

    def __contains__(self, packet_id: int) -> bool:
        """Whether the identifier is in use."""
        return packet_id in self._ids

    def on_the_way(self) -> tuple[Flight, ...]:
        """What a flight record tells of them."""
        return tuple(flight for flight in self._ids.values() if flight is not None)

    # sending

    def begin(self, record: Received | None, stage: int, name: str = "") -> int:
        """A delivery gets a packet identifier that is not in use [MQTT-2.2.1-4].

        Args:
            record: where it is; None for one that is not sent again (a shared subscription's).
            stage: what the client owes.
            name: the MQTT topic of a retained message.
        """
        packet_id = self._last % UNLIMITED + 1
        while packet_id in self._ids:
            packet_id = packet_id % UNLIMITED + 1
        self._last = packet_id
        self._ids[packet_id] = (
            None if record is None else Flight(packet_id, record.topic, record.partition, record.offset, stage, name)
        )
        return packet_id

    def find(self, packet_id: int) -> Flight | None:
        """The delivery under an identifier."""
        return self._ids.get(packet_id)

    def end(self, packet_id: int) -> None:
        """The client has it, or it is given up: the identifier is free."""
        self._ids.pop(packet_id, None)

    # coming back

    def rewind(self, unclear_until: int) -> tuple[dict[Place, int], list[Flight]]:
        """The session has a connection again.

        Args:
            unclear_until: epoch milliseconds up to which a gateway that died may have sent what no flight record
                tells; 0: there is nothing such.

        Returns:
            Where to read each partition from, and what needs no reading: the deliveries that were received already
            (PUBREL is due) and the retained ones.
        """
        self._waiting.clear()
        self._floors.clear()
        self._unclear_until = unclear_until
        at_once: list[Flight] = []
        starts: dict[Place, int] = {}
        for topic, partitions in self.reached.items():
            for partition, reached in partitions.items():
                place = (topic, partition)
                starts[place] = reached
                self._floors[place] = reached
        for packet_id, flight in list(self._ids.items()):
            if flight is None:
                del self._ids[packet_id]
            elif flight.stage == PUBCOMP or flight.name:
                at_once.append(flight)
            else:
                place = (flight.topic, flight.partition)
                self._waiting.setdefault(place, collections.deque()).append(flight)
                starts[place] = min(starts.get(place, flight.offset), flight.offset)
        for place, waiting in self._waiting.items():
            self._waiting[place] = collections.deque(sorted(waiting, key=lambda flight: flight.offset))
            self._floors.setdefault(place, 0)
        return starts, at_once

    @property
    def is_back(self) -> bool:
        """Whether some of the log is still read a second time."""
        return bool(self._floors)

    def judge(self, record: Received) -> Verdict:
        """What a record is to a session that came back; call it once it can be sent."""
        place = (record.topic, record.partition)
        floor = self._floors.get(place)
        if floor is None:
            return NEW
        waiting = self._waiting.get(place)
        while waiting and waiting[0].offset < record.offset:
            self.end(waiting.popleft().packet_id)  # deleted from the log meanwhile
        if waiting and waiting[0].offset == record.offset:
            flight = waiting.popleft()
            going = flight.packet_id in self._ids and flight.stage != PUBCOMP
            return Verdict(flight) if going else FINISHED  # else the client has answered before it was sent again
        if record.offset < floor:
            return FINISHED
        if record.timestamp <= self._unclear_until:
            return UNCLEAR
        if not waiting:
            del self._floors[place]
        return NEW

    def places(self, live: Places) -> Places:
        """How far the log was offered: `live`, but never behind what was reached before."""
        for (topic, partition), floor in self._floors.items():
            partitions = live.get(topic)
            if partitions is None:
                partitions = live[topic] = {}
            partitions[partition] = max(partitions.get(partition, 0), floor)
        return live
