"""Writing down a session's messages: what may be said to the client only after Kafka has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from gateway.kafka.contracts import Owner, Result
from mapping.outcomes import Outcome

log = structlog.get_logger(__name__)

AGAIN_S: Final = 1.0  # after Kafka refused a write

Then = tuple[Callable[[Any], None], Any]
"""What to call, with what, when everything up to now is stored."""


class Journal:
    """Writes of one record that replace each other: at most one is in flight, the next one covers all since.

    A write is made once per loop turn at most, however often it is asked for.
    """

    __slots__ = ("_busy", "_next", "_scheduled", "_sent", "_stopped", "_too_large", "_write", "dirty")

    def __init__(self, write: Callable[[Owner], None], too_large: Callable[[], None]) -> None:
        """`write` submits the record as it is now, with the given owner.

        `too_large` is called when Kafka will never take it as it is: what waits for that write is forgotten, so the
        connection must end, as if it had been lost before.
        """
        self._write = write
        self._too_large = too_large
        self._next: list[Then] = []
        self._sent: list[Then] = []
        self._scheduled = False
        self._busy = False
        self._stopped = False
        self.dirty = False  # something changed that need not be written at once

    @property
    def idle(self) -> bool:
        """Whether everything that was asked for is stored."""
        return not (self._busy or self._scheduled)

    def save(self, then: Then | None = None) -> None:
        """Write the record as it will be at the end of this turn; `then` follows when that is stored."""
        if then is not None:
            self._next.append(then)
        if not self._scheduled and not self._stopped:
            self._scheduled = True
            if not self._busy:
                asyncio.get_running_loop().call_soon(self._begin)

    def stop(self) -> None:
        """The record is not wanted any more: what waits is forgotten, and who wrote it."""
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
        """Kafka answered (contract: `gateway.kafka.contracts.Owner`)."""
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
    """In the place of whoever is gone."""
