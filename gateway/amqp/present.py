"""How an AMQP connection has ended, for the presence topic."""

from __future__ import annotations

from gateway.presence.records import CLIENT, DRAIN, SERVER, TIMEOUT, Ended
from protocols.amqp.outcomes import CONNECTION_FORCED, Error
from protocols.connection import ConnectionFailed

CONNECTION_LOST = Ended(CLIENT, text="the connection was lost")
CLOSED_BY_PEER = Ended(CLIENT)


def closed_by_us(error: Error, *, stopping: bool) -> Ended:
    """Return the reason for a connection that the gateway has closed."""
    return Ended(DRAIN if stopping else SERVER, error.condition, error.description)


def failed(event: ConnectionFailed) -> Ended:
    """Return the reason for a connection that failed: protocol error, idle time-out, or lost without a close."""
    if event.code == CONNECTION_FORCED:
        return CONNECTION_LOST
    return Ended(TIMEOUT if "idle" in event.reason else SERVER, event.code, event.reason)
