"""Limit concurrent work in total and per client, so that no client can take all places."""

from __future__ import annotations

import enum
from typing import Final

LEAST_SHARE: Final = 16


def client_share(limit: int, given: int | None) -> int:
    """Return how many of `limit` places one client may take: as `given`, else a quarter, but at least `LEAST_SHARE`."""
    return min(limit, given or max(LEAST_SHARE, limit // 4))


class AdmissionError(Exception):
    """`leave` was called more often than `enter`. A bug of ours, never the peer's fault."""


class Refusal(enum.Enum):
    """Why a client gets no place."""

    FULL = "all places are in use"
    GREEDY = "the client has used up its places"


class Admission:
    """Counts the places of all clients.

    Invariant: `active` is the sum of the clients' places and at most `limit`; no client has more than
    `limit_per_client`. A client without a place takes no memory.
    """

    __slots__ = ("_clients", "active", "limit", "limit_per_client")

    def __init__(self, limit: int, limit_per_client: int) -> None:
        if limit < 1 or limit_per_client < 1:
            raise ValueError(f"limits must be positive, got {limit} and {limit_per_client} of one client")
        self.limit = limit
        self.limit_per_client = limit_per_client
        self.active = 0  # places in use
        self._clients: dict[str, int] = {}

    def enter(self, client: str) -> Refusal | None:
        """Take a place for a client. Returns None, or why there is none."""
        if self.active >= self.limit:
            return Refusal.FULL
        taken = self._clients.get(client, 0)
        if taken >= self.limit_per_client:
            return Refusal.GREEDY
        self._clients[client] = taken + 1
        self.active += 1
        return None

    def leave(self, client: str) -> None:
        """Give a client's place back.

        Raises:
            AdmissionError: the client has none; nothing changes.
        """
        taken = self._clients.get(client, 0)
        if not taken:
            raise AdmissionError(f"{client} has no place to give back")
        if taken > 1:
            self._clients[client] = taken - 1
        else:
            del self._clients[client]
        self.active -= 1

    @property
    def clients(self) -> int:
        """Number of clients that have a place."""
        return len(self._clients)
