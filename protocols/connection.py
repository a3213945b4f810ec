"""The contract of a sans-io connection: bytes in, events out, bytes out; no socket, no clock, no task.

MQTT and AMQP both fit it, so one pump (`gateway.net.pump`) drives either.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class ConnectionFailed(msgspec.Struct, frozen=True, gc=False):
    """The peer violated the protocol, timed out or disconnected without closing, or we gave up; always the last event.

    The protocol's own close, where it has one, is already in `data_to_send`.
    """

    reason: str  # one line for the log, without payloads and secrets
    code: str  # the protocol's own code (an MQTT reason code such as "0x81", an AMQP condition)


class ConnectionClosed(msgspec.Struct, frozen=True, gc=False):
    """The peer closed in the protocol's way (MQTT DISCONNECT 0x00, AMQP close); always the last event."""

    code: str = ""


class Connection(Protocol):
    """One side of a protocol. It never raises for an error of the peer: an exception from it is our bug.

    The connection reads no clock. The pump calls `tick(now)` (monotonic seconds) once after construction, before each
    `receive_data` and at each `next_deadline`; the connection keeps the last `now`.
    """

    def receive_data(self, data: bytes) -> list[Any]:
        """Parse received bytes, split anywhere, and return their events in order."""

    def receive_eof(self) -> list[Any]:
        """The peer will send no more."""

    def data_to_send(self) -> bytes:
        """Return and remove the bytes to write; b"" when there are none."""

    def next_deadline(self) -> float | None:
        """Return the time by which `tick` must be called, in the clock of `tick`. None means there is no deadline."""

    def tick(self, now: float) -> list[Any]:
        """Advance the time: runs keep-alive, idle time-out and heartbeats."""

    def give_up(self) -> list[Any]:
        """Close with the protocol's internal error, after an error of our own. Returns the last events."""

    @property
    def closing(self) -> bool:
        """Whether the conversation is over: read no more, write `data_to_send`, then close the socket."""
