"""How an AMQP connection has ended, for the presence topic."""

from __future__ import annotations

from gateway.views.presence import Ended
from protocols.amqp.outcomes import CONNECTION_FORCED, Error
from protocols.connection import ConnectionFailed

CONNECTION_LOST = Ended("client", text="the connection was lost")
CLOSED_BY_PEER = Ended("client")


def closed_by_us(error: Error, *, stopping: bool) -> Ended:
    """Return the reason for a connection that the gateway has closed."""
    return Ended("drain" if stopping else "server", error.condition, error.description)


def failed(event: ConnectionFailed) -> Ended:
    """Return the reason for a connection that failed: protocol error, idle time-out, or lost without a close."""
    if event.code == CONNECTION_FORCED:
        return CONNECTION_LOST
    return Ended("timeout" if "idle" in event.reason else "server", event.code, event.reason)
