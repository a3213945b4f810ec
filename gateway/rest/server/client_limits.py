"""The limits of HTTP clients (`gateway.limits`). A connection counts for the client that sent its latest request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Final

from flowcontrol.bucket import RateLimit
from gateway.limits.brakes import Pace
from gateway.limits.limits import LimitExceeded, Limits
from gateway.net.http.http_requests import AuthenticatedClient
from gateway.net.http.http_server import HttpConnection
from gateway.rest.server.audited import audit_login
from gateway.security.identity import Identity
from gateway.views.flow import subject
from gateway.views.pauses import pauses
from protocols.rest.errors import too_many

PAUSE_S: Final = 60
"""The longest pause that a refusal is shown as: clients that connect for each request have one on each connection."""
_UNITS: Final = ("records", "content-bytes")


class RequestLimits:
    """Counts connections, and refuses requests of clients that are over their rates."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def enter(self, connection: HttpConnection, client: AuthenticatedClient) -> None:
        """Admit a client that the connection's last request did not come from; this counts as a login.

        Raises:
            RestError: 429 when its limits allow no more connections; this one is closed.
        """
        if connection.client is client:
            return
        identity = client.grant.identity
        audit_login(connection, identity)
        self._enter(connection, identity)
        connection.client = client

    def _enter(self, connection: HttpConnection, identity: Identity) -> None:
        if connection.limits is not None and connection.limits.identity == identity:
            return
        connection.leave_limits()
        if connection.transport is None:  # the client has disconnected meanwhile
            return
        try:
            connection.limits = self._limits.enter(identity, connection.address, connection.entrance.name)
        except LimitExceeded as exceeded:
            wait_s = math.ceil(exceeded.wait_s)
            raise too_many(f"{str(exceeded).capitalize()}; try again", wait_s, close=True) from None

    def check_publishing(self, connection: HttpConnection, label: str) -> Pace | None:
        """Return the limits for publishing, None if there are none; RestError 429 if the client is over its rate."""
        limits = connection.limits
        pace = None if limits is None else limits.incoming
        if pace is not None:
            self.check_published(pace, label)
        return pace

    def check_published(self, pace: Pace, label: str) -> None:
        """Raise RestError 429 if the client is over its rate for publishing."""
        self._check(pace, label, "published")

    def check_reading(self, connection: HttpConnection) -> Pace | None:
        """Return the limits for reading, None if there are none; RestError 429 if the client is over its rate."""
        limits = connection.limits
        pace = None if limits is None else limits.outgoing
        if limits is not None and pace is not None:
            self._check(pace, subject("http", limits.identity.name, connection.peer), "read")
        return pace

    def _check(self, pace: Pace, label: str, done: str) -> None:
        wait_s, brake = pace.owed()
        if wait_s > 0:
            self._limits.refused += 1
            again_s = math.ceil(wait_s)
            if pauses.since(brake.reason, label) is None:  # one timer, however often the client tries
                pauses.begin(brake.reason, label, label)
                asyncio.get_running_loop().call_later(min(again_s, PAUSE_S), pauses.end, brake.reason, label)
            message = f"You have {done} more than the {brake.reason} allows; try again"
            raise too_many(message, again_s, _fields(brake.limit, again_s))


def _fields(limit: RateLimit, again_s: int) -> Sequence[tuple[str, str]]:
    """Return the fields of draft-ietf-httpapi-ratelimit-headers: the rate limit, and that nothing of it is left."""
    policies, states = [], []
    for unit, rate in zip(_UNITS, limit.rates, strict=True):
        if rate:
            window_s = max(1, round(1 / rate))
            policies.append(f'"{unit}";q={max(1, round(rate * window_s))};w={window_s};qu="{unit}"')
            states.append(f'"{unit}";r=0;t={again_s}')
    return ("RateLimit-Policy", ", ".join(policies)), ("RateLimit", ", ".join(states))
