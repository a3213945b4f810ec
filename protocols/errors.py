"""Errors of the peer and of our own code, and how much of the conversation an error ends."""

from __future__ import annotations

import enum


class Scope(enum.IntEnum):
    """The smallest part of the conversation that must be closed for an error."""

    DELIVERY = 1
    LINK = 2
    SESSION = 3
    CONNECTION = 4


class PeerError(Exception):
    """The peer violated its protocol. Never leaves a sans-io connection, which turns it into a close and an event."""

    def __init__(self, code: int | str, reason: str, scope: Scope = Scope.CONNECTION) -> None:
        super().__init__(code, reason, scope)
        self.code = code  # what goes on the wire: an MQTT reason code or an AMQP error condition
        self.reason = reason  # one line for the peer and the log, without payloads and secrets
        self.scope = scope  # what must be closed

    def __str__(self) -> str:
        code = f"0x{self.code:02X}" if isinstance(self.code, int) else self.code
        return f"{code}: {self.reason}"


class UsageError(Exception):
    """Our own code misused the protocol layer; a bug, never sent to a peer."""
