"""A stream as a member of a consumer group: a subscriber of the group's shared reader (`gateway.kafka.groups`)."""

from __future__ import annotations

from typing import Final, Protocol

from flowcontrol.budget import ReceiverBudget
from gateway.kafka.contracts import Subscriber
from gateway.kafka.groups.membership import Membership, OffsetReset
from gateway.rest.services import RestServices
from gateway.security.rights.authorization import Grant
from gateway.views.pauses import OUTGOING_BUDGET, pauses
from mapping.record import Received
from mapping.rest.outgoing import RecordFilter
from protocols.rest.positions import BEGINNING

DEMAND: Final = 100  # of a stream that is ready; it refuses records when it is not
UNSETTLED_COST: Final = 512  # memory of an unsettled delivery in addition to its sent bytes


class GroupReceiver(Protocol):
    """The stream."""

    @property
    def ready(self) -> bool:
        """Whether one more record can be sent."""

    def deliver(self, record: Received) -> None:
        """Send a record; it is settled later, through the `membership`."""

    @property
    def subject(self) -> str:
        """The subject under which pauses of its connection are reported."""


class GroupSubscriber(Subscriber):
    """A group's subscriber that delivers to one stream. It accepts no records before it has joined."""

    position: Final = ""  # none: a group continues at its committed offsets

    def __init__(self, receiver: GroupReceiver, chosen: RecordFilter, services: RestServices) -> None:
        """Deliver the `chosen` records to `receiver`, and decline the others.

        Another member gets a declined record; if no member wants it, it is settled.
        """
        self._holding = ReceiverBudget(services.publisher.budgets.outgoing)
        self._receiver = receiver
        self._chosen = chosen
        self._services = services
        self._joined = False
        self.membership: Membership  # while it has joined; settles the delivered records

    async def join(self, grant: Grant, group: str, topic: str, start: str | None, client: str) -> None:
        """Join the client's group, and accept records from now on.

        A group that has committed nothing starts at the beginning of the topic if `start` is `BEGINNING`, else at its
        end. `client` is counted for the group (`share_of`).

        Raises:
            Refused: As `GroupNames.admit` and `Groups.join`.
        """
        services, group = self._services, grant.names.group(group)
        await services.names.admit(grant, group, topic)
        reset: OffsetReset = "earliest" if start == BEGINNING else "latest"
        self.membership = await services.groups.join(group, [topic], self, offset_reset=reset, client=client)
        self._joined = True
        self._holding.gate.subscribe(self._share_changed)
        self.wake()

    @property
    def _ready(self) -> bool:
        """Whether it has joined, the stream is ready, and the client's share of the budget is not used up."""
        return self._joined and self._holding.gate.is_open and self._receiver.ready

    @property
    def demand(self) -> int:
        """The number of records that may be offered; 0 if the stream is not ready (`contracts.Subscriber`)."""
        return DEMAND if self._ready else 0

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Deliver or decline a record; False if the stream is not ready (`contracts.Subscriber`)."""
        if not self._ready:
            return False
        if self._chosen.matches(record):
            self._receiver.deliver(record)
        else:
            self.membership.decline(record)
        return True

    def wake(self) -> None:
        """Request records again if the stream is ready."""
        if self._ready:
            self.membership.wake()

    def hold(self, size: int, records: int) -> None:
        """Count the client's unsettled records, and their `size` in bytes, in the budget."""
        self._holding.hold(size + records * UNSETTLED_COST)

    def _share_changed(self, is_open: bool) -> None:
        if is_open:
            pauses.end(OUTGOING_BUDGET, self)
            self.wake()
        else:
            pauses.begin(OUTGOING_BUDGET, self, self._receiver.subject)

    def leave(self) -> None:
        """Leave the group; unsettled records return to it."""
        self._holding.hold(0)
        if self._joined:
            self._joined = False
            self._holding.gate.unsubscribe(self._share_changed)  # it refers to us: no reference cycle may be left
            self._services.spawn(self.membership.leave(failed=False))
            del self.membership


def is_refused(grant: Grant, topic: str, group: str | None) -> bool:
    """Whether the client's rights do not allow a stream of this topic, or its share as a member of this group."""
    if group is None:
        return not grant.subscribe.some(topic)
    return not grant.subscribe.whole_topic(topic) or grant.group("read", grant.names.group(group)) is False
