"""Limits the requests in work, altogether (503) and of one client (429), so that no client can take them all."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from aiohttp import web

from gateway.security.identity import ANONYMOUS, Identity
from gateway.statistics import counter, gauge
from protocols.rest.errors import busy, too_many

_FULL: Final = "The gateway has too many requests in work; try again"
_GREEDY: Final = "You have too many requests in work; wait for some of their answers"


class ConcurrencyStatistics(msgspec.Struct):
    """Requests in work now, and requests refused by the two limits since the start."""

    active: Annotated[int, gauge("requests in work, waiting polls among them")] = 0
    clients: Annotated[int, gauge("clients that have any")] = 0
    refused_total: Annotated[int, counter("requests refused because there are too many")] = 0
    refused_clients_total: Annotated[int, counter("requests refused because their client has too many")] = 0


class ConcurrencyLimit:
    """Counts requests from the client's login to the end of the operation, waiting polls too.

    Streams do not count: their operation ends when the stream has begun.
    """

    def __init__(self, limit: int, limit_per_client: int) -> None:
        """Allow at most `limit` requests at once, and `limit_per_client` of one client."""
        self._limit = limit
        self._limit_per_client = limit_per_client
        self._counts = ConcurrencyStatistics()
        self._clients: dict[str, int] = {}

    def enter(self, request: web.BaseRequest, identity: Identity) -> str:
        """Count a request in.

        Returns:
            The client, for `leave`: its login's name, or the address of an anonymous client.

        Raises:
            RestError: 503, or 429 where it is this client's own doing; nothing was counted.
        """
        if self._counts.active >= self._limit:
            self._counts.refused_total += 1
            raise busy(_FULL, close=True)
        client = identity.name
        if identity is ANONYMOUS or identity == ANONYMOUS:
            client = f"/{request.remote}"  # no login's name: those have no limit on letters
        active = self._clients.get(client, 0)
        if active >= self._limit_per_client:
            self._counts.refused_clients_total += 1
            raise too_many(_GREEDY)
        self._clients[client] = active + 1
        self._counts.active += 1
        return client

    def leave(self, client: str) -> None:
        """Count a request out."""
        active = self._clients[client] - 1
        if active:
            self._clients[client] = active
        else:
            del self._clients[client]
        self._counts.active -= 1

    def statistics(self) -> ConcurrencyStatistics:
        """Counts so far."""
        return msgspec.structs.replace(self._counts, clients=len(self._clients))
