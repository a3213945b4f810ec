"""Reporting AMQP connections to the presence topic; several connections may have the same container-id."""

from __future__ import annotations

from collections.abc import Hashable

from gateway.presence.ledger import Present
from gateway.presence.presence import Presence
from gateway.presence.records import AMQP, CLIENT, DRAIN, SERVER, TIMEOUT, Ended
from protocols.amqp.outcomes import CONNECTION_FORCED, Error
from protocols.connection import ConnectionFailed

CONNECTION_LOST = Ended(CLIENT, text="the connection was lost")
CLOSED_BY_PEER = Ended(CLIENT)


def report_online(  # noqa: PLR0917 - a connection's parts
    presence: Presence, connection: Hashable, container_id: str, principal: str, address: str, now: int
) -> None:
    """Report an open connection; `now` is epoch milliseconds."""
    presence.online(
        f"{AMQP}/{container_id}",
        connection,
        Present(client=container_id, principal=principal, protocol=AMQP, address=address, since=now),
    )


def report_offline(presence: Presence, connection: Hashable, container_id: str, ended: Ended) -> None:
    """Report the end of a connection."""
    presence.offline(f"{AMQP}/{container_id}", connection, ended)


def closed_by_us(error: Error, *, stopping: bool) -> Ended:
    """Return the reason for a connection that the gateway has closed."""
    return Ended(DRAIN if stopping else SERVER, error.condition, error.description)


def failed(event: ConnectionFailed) -> Ended:
    """Return the reason for a connection that failed: protocol error, idle time-out, or lost without a close."""
    if event.code == CONNECTION_FORCED:
        return CONNECTION_LOST
    return Ended(TIMEOUT if "idle" in event.reason else SERVER, event.code, event.reason)
