"""Reads records from the log again that a group's subscribers did not get when they were first read.

Records that no subscriber here selects are not kept in memory, only their offsets (`AssignedPartition.unselected`). A
subscriber that joins, or had no capacity for too long, is behind in a partition from the first such offset on. A
reading (`gateway.kafka.read.catch_up_reader`) brings it the unselected records that it selects, at its own pace, up to
the position of the group's reader. New records are left to the reading meanwhile, so that each subscriber gets the
records of a partition in order.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flowcontrol.marks import UNTRIED
from gateway.kafka.groups.delivery.assignment import EARLIEST, AssignedPartition, Delivery, Member, Pool
from gateway.kafka.read.catch_up_reader import CatchUpReader, Reading
from mapping.record import Received


class _LogSubscriber(msgspec.Struct, eq=False):
    """A member as the subscriber of its readings."""

    member: Member
    offer: Callable[[Member, Received], bool]
    lossy: bool = False

    @property
    def demand(self) -> int:
        """How many records the member accepts."""
        return 0 if self.member.resting else self.member.subscriber.demand

    def pause_reason(self) -> None:
        """Others report the pause."""

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Accept or skip a record from the log; False when the member has no capacity."""
        return self.offer(self.member, record)


class CatchUp(msgspec.Struct, eq=False):
    """The readings of one group's members."""

    _readings: CatchUpReader  # reads the log
    # returns the partition and pool of a record from the log; None when the partition is not assigned here
    _locate: Callable[[Received], tuple[AssignedPartition, Pool] | None]
    _offer: Callable[[Member, Delivery], bool]  # offers a delivery to a member; False when it has no capacity
    _changed: Callable[[], None]  # called when a member has caught up, or unselected records were deleted
    _suspended: Callable[[], bool]  # whether nothing may be delivered now
    expired: int = 0  # how many unselected records retention has deleted

    def start(self, member: Member, assigned: AssignedPartition, offset: int) -> None:
        """Start a reading for a member that is behind in a partition since `offset`, unless one covers it already."""
        reading = member.behind.get(assigned)
        if reading is not None:
            if reading.position <= offset:
                return
            self._readings.cancel(reading)
        if member.log_subscriber is None:
            member.log_subscriber = _LogSubscriber(member, self._offer_from_log)

        def finished(reading: Reading) -> None:
            del member.behind[assigned]
            self._changed()

        def gap(count: int) -> None:
            position = member.behind[assigned].position
            self.note_deleted(assigned, position, position + count)

        def goal() -> int:  # the position of the group's reader
            return assigned.position or 0

        reading = Reading(member.log_subscriber, assigned.partition, offset, goal=goal, finished=finished, gap=gap)
        member.behind[assigned] = reading
        self._readings.start(reading)

    def note_deleted(self, assigned: AssignedPartition, begin: int, end: int) -> None:
        """Note that the log no longer has records at these offsets."""
        count = assigned.discard_deleted(begin, end)
        if count:
            self.expired += count
            self._changed()

    def resume(self, member: Member) -> None:
        """Continue the readings of a member that may have capacity again."""
        if member.behind and member.log_subscriber is not None:
            self._readings.resume(member.log_subscriber)

    def stop_revoked(self, member: Member) -> None:
        """Stop a member's readings of partitions that are no longer assigned here; the others continue."""
        for assigned in [assigned for assigned in member.behind if not assigned.ours]:
            self._readings.cancel(member.behind.pop(assigned))
        self.resume(member)

    def stop(self, member: Member) -> None:
        """Stop all readings of a member that has left."""
        if member.log_subscriber is not None:
            self._readings.forget(member.log_subscriber)
            member.log_subscriber = None  # it refers back to its member
        member.behind.clear()

    def _offer_from_log(self, member: Member, record: Received) -> bool:
        """Offer a record from the log to a member that is behind; False when it has no capacity."""
        located = self._locate(record)
        reading = None if located is None else member.behind.get(located[0])
        if located is None or reading is None:
            return True
        assigned, pool = located
        offset = record.offset
        if offset > reading.position:
            self.note_deleted(assigned, reading.position, offset)
        if offset not in assigned.unselected or offset in assigned.in_flight:
            return True  # settled already, or held by another member
        declined = assigned.declined.get(offset)
        if (declined and member in declined) or (member.wants is not None and not member.wants(record)):
            return True
        if self._suspended() or member.resting:
            return False
        assigned.in_flight.add(offset)
        delivery = Delivery(record, assigned, pool, EARLIEST, *assigned.tries.get(offset, UNTRIED))
        if declined:
            delivery.declined, delivery.kept = declined, True
        if self._offer(member, delivery):
            return True
        assigned.in_flight.remove(offset)
        return False
