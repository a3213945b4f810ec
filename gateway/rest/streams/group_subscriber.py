"""A stream as a member of a consumer group: a subscriber of the group's shared reader (`gateway.kafka.groups`)."""

from __future__ import annotations

from typing import Final, Protocol

from flowcontrol.budget import Budget, Holding
from gateway.kafka.groups.membership import Membership
from gateway.pauses import OUTGOING_BUDGET, pauses
from gateway.spawn import Spawn
from mapping.record import Received
from mapping.rest.outgoing import RecordFilter

DEMAND: Final = 100  # of a stream that is ready: it says itself when it is not
UNSETTLED_COST: Final = 512  # bytes of a delivery beside what was sent, until it is settled


class Receiver(Protocol):
    """The stream."""

    @property
    def ready(self) -> bool:
        """Whether one more record can be taken."""

    def deliver(self, record: Received) -> None:
        """Take a record; it is settled later, through its `GroupSubscriber`."""

    @property
    def subject(self) -> str:
        """What its connection is called where pauses are told."""


class GroupSubscriber:
    """A group's subscriber that gives its records to one stream; it takes none before it has joined."""

    lossy: Final = False
    position: Final = ""  # the group's committed offsets say where it goes on

    def __init__(self, receiver: Receiver, chosen: RecordFilter, spawn: Spawn, outgoing: Budget) -> None:
        """Give `receiver` the `chosen` records; any other goes to another member, or is settled where none wants it.

        `outgoing`: the budget of all receivers.
        """
        self._holding = Holding(outgoing)
        self._receiver = receiver
        self._chosen = chosen
        self._spawn = spawn
        self._membership: Membership | None = None

    def joined(self, membership: Membership) -> None:
        """Take records from now on, as this member of the group."""
        self._membership = membership
        self._holding.gate.subscribe(self._share_changed)
        self.wake()

    @property
    def _ready(self) -> bool:
        """Whether the stream is, and its client holds no more than its share."""
        return self._membership is not None and self._holding.gate.is_open and self._receiver.ready

    @property
    def demand(self) -> int:
        """How many records may be offered; 0: the stream is not ready (`contracts.Subscriber`)."""
        return DEMAND if self._ready else 0

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Deliver or decline a record; False: the stream is not ready (`contracts.Subscriber`)."""
        membership = self._membership
        if membership is None or not self._ready:
            return False
        if self._chosen.matches(record):
            self._receiver.deliver(record)
        else:
            membership.decline(record)
        return True

    def wake(self) -> None:
        """Ask for records again, if the stream is ready."""
        if self._membership is not None and self._ready:
            self._membership.wake()

    def hold(self, size: int, records: int) -> None:
        """Its client holds so many records, of `size` bytes together."""
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

    def again(self, record: Received, *, failed: bool) -> None:
        """Give a delivered record back to the group; `failed`: it counts as a failed attempt."""
        assert self._membership is not None
        self._membership.again(record, failed=failed)

    def attempts(self, record: Received) -> int:
        """How often the record was delivered before."""
        assert self._membership is not None
        return self._membership.attempts(record)

    def leave(self) -> None:
        """Leave the group; unsettled records go back to it."""
        membership, self._membership = self._membership, None
        self._holding.hold(0)
        if membership is not None:
            self._holding.gate.unsubscribe(self._share_changed)  # which has a way back to us
            self._spawn(membership.leave(failed=False))
