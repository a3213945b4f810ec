"""A session's two outlets: what may be dropped (QoS 0) and what may not (QoS 1 and 2)."""

from __future__ import annotations

from typing import Final, Protocol

from gateway.mqtt.counters import Counters
from gateway.mqtt.routing.router import Match
from mapping.record import Received

BATCH: Final = 1000  # demand of an outlet that only the socket bounds


class Sender(Protocol):
    """The session as its outlets see it."""

    @property
    def room(self) -> int:
        """Free places in the client's window, 0 while the socket is full."""
        ...

    @property
    def takes_more(self) -> bool:
        """Whether the socket's buffer is below its mark."""
        ...

    def send_lossy(self, record: Received, match: Match) -> bool:
        """Send it at QoS 0; False when there is no room."""
        ...

    def deliver(self, record: Received, match: Match) -> None:
        """Send it; there is room."""
        ...

    def deliver_again(self, record: Received) -> None:
        """A record that is caught up on, which may be for this session, or not; there is room."""
        ...


class Outbox:
    """One outlet. `noted` is what the router found for the record it is about to offer."""

    __slots__ = ("_counters", "_sender", "lossy", "noted")

    def __init__(self, sender: Sender, counters: Counters, *, lossy: bool) -> None:
        self._sender = sender
        self._counters = counters
        self.lossy = lossy
        self.noted: tuple[Received, Match] | None = None

    @property
    def demand(self) -> int:
        """How many more records would be taken now."""
        if self.lossy:
            return BATCH if self._sender.takes_more else 0
        return self._sender.room

    def offer_nowait(self, record: Received) -> bool:
        """Send the record; False when there is no room. One that the router has not noted is caught up on."""
        noted = self.noted
        if self.lossy and noted is not None and noted[0] is record:
            if self._sender.send_lossy(record, noted[1]):
                return True
            self._counters.dropped += 1
            return False
        if not (self._sender.takes_more if self.lossy else self._sender.room):
            self._counters.dropped += self.lossy
            return False
        if noted is not None and noted[0] is record:
            self._sender.deliver(record, noted[1])
        else:
            self._sender.deliver_again(record)
        return True
