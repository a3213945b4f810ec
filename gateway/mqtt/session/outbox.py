"""A session's two outboxes: what may be dropped (QoS 0) and what may not (QoS 1 and 2)."""

from __future__ import annotations

from typing import Final

from gateway.mqtt.counters import Counters
from gateway.mqtt.routing.router import Match
from gateway.mqtt.session.deliveries import Deliveries
from gateway.pauses import RECEIVE_MAXIMUM
from mapping.record import Received

BATCH: Final = 1000  # demand of an outbox that only the socket bounds


class Outbox:
    """One outbox; the context of a record is how the session's subscriptions match it."""

    __slots__ = ("_counters", "_deliveries", "lossy")

    def __init__(self, deliveries: Deliveries, counters: Counters, *, lossy: bool) -> None:
        self._deliveries = deliveries
        self._counters = counters
        self.lossy = lossy

    @property
    def demand(self) -> int:
        """How many more records would be taken now."""
        if self.lossy:
            return BATCH if self._deliveries.takes_more else 0
        return self._deliveries.capacity

    def lacks(self) -> tuple[str, str] | None:
        """Why there is no demand, and whose it is (`gateway.kafka.contracts.Subscriber`)."""
        client = self._deliveries.client
        return (RECEIVE_MAXIMUM, client.subject) if client is not None and client.takes_more else None

    def offer_nowait(self, record: Received, context: Match | None = None) -> bool:
        """Send the record; False when there is no room. One without a context is caught up on."""
        deliveries = self._deliveries
        if self.lossy:
            if context is not None and deliveries.send_lossy(record, context):
                return True
            self._counters.dropped += 1
            return False
        if not deliveries.capacity:
            return False
        if context is not None:
            deliveries.deliver(record, context)
        else:
            deliveries.deliver_again(record)
        return True
