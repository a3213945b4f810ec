"""Acknowledgements of one client's publishes, in order of arrival.

Kafka answers per partition, so results arrive in any order. The acknowledgements must be in order [MQTT311-4.6.0-2],
and a failed record must not be overtaken by a later success.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.kafka.contracts import Result
from mapping.outcomes import Outcome

STORED: Final = Outcome.STORED  # looked up once: Python 3.11 takes 0.2 us for a member of an enumeration


class Slot(msgspec.Struct, gc=False):
    """The place of one publish in the queue: its packet identifier, its QoS and, once known, its result."""

    packet_id: int
    result: Result | None = None
    qos: int = 1
    no_subscribers: bool = False  # answer "no matching subscribers"
    own_topic: str = ""  # the Kafka topic, if the client must get its copy before PUBACK (see `self_delivery`)


_EMPTY: Final[collections.deque[Slot]] = collections.deque()
"""Shared by all connections that never published at QoS 1 or 2; an empty deque takes 760 bytes."""


class AckQueue:
    """The queue of a connection's unacknowledged publishes."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue = _EMPTY

    def __len__(self) -> int:
        return len(self._queue)

    def arrive(self, packet_id: int, qos: int = 1) -> Slot:
        """Append a publish; the slot is its ticket's token."""
        slot = Slot(packet_id, None, qos)
        if self._queue is _EMPTY:
            self._queue = collections.deque()
        self._queue.append(slot)
        return slot

    def arrive_run(self, packet_ids: Sequence[int]) -> list[Slot]:
        """Append consecutive publishes of QoS 1."""
        slots = [Slot(packet_id) for packet_id in packet_ids]
        if self._queue is _EMPTY:
            self._queue = collections.deque()
        self._queue.extend(slots)
        return slots

    def stored(self) -> list[int]:
        """Remove the stored publishes at the head that get a plain PUBACK, and return their packet identifiers."""
        queue = self._queue
        taken: list[int] = []
        for slot in queue:
            result = slot.result
            if result is None or result.outcome is not STORED or slot.qos != 1 or slot.no_subscribers:
                break
            taken.append(slot.packet_id)
        if len(taken) == len(queue):
            queue.clear()
        else:
            for _ in taken:
                queue.popleft()
        return taken

    def ready(self) -> list[Slot]:
        """Remove and return the slots at the head whose result is known, in order of arrival."""
        queue = self._queue
        taken: list[Slot] = []
        while queue and queue[0].result is not None:
            taken.append(queue.popleft())
        return taken

    def put_back(self, slots: Sequence[Slot]) -> None:
        """Put slots from `ready` back at the head, in order, and clear the first one's result."""
        slots[0].result = None
        self._queue.extendleft(reversed(slots))
