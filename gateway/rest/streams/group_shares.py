"""A stream's place in a consumer group: a subscriber of the group's shared reader (`gateway.kafka.groups`)."""

from __future__ import annotations

from typing import Final, Protocol

from gateway.kafka.groups.membership import Membership
from mapping.record import Received
from mapping.rest_view import RecordFilter

DEMAND: Final = 100  # of a stream with room: it says itself when there is none left


class Receiver(Protocol):
    """The stream."""

    @property
    def ready(self) -> bool:
        """Whether one more record can be taken."""
        ...

    def deliver(self, record: Received) -> None:
        """Take a record; it is settled later, through the share."""
        ...


class Share:
    """See the module. It takes nothing before it has joined."""

    lossy: Final = False

    def __init__(self, receiver: Receiver, chosen: RecordFilter) -> None:
        """Records that are not chosen are for others in the group, and settled when they are for nobody."""
        self._receiver = receiver
        self._chosen = chosen
        self._membership: Membership | None = None

    def joined(self, membership: Membership) -> None:
        """The group has taken us in."""
        self._membership = membership
        self.wake()

    @property
    def demand(self) -> int:
        """See `contracts.Subscriber`."""
        return DEMAND if self._membership is not None and self._receiver.ready else 0

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """See `contracts.Subscriber`."""
        membership = self._membership
        if membership is None or not self._receiver.ready:
            return False
        if self._chosen.matches(record):
            self._receiver.deliver(record)
        else:
            membership.decline(record)
        return True

    def wake(self) -> None:
        """There may be room again."""
        if self._membership is not None and self._receiver.ready:
            self._membership.wake()

    def done(self, record: Received) -> None:
        """The record is settled."""
        assert self._membership is not None
        self._membership.done(record)

    def again(self, record: Received, *, failed: bool) -> None:
        """The record goes back to the group."""
        assert self._membership is not None
        self._membership.again(record, failed=failed)

    def attempts(self, record: Received) -> int:
        """How often the record was given out before."""
        assert self._membership is not None
        return self._membership.attempts(record)

    async def leave(self) -> None:
        """What is unsettled goes back to the group."""
        membership, self._membership = self._membership, None
        if membership is not None:
            await membership.leave(failed=False)
