"""How many may be at work at once: of all, and of one client, so that no client can take every place."""

from __future__ import annotations

import enum


class AdmissionError(Exception):
    """More left than had entered. Our bug, never a peer's."""


class Refusal(enum.Enum):
    """Why somebody is not let in."""

    FULL = "all places are taken"
    GREEDY = "the client has its share of the places"


class Admission:
    """The places, and who has them.

    Invariant: `active` is the sum of what the clients have; it is at most `limit`, and none has more than
    `limit_per_client`. A client that has no place is not remembered.
    """

    __slots__ = ("_clients", "active", "limit", "limit_per_client")

    def __init__(self, limit: int, limit_per_client: int) -> None:
        if limit < 1 or limit_per_client < 1:
            raise ValueError(f"limits must be positive, got {limit} and {limit_per_client} of one client")
        self.limit = limit
        self.limit_per_client = limit_per_client
        self.active = 0  # places that are taken
        self._clients: dict[str, int] = {}

    def enter(self, client: str) -> Refusal | None:
        """Take a place for a client; why there is none, and then nothing was counted."""
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
            AdmissionError: it has none; nothing was counted.
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
        """How many clients have a place."""
        return len(self._clients)
