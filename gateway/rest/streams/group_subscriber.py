"""A stream as a member of a consumer group: a subscriber of the group's shared reader (`gateway.kafka.groups`)."""

from __future__ import annotations

from typing import Final, Protocol

from gateway.kafka.groups.membership import Membership
from gateway.spawn import Spawn
from mapping.record import Received
from mapping.rest import RecordFilter

DEMAND: Final = 100  # of a stream that is ready: it says itself when it is not


class Receiver(Protocol):
    """The stream."""

    @property
    def ready(self) -> bool:
        """Whether one more record can be taken."""

    def deliver(self, record: Received) -> None:
        """Take a record; it is settled later, through its `GroupSubscriber`."""


class GroupSubscriber:
    """A group's subscriber that gives its records to one stream; it takes none before it has joined."""

    lossy: Final = False
    position: Final = ""  # the group's committed offsets say where it goes on

    def __init__(self, receiver: Receiver, chosen: RecordFilter, spawn: Spawn) -> None:
        """Give `receiver` the `chosen` records; any other goes to another member, or is settled where none wants it."""
        self._receiver = receiver
        self._chosen = chosen
        self._spawn = spawn
        self._membership: Membership | None = None

    def joined(self, membership: Membership) -> None:
        """Take records from now on, as this member of the group."""
        self._membership = membership
        self.wake()

    @property
    def demand(self) -> int:
        """How many records may be offered; 0: the stream is not ready (`contracts.Subscriber`)."""
        return DEMAND if self._membership is not None and self._receiver.ready else 0

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Deliver or decline a record; False: the stream is not ready (`contracts.Subscriber`)."""
        membership = self._membership
        if membership is None or not self._receiver.ready:
            return False
        if self._chosen.matches(record):
            self._receiver.deliver(record)
        else:
            membership.decline(record)
        return True

    def wake(self) -> None:
        """Ask for records again, if the stream is ready."""
        if self._membership is not None and self._receiver.ready:
            self._membership.wake()

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
        if membership is not None:
            self._spawn(membership.leave(failed=False))
