"""The contract of a sans-io connection: bytes in, events out, bytes out; no socket, no clock, no task.

MQTT and AMQP both fit it, so one pump (`gateway.net.pump`) drives either.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class ConnectionFailed(msgspec.Struct, frozen=True, gc=False):
    """The peer broke the protocol, fell silent, left without closing, or we gave it up; always the last event.

    The protocol's own close, where it has one, is already in `data_to_send`.
    """

    reason: str  # one line for the log, without payloads and secrets
    code: str  # the protocol's own code (an MQTT reason code such as "0x81", an AMQP condition)


class ConnectionClosed(msgspec.Struct, frozen=True, gc=False):
    """The peer closed in the protocol's way (MQTT DISCONNECT 0x00, AMQP close); the last event."""

    code: str = ""


class Connection(Protocol):
    """One side of a protocol. It never raises for a fault of the peer: an exception out of it is our bug.

    Time: the shell calls `tick(now)` (monotonic seconds) once after construction, before each `receive_data`
    and at each `next_deadline`; the connection keeps the last `now` it was told and reads no clock.
    """

    def receive_data(self, data: bytes) -> list[Any]:
        """Take bytes as they came, split anywhere, and return what they mean, in order."""

    def receive_eof(self) -> list[Any]:
        """The peer will send no more."""

    def data_to_send(self) -> bytes:
        """Take the bytes that wait to be written; b"" when there are none."""

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest, in the clock of `tick`; None: no need."""

    def tick(self, now: float) -> list[Any]:
        """Tell the time: keep-alive, idle time-out, heartbeats."""

    def give_up(self) -> list[Any]:
        """Our side cannot go on, by its own fault: say so in the protocol's words and close; the last events."""

    @property
    def closing(self) -> bool:
        """Nothing more is to be read: write what `data_to_send` still gives, then close the socket."""
