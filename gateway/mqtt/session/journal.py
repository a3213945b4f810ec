"""Writes a session's in-flight record to Kafka, and then sends the packets that had to wait for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from gateway.kafka.contracts import Owner, Result
from mapping.outcomes import Outcome

log = structlog.get_logger(__name__)

AGAIN_S: Final = 1.0  # delay before a refused write is repeated

Callback = tuple[Callable[[Any], None], Any]
"""Callback and argument, called when everything up to now is stored."""


class Journal(Owner):
    """Writes successive versions of one record: at most one is in flight, and the next covers all later changes.

    At most one write is made per event loop iteration.
    """

    __slots__ = ("_busy", "_next", "_scheduled", "_sent", "_stopped", "_too_large", "_write", "dirty")

    def __init__(self, write: Callable[[Owner], None], too_large: Callable[[], None]) -> None:
        """`write` submits the current record with the given owner.

        `too_large` is called when the record exceeds Kafka's limit. The callbacks for that write are dropped, so the
        connection must be closed, as if it had been lost before.
        """
        self._write = write
        self._too_large = too_large
        self._next: list[Callback] = []
        self._sent: list[Callback] = []
        self._scheduled = False
        self._busy = False
        self._stopped = False
        self.dirty = False  # changed, but the write can wait

    @property
    def idle(self) -> bool:
        """Whether every requested write is stored."""
        return not (self._busy or self._scheduled)

    def save(self, then: Callback | None = None) -> None:
        """Write the record at the end of this event loop iteration; `then` is called when it is stored."""
        if then is not None:
            self._next.append(then)
        if not self._scheduled and not self._stopped:
            self._scheduled = True
            if not self._busy:
                asyncio.get_running_loop().call_soon(self._begin)

    def stop(self) -> None:
        """Stop writing, and drop waiting callbacks and the references to the session."""
        self._write, self._too_large = _nothing, _nothing
        self._stopped = True
        self._scheduled = False
        self._next.clear()
        self._sent.clear()

    def _begin(self) -> None:
        if self._scheduled and not self._busy and not self._stopped:
            self._scheduled = False
            self._busy = True
            self.dirty = False
            self._sent, self._next = self._next, []
            self._write(self)

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Take Kafka's result (contract: `gateway.kafka.contracts.Owner`)."""
        self._busy = False
        if self._stopped:
            return
        if result.outcome is Outcome.TOO_LARGE:
            self._sent = []
            self._too_large()
            if self._scheduled:
                self._begin()
            return
        if result.outcome is not Outcome.STORED:
            log.warning("a session's state is not stored, trying again", reason=result.reason)
            self._next = self._sent + self._next
            self._sent = []
            self._scheduled = True
            asyncio.get_running_loop().call_later(AGAIN_S, self._begin)
            return
        done, self._sent = self._sent, []
        if self._scheduled:
            self._begin()
        for action, argument in done:
            action(argument)


def _nothing(*_: object) -> None:
    """Replace the callbacks of a stopped journal."""
