"""Collects the acknowledgements of one event loop iteration into one write for each connection.

Kafka answers for several partitions in one response, and a connection may have messages in many of them.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.failures import failures


class Answering(Protocol):
    """A connection that sends acknowledgements after Kafka's answers."""

    def answer_all(self) -> None:
        """Send the acknowledgements that are due."""

    def broken(self, error: Exception) -> None:
        """End the connection after a bug in `answer_all`."""


class Answers:
    """The connections with acknowledgements to send in this iteration; one instance for the process."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Answering] = []

    def add(self, connection: Answering) -> None:
        """Call the connection's `answer_all` in the next iteration; it must not be waiting already."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._answer)
        self._waiting.append(connection)

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            try:
                connection.answer_all()
            except Exception as error:  # a bug of ours in one session must not affect the others
                failures.report("session", error)
                failures.guard("session", connection.broken, error)
