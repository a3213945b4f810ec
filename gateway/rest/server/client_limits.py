"""The limits of HTTP clients (`gateway.limits`): a connection is that of the client whose request came on it last."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Final

from flowcontrol.bucket import RateLimit
from gateway.flow import subject
from gateway.limits.brakes import Pace
from gateway.limits.limits import LimitExceeded, Limits
from gateway.net.http_server import HttpConnection
from gateway.pauses import pauses
from gateway.security.identity import Identity
from protocols.rest.errors import too_many

_UNITS: Final = ("records", "content-bytes")


class RequestLimits:
    """Counts connections, and refuses requests of who owes for earlier ones."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def enter(self, connection: HttpConnection, identity: Identity) -> None:
        """A request of a known client has come; its first one on a connection counts as its login.

        Raises:
            RestError: 429, its limits let it have no more connections; this one is closed.
        """
        limits = connection.limits
        if limits is not None and (limits.identity is identity or limits.identity == identity):
            return
        connection.leave_limits()
        if connection.transport is None:  # the client has left meanwhile
            return
        try:
            connection.limits = self._limits.enter(identity, connection.address, connection.entrance.name)
        except LimitExceeded as exceeded:
            wait_s = math.ceil(exceeded.wait_s)
            raise too_many(f"{str(exceeded).capitalize()}; try again", wait_s, close=True) from None

    def check_publishing(self, connection: HttpConnection, who: str) -> Pace | None:
        """What limits what a connection publishes; None: nothing. RestError 429: its client owes something."""
        limits = connection.limits
        pace = None if limits is None else limits.incoming
        if pace is not None:
            self._check(pace, who, "published")
        return pace

    def check_reading(self, connection: HttpConnection) -> Pace | None:
        """What limits what a request may be answered; None: nothing. RestError 429: its client owes something."""
        limits = connection.limits
        pace = None if limits is None else limits.outgoing
        if limits is not None and pace is not None:
            self._check(pace, subject("http", limits.identity.name, connection.peer), "read")
        return pace

    def _check(self, pace: Pace, who: str, done: str) -> None:
        wait_s, brake = pace.owed()
        if wait_s > 0:
            self._limits.refused += 1
            again_s = math.ceil(wait_s)
            pauses.begin(brake.reason, who, who)
            asyncio.get_running_loop().call_later(again_s, pauses.end, brake.reason, who)
            message = f"You have {done} more than the {brake.reason} allows; try again"
            raise too_many(message, again_s, _fields(brake.limit, again_s))


def _fields(limit: RateLimit, again_s: int) -> Sequence[tuple[str, str]]:
    """The fields of draft-ietf-httpapi-ratelimit-headers: what is allowed, and that nothing of it is left."""
    policies, states = [], []
    for unit, rate in zip(_UNITS, limit.rates, strict=True):
        if rate:
            window_s = max(1, round(1 / rate))
            policies.append(f'"{unit}";q={max(1, round(rate * window_s))};w={window_s};qu="{unit}"')
            states.append(f'"{unit}";r=0;t={again_s}')
    return ("RateLimit-Policy", ", ".join(policies)), ("RateLimit", ", ".join(states))
