"""Errors of the peer and of our own code."""

from __future__ import annotations


class PeerError(Exception):
    """The peer violated its protocol. Never leaves a sans-io connection, which turns it into a close and an event."""

    def __init__(self, code: int | str, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code  # what goes on the wire: an MQTT reason code or an AMQP error condition
        self.reason = reason  # one line for the peer and the log, without payloads and secrets

    def __str__(self) -> str:
        code = f"0x{self.code:02X}" if isinstance(self.code, int) else self.code
        return f"{code}: {self.reason}"


class UsageError(Exception):
    """Our own code misused the protocol layer; a bug, never sent to a peer."""
