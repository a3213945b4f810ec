"""When something is to be done for sessions without a connection: the earliest time of each, in one heap."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class Deadlines:
    """Times by client id. A later time than the one that is noted is not noted: who is called asks what is next."""

    __slots__ = ("_heap", "_noted")

    def __init__(self) -> None:
        """Nothing is noted."""
        self._heap: list[tuple[int, str]] = []
        self._noted: dict[str, int] = {}

    def __len__(self) -> int:
        """Entries, those that were moved forward included."""
        return len(self._heap)

    def note(self, client_id: str, at: int) -> None:
        """Call `client_id` at `at`, epoch milliseconds, or before."""
        noted = self._noted.get(client_id)
        if noted is None or at < noted:
            self._noted[client_id] = at
            heapq.heappush(self._heap, (at, client_id))

    def due(self, now: int) -> Iterator[str]:
        """Take out the client ids whose time has come."""
        while self._heap and self._heap[0][0] <= now:
            at, client_id = heapq.heappop(self._heap)
            if self._noted.get(client_id) == at:
                del self._noted[client_id]
                yield client_id
