"""Acknowledgements of one turn of the event loop leave together: one write for each connection.

Kafka answers for several partitions at once, and a connection has messages in many of them.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.failures import failures


class Answering(Protocol):
    """A connection that acknowledges what Kafka has answered for."""

    def answer_all(self) -> None:
        """Write the acknowledgements that are due."""

    def broken(self, error: Exception) -> None:
        """Our bug, in `answer_all`: the connection ends."""


class Answers:
    """The connections that have something to acknowledge in this turn; one of these for a process."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Answering] = []

    def add(self, connection: Answering) -> None:
        """Have it answer in a moment; it must not be waiting already."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._answer)
        self._waiting.append(connection)

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            try:
                connection.answer_all()
            except Exception as error:  # our bug, in one session; the others do not pay for it
                failures.tell("session", error)
                failures.guard("session", connection.broken, error)
