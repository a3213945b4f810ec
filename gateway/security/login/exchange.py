"""The steps of an authentication over several messages: those of MQTT's AUTH or AMQP's SASL frames."""

from __future__ import annotations

import msgspec

from gateway.security.identity import Identity


class Continue(msgspec.Struct, frozen=True, gc=False):
    """Send `data` to the client and call `step` with its answer."""

    data: bytes


class Done(msgspec.Struct, frozen=True, gc=False):
    """The client has authenticated."""

    identity: Identity  # the authenticated client
    data: bytes  # the last message to the client
    expires_ms: int | None = None  # wall clock, epoch milliseconds; None: never


class Failed(msgspec.Struct, frozen=True, gc=False):
    """The client is refused. The reason is only for the log, because it says what was wrong."""

    reason: str  # for the log
    busy: bool = False  # not checked; the client may try again
    challenge: bytes = b""  # states the refusal to the client first, which may answer anything


Step = Continue | Done | Failed


class MessageError(ValueError):
    """The client's message is not valid or requests a feature that is not offered."""
