"""A stream as a member of a consumer group: a subscriber of the group's shared reader (`gateway.kafka.groups`)."""

from __future__ import annotations

from typing import Final, Protocol

from flowcontrol.budget import Budget, ReceiverBudget
from gateway.kafka.groups.membership import Membership
from gateway.pauses import OUTGOING_BUDGET, pauses
from gateway.spawn import Spawn
from mapping.record import Received
from mapping.rest.outgoing import RecordFilter

DEMAND: Final = 100  # of a stream that is ready; it refuses records when it is not
UNSETTLED_COST: Final = 512  # memory of an unsettled delivery in addition to its sent bytes


class Receiver(Protocol):
    """The stream."""

    @property
    def ready(self) -> bool:
        """Whether one more record can be sent."""

    def deliver(self, record: Received) -> None:
        """Send a record; it is settled later, through its `GroupSubscriber`."""

    @property
    def subject(self) -> str:
        """The subject under which pauses of its connection are reported."""


class GroupSubscriber:
    """A group's subscriber that delivers to one stream. It accepts no records before `joined`."""

    lossy: Final = False
    position: Final = ""  # none: a group continues at its committed offsets

    def __init__(self, receiver: Receiver, chosen: RecordFilter, spawn: Spawn, outgoing: Budget) -> None:
        """Deliver the `chosen` records to `receiver`, and decline the others.

        Another member gets a declined record; if no member wants it, it is settled. `outgoing` is the budget of all
        receivers.
        """
        self._holding = ReceiverBudget(outgoing)
        self._receiver = receiver
        self._chosen = chosen
        self._spawn = spawn
        self._membership: Membership | None = None

    def joined(self, membership: Membership) -> None:
        """Accept records from now on, as this member of the group."""
        self._membership = membership
        self._holding.gate.subscribe(self._share_changed)
        self.wake()

    @property
    def _ready(self) -> bool:
        """Whether it has joined, the stream is ready, and the client's share of the budget is not used up."""
        return self._membership is not None and self._holding.gate.is_open and self._receiver.ready

    @property
    def demand(self) -> int:
        """The number of records that may be offered; 0 if the stream is not ready (`contracts.Subscriber`)."""
        return DEMAND if self._ready else 0

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Deliver or decline a record; False if the stream is not ready (`contracts.Subscriber`)."""
        membership = self._membership
        if membership is None or not self._ready:
            return False
        if self._chosen.matches(record):
            self._receiver.deliver(record)
        else:
            membership.decline(record)
        return True

    def wake(self) -> None:
        """Request records again if the stream is ready."""
        if self._membership is not None and self._ready:
            self._membership.wake()

    def hold(self, size: int, records: int) -> None:
        """Count the client's unsettled records, and their `size` in bytes, in the budget."""
        self._holding.hold(size + records * UNSETTLED_COST)

    def _share_changed(self, is_open: bool) -> None:
        if is_open:
            pauses.end(OUTGOING_BUDGET, self)
            self.wake()
        else:
            pauses.begin(OUTGOING_BUDGET, self, self._receiver.subject)

    def done(self, record: Received) -> None:
        """Settle a delivered record."""
        assert self._membership is not None
        self._membership.done(record)

    def requeue(self, record: Received, *, failed: bool) -> None:
        """Return a delivered record to the group; with `failed` it counts as a failed attempt."""
        assert self._membership is not None
        self._membership.requeue(record, failed=failed)

    def attempts(self, record: Received) -> int:
        """Return how often the record was delivered before."""
        assert self._membership is not None
        return self._membership.attempts(record)

    def leave(self) -> None:
        """Leave the group; unsettled records return to it."""
        membership, self._membership = self._membership, None
        self._holding.hold(0)
        if membership is not None:
            self._holding.gate.unsubscribe(self._share_changed)  # it refers to us: no reference cycle may be left
            self._spawn(membership.leave(failed=False))
