"""Limits concurrent requests, in total (503) and per client (429), so that no client can use all of them."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from flowcontrol.admission import Admission, Refusal
from protocols.rest.errors import busy, too_many
from telemetry.statistics import counter, gauge

_FULL: Final = "The gateway has too many requests in progress; try again"
_GREEDY: Final = "You have too many requests in progress; wait for some of their answers"


class ConcurrencyStatistics(msgspec.Struct):
    """Concurrent requests now, and requests refused by the two limits since the start."""

    active: Annotated[int, gauge("requests in progress, including waiting polls")] = 0
    clients: Annotated[int, gauge("clients with requests in progress")] = 0
    refused_total: Annotated[int, counter("requests refused because there are too many")] = 0
    refused_clients_total: Annotated[int, counter("requests refused because their client has too many")] = 0


class ConcurrencyLimit:
    """Counts requests from the client's login to the end of the operation, including waiting polls.

    Streams do not count: their operation ends when the stream has started.
    """

    def __init__(self, limit: int, limit_per_client: int) -> None:
        """Allow at most `limit` concurrent requests, and `limit_per_client` of one client."""
        self._places = Admission(limit, limit_per_client)
        self._counts = ConcurrencyStatistics()

    def enter(self, client: str) -> None:
        """Count a request of a client (`AuthenticatedClient.share`).

        Raises:
            RestError: 503 over the total limit, 429 over the client's; the request is not counted.
        """
        refusal = self._places.enter(client)
        if refusal is None:
            return
        if refusal is Refusal.FULL:
            self._counts.refused_total += 1
            raise busy(_FULL, close=True)
        self._counts.refused_clients_total += 1
        raise too_many(_GREEDY)

    def leave(self, client: str) -> None:
        """Stop counting a request."""
        self._places.leave(client)

    def statistics(self) -> ConcurrencyStatistics:
        """Return the counts so far."""
        places = self._places
        return msgspec.structs.replace(self._counts, active=places.active, clients=places.clients)
