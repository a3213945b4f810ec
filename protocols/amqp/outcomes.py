"""Delivery states (AMQP 1.0 part 3.4) and error conditions (part 2.8.15-18)."""

from __future__ import annotations

from typing import Final

import msgspec

# amqp-error (part 2.8.15)
INTERNAL_ERROR: Final = "amqp:internal-error"
NOT_FOUND: Final = "amqp:not-found"
UNAUTHORIZED_ACCESS: Final = "amqp:unauthorized-access"
DECODE_ERROR: Final = "amqp:decode-error"
RESOURCE_LIMIT_EXCEEDED: Final = "amqp:resource-limit-exceeded"
NOT_ALLOWED: Final = "amqp:not-allowed"
INVALID_FIELD: Final = "amqp:invalid-field"
NOT_IMPLEMENTED: Final = "amqp:not-implemented"
PRECONDITION_FAILED: Final = "amqp:precondition-failed"
RESOURCE_DELETED: Final = "amqp:resource-deleted"
ILLEGAL_STATE: Final = "amqp:illegal-state"
FRAME_SIZE_TOO_SMALL: Final = "amqp:frame-size-too-small"
# connection-error (part 2.8.16)
CONNECTION_FORCED: Final = "amqp:connection:forced"
CONNECTION_REDIRECT: Final = "amqp:connection:redirect"
FRAMING_ERROR: Final = "amqp:connection:framing-error"
# session-error (part 2.8.17)
WINDOW_VIOLATION: Final = "amqp:session:window-violation"
# link-error (part 2.8.18)
TRANSFER_LIMIT_EXCEEDED: Final = "amqp:link:transfer-limit-exceeded"
MESSAGE_SIZE_EXCEEDED: Final = "amqp:link:message-size-exceeded"
STOLEN: Final = "amqp:link:stolen"

# Descriptors of the delivery states (part 3.4); proton uses the same numbers.
ACCEPTED: Final = 0x24
REJECTED: Final = 0x25
RELEASED: Final = 0x26
MODIFIED: Final = 0x27
TERMINAL: Final = frozenset({ACCEPTED, REJECTED, RELEASED, MODIFIED})


class Error(msgspec.Struct, frozen=True, gc=False):
    """An AMQP error (part 2.8.14): a condition and a human-readable description."""

    condition: str
    description: str = ""
    info: tuple[tuple[str, str | int], ...] = ()  # symbol keys with their values; only in errors that we send


class DeliveryState(msgspec.Struct, frozen=True, gc=False):
    """A terminal delivery state."""

    code: int  # its descriptor, such as `ACCEPTED`; 0 means settled without a state
    error: Error | None = None  # only of `REJECTED`
    delivery_failed: bool = False  # only of `MODIFIED`: counts as a failed attempt
    undeliverable_here: bool = False  # only of `MODIFIED`: do not send it to this link again


STATE_ACCEPTED: Final = DeliveryState(ACCEPTED)
STATE_RELEASED: Final = DeliveryState(RELEASED)
STATE_FAILED: Final = DeliveryState(MODIFIED, delivery_failed=True)


def rejected(condition: str, description: str) -> DeliveryState:
    """Return a `rejected` state with this error."""
    return DeliveryState(REJECTED, error=Error(condition, description))
