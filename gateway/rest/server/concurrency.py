"""Requests in work, altogether and by client: nobody can take all there is."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from aiohttp import web

from gateway.security.identity import ANONYMOUS, Identity
from gateway.statistics import counter, gauge
from protocols.rest.errors import busy, too_many

_FULL: Final = "The gateway has too many requests in work; try again"
_GREEDY: Final = "You have too many requests in work; wait for some of their answers"


class LoadStatistics(msgspec.Struct, frozen=True):
    """How full it is, and how many requests were refused for it since the start."""

    active: Annotated[int, gauge("requests in work, waiting polls among them")]
    clients: Annotated[int, gauge("clients that have any")]
    refused_total: Annotated[int, counter("requests refused because there are too many")]
    refused_clients_total: Annotated[int, counter("requests refused because their client has too many")]


class Load:
    """Counts requests from their admission to the end of their operation; waiting polls too, given-away streams not."""

    def __init__(self, limit: int, limit_per_client: int) -> None:
        """At most `limit` requests at once, and `limit_per_client` of one client."""
        self._limit = limit
        self._limit_per_client = limit_per_client
        self._active = 0
        self._clients: dict[str, int] = {}
        self._refused = 0
        self._refused_clients = 0

    def enter(self, request: web.BaseRequest, identity: Identity) -> str:
        """Count a request in.

        Returns:
            The client, for `leave`: its login's name; of who has none, the address that it comes from.

        Raises:
            RestError: 503, or 429 where it is this client's own doing; nothing was counted.
        """
        if self._active >= self._limit:
            self._refused += 1
            raise busy(_FULL, close=True)
        client = identity.name
        if identity is ANONYMOUS or identity == ANONYMOUS:
            client = f"/{request.remote}"  # no login's name: those have no limit on letters
        active = self._clients.get(client, 0)
        if active >= self._limit_per_client:
            self._refused_clients += 1
            raise too_many(_GREEDY)
        self._clients[client] = active + 1
        self._active += 1
        return client

    def leave(self, client: str) -> None:
        """Count a request out."""
        active = self._clients[client] - 1
        if active:
            self._clients[client] = active
        else:
            del self._clients[client]
        self._active -= 1

    def statistics(self) -> LoadStatistics:
        """Counts so far."""
        return LoadStatistics(
            active=self._active,
            clients=len(self._clients),
            refused_total=self._refused,
            refused_clients_total=self._refused_clients,
        )
