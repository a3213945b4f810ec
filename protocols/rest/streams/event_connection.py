"""The connection of an endless answer behind its head: chunks out, and nothing of interest in. Sans-io."""

from __future__ import annotations

from typing import Any, Final

from protocols.rest.streams.stream_connection import StreamConnection
from protocols.rest.streams.streaming import LAST_CHUNK, chunk, heartbeat

SILENT: Final = "silent"
"""The only event: no event was sent for a heartbeat's time; `EventConnection.send_heartbeat` is due."""


class EventConnection(StreamConnection):
    """A stream of events after the head of its answer; a `protocols.connection.Connection`."""

    def __init__(self, heartbeat_s: float) -> None:
        super().__init__(heartbeat_s)
        self.total = 0  # bytes sent so far, with those that wait
        self._silent = True  # since the last check

    # protocols.connection.Connection

    def receive_data(self, data: bytes) -> list[Any]:
        """Ignore what the client sends after its request."""
        return []

    def receive_eof(self) -> list[Any]:
        """The client has disconnected."""
        return self.give_up()

    def tick(self, now: float) -> list[Any]:
        """Check at each heartbeat's time whether an event was sent."""
        due = self._next_heartbeat
        if due is not None and now < due:
            return []
        self._next_heartbeat = now + self._heartbeat_s
        silent, self._silent = self._silent, True
        return [SILENT] if silent and due is not None and not self.closing else []

    def give_up(self) -> list[Any]:
        """Send no more, not even the end of the answer: the client sees that it is incomplete."""
        self.closing = True
        return []

    # the session's side

    def send(self, data: bytes) -> None:
        """Send complete chunks; does nothing after the end."""
        if not self.closing:
            self._write(data)
            self.total += len(data)
            self._silent = False

    def send_heartbeat(self, position: str) -> None:
        """Send a comment with the position; the next one follows after the same time."""
        self.send(chunk(heartbeat(position)))
        self._silent = True

    def end(self) -> None:
        """Send the end of the answer."""
        self.send(LAST_CHUNK)
        self.closing = True
