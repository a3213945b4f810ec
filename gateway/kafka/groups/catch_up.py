"""Subscribers of a group get from the log what nobody selected before they came, or while they had no capacity.

What nobody here selects is not kept in memory: its offsets are (`AssignedPartition.unselected`). A subscriber that
joins, or had no capacity for too long, is behind in a partition from the first of these on. A reading of its own
(`gateway.kafka.read.catch_up_reader`) brings it the records at these offsets that it selects, at its own pace, up to
where the group's reader is; what that one reads meanwhile is left for the reading too, so that each subscriber gets the
records of a partition in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.kafka.groups.assignment import UNTRIED, AssignedPartition, Delivery, Member, Pool
from gateway.kafka.read.catch_up_reader import CatchUpReader, Reading
from mapping.record import Received


class _Head:
    """Where a reading has caught up: at the group's reader."""

    def __init__(self, assigned: AssignedPartition) -> None:
        self._assigned = assigned

    @property
    def position(self) -> int:
        return self._assigned.position or 0


class _Catching:
    """A member as the subscriber of its readings."""

    lossy: Final = False

    def __init__(self, member: Member, offer: Callable[[Member, Received], bool]) -> None:
        self._member = member
        self._offer = offer

    @property
    def demand(self) -> int:
        """How many records the member's subscriber takes."""
        return self._member.subscriber.demand

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """A record of the log, wanted or not."""
        return self._offer(self._member, record)


class CatchUp:
    """The readings of one group's members."""

    def __init__(
        self,
        readings: CatchUpReader,  # reads the log
        # tells the partition and the pool of a record of the log; None when it is not ours
        place: Callable[[Received], tuple[AssignedPartition, Pool] | None],
        # called when a member has caught up, or unselected records have turned out to be gone
        changed: Callable[[], None],
        suspended: Callable[[], bool],  # whether nothing is to be handed out now
    ) -> None:
        self.expired = 0  # how many unselected records retention has deleted
        self._readings = readings
        self._place = place
        self._changed = changed
        self._suspended = suspended

    def begin(self, member: Member, assigned: AssignedPartition, offset: int) -> None:
        """A member is behind in a partition, from this offset on at the latest."""
        reading = member.behind.get(assigned)
        if reading is not None:
            if reading.position <= offset:
                return
            self._readings.cancel(reading)
        if member.catching is None:
            member.catching = _Catching(member, self._bring)

        def finished(reading: Reading) -> None:
            del member.behind[assigned]
            self._changed()

        def gap(count: int) -> None:
            position = member.behind[assigned].position
            self.gone(assigned, position, position + count)

        reading = Reading(member.catching, assigned.partition, offset, goal=_Head(assigned), finished=finished, gap=gap)
        member.behind[assigned] = reading
        self._readings.start(reading)

    def gone(self, assigned: AssignedPartition, begin: int, end: int) -> None:
        """The log has no records at these offsets any more."""
        count = assigned.gone(begin, end)
        if count:
            self.expired += count
            self._changed()

    def resume(self, member: Member) -> None:
        """A member may have capacity."""
        if member.behind and member.catching is not None:
            self._readings.resume(member.catching)

    def keep(self, member: Member) -> None:
        """Stop a member's readings of partitions that are not ours any more; the others go on."""
        for assigned in [assigned for assigned in member.behind if not assigned.ours]:
            self._readings.cancel(member.behind.pop(assigned))
        self.resume(member)

    def end(self, member: Member) -> None:
        """A member has left."""
        if member.catching is not None:
            self._readings.forget(member.catching)
            member.catching = None  # which has a way back to its member
        member.behind.clear()

    def _bring(self, member: Member, record: Received) -> bool:
        """A member that is behind is brought a record of the log; False when it has no capacity."""
        place = self._place(record)
        reading = None if place is None else member.behind.get(place[0])
        if place is None or reading is None:
            return True
        assigned, pool = place
        offset = record.offset
        if offset > reading.position:
            self.gone(assigned, reading.position, offset)
        if offset not in assigned.unselected or offset in assigned.in_flight:
            return True  # it is settled, or with somebody
        if member.wants is not None and not member.wants(record):
            return True
        if self._suspended():
            return False
        delivery = Delivery(record, assigned, pool, *assigned.tries.get(offset, UNTRIED))
        member.held[id(record)] = delivery
        assigned.in_flight.add(offset)
        if member.subscriber.offer_nowait(record):
            return True
        del member.held[id(record)]
        assigned.in_flight.remove(offset)
        return False
