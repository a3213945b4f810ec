"""Deadlines of sessions without a connection (expiry, will): the earliest of each session, in one heap."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from gateway.mqtt.registry.wills import due_at
from gateway.mqtt.state.records import NEVER, SessionRecord

STALE: Final = 1000
"""Extra entries of forgotten sessions in the heap, beyond twice the number of deadlines, before it is rebuilt."""


class Deadlines:
    """Deadlines by client id. Only the earliest is kept; when it is due, the caller notes the next one."""

    __slots__ = ("_heap", "_noted")

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._noted: dict[str, int] = {}

    def note(self, client_id: str, at: int) -> None:
        """Have `due` return `client_id` at `at` (epoch milliseconds) or before."""
        noted = self._noted.get(client_id)
        if noted is None or at < noted:
            self._noted[client_id] = at
            heapq.heappush(self._heap, (at, client_id))

    def forget(self, client_id: str) -> None:
        """Drop the deadline of a session that has ended."""
        self._noted.pop(client_id, None)
        if len(self._heap) > 2 * len(self._noted) + STALE:
            self._heap = [(at, noted) for noted, at in self._noted.items()]
            heapq.heapify(self._heap)

    def watch(self, client_id: str, record: SessionRecord) -> None:
        """Note the expiry and the will's due time of a session without a connection."""
        if record.gone_at is None:
            return
        if record.will is not None:
            self.note(client_id, record.will.due or due_at(record.will, record.expiry, record.gone_at))
        if record.expiry != NEVER:
            self.note(client_id, record.gone_at + 1000 * record.expiry)

    def due(self, now: int) -> Iterator[str]:
        """Remove and return the client ids whose deadline has passed."""
        while self._heap and self._heap[0][0] <= now:
            at, client_id = heapq.heappop(self._heap)
            if self._noted.get(client_id) == at:
                del self._noted[client_id]
                yield client_id
