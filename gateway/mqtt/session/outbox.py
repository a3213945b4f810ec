"""A session's two outlets: what may be dropped (QoS 0) and what may not (QoS 1 and 2)."""

from __future__ import annotations

from typing import Final

from gateway.mqtt.counters import Counters
from gateway.mqtt.routing.router import Match
from gateway.mqtt.session.deliveries import Deliveries
from mapping.record import Received

BATCH: Final = 1000  # demand of an outlet that only the socket bounds


class Outbox:
    """One outlet. `noted` is what the router found for the record it is about to offer."""

    __slots__ = ("_counters", "_deliveries", "lossy", "noted")

    def __init__(self, deliveries: Deliveries, counters: Counters, *, lossy: bool) -> None:
        self._deliveries = deliveries
        self._counters = counters
        self.lossy = lossy
        self.noted: tuple[Received, Match] | None = None

    @property
    def demand(self) -> int:
        """How many more records would be taken now."""
        if self.lossy:
            return BATCH if self._deliveries.takes_more else 0
        return self._deliveries.room

    def offer_nowait(self, record: Received) -> bool:
        """Send the record; False when there is no room. One that the router has not noted is caught up on."""
        noted = self.noted
        if self.lossy and noted is not None and noted[0] is record:
            if self._deliveries.send_lossy(record, noted[1]):
                return True
            self._counters.dropped += 1
            return False
        if not (self._deliveries.takes_more if self.lossy else self._deliveries.room):
            self._counters.dropped += self.lossy
            return False
        if noted is not None and noted[0] is record:
            self._deliveries.deliver(record, noted[1])
        else:
            self._deliveries.deliver_again(record)
        return True
