"""Limits of how much clients publish a second: of each connection, and of each principal on all its connections.

What was read is taken. Who owes something for it (`flowcontrol.bucket`) waits until it is paid: its socket is not read
(MQTT, uploads), it gets no credit (AMQP), its next request is answered 429 (HTTP). Nothing is lost for it, nobody is
disconnected; without limits, which is the default, nothing here is called for a message.
"""

from __future__ import annotations

import asyncio
import collections
import weakref
from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from flowcontrol.bucket import RateLimit
from gateway.pauses import CONNECTION_RATE, PRINCIPAL_RATE, RATES, pauses
from gateway.security.identity import Identity
from gateway.settings.kafka import LimitsConfig
from gateway.statistics import counter, gauge

REMEMBERED: Final = 10_000
"""Principals whose limits are kept while they have no connection: who comes back still owes."""
AHEAD_S: Final = 0.05
"""Credit is granted for what comes in so many seconds at least, and not message by message."""


class RateStatistics(msgspec.Struct, frozen=True):
    """Who is limited; who waits is among the pauses (`gateway.pauses`)."""

    principals: Annotated[int, gauge("principals whose rates are limited, as far as they are remembered")]
    refused_total: Annotated[int, counter("requests answered 429 because their client owes for what it has published")]


class Rates:
    """The limits of all who publish."""

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float]) -> None:
        """Nobody has published anything. `clock`: seconds, monotonic."""
        self._limits = limits
        self._clock = clock
        self._refused = 0
        self._principals: weakref.WeakValueDictionary[str, RateLimit] = weakref.WeakValueDictionary()
        self._recent: collections.OrderedDict[str, RateLimit] = collections.OrderedDict()
        self._of_connections = bool(limits.connection_messages_per_s or limits.connection_bytes_per_s)
        self._of_principals = bool(limits.principal_messages_per_s or limits.principal_bytes_per_s)

    @property
    def are_set(self) -> bool:
        """Whether there are any limits."""
        return self._of_connections or self._of_principals

    def connection(self) -> RateLimit | None:
        """The limit of a new connection; None: there is none."""
        limits = self._limits
        if not self._of_connections:
            return None
        return self._limit(limits.connection_messages_per_s, limits.connection_bytes_per_s)

    def sender(self, identity: Identity, address: str, connection: RateLimit | None) -> Rate | None:
        """The limits of a client on a connection; None: there are none. Anonymous clients are told by `address`."""
        limits = [] if connection is None else [(CONNECTION_RATE, connection)]
        if self._of_principals:
            # Many names of logins have a slash, but none of an anonymous client is in front of it.
            name = f"/{address}" if identity.method == "anonymous" else f"{identity.name}/"
            limits.append((PRINCIPAL_RATE, self._principal(name)))
        return Rate(limits, self._clock) if limits else None

    def refuse(self, wait_s: float, reason: str, subject: str) -> None:
        """A request is refused, which may come again in `wait_s` seconds: so long its client is paused."""
        self._refused += 1
        pauses.begin(reason, subject, subject)
        asyncio.get_running_loop().call_later(wait_s, pauses.end, reason, subject)

    def _principal(self, name: str) -> RateLimit:
        limit = self._principals.get(name)
        if limit is None:
            limit = self._limit(self._limits.principal_messages_per_s, self._limits.principal_bytes_per_s)
            self._principals[name] = limit
        self._recent[name] = limit
        self._recent.move_to_end(name)
        if len(self._recent) > REMEMBERED:
            self._recent.popitem(last=False)
        return limit

    def _limit(self, messages_per_s: float, bytes_per_s: float) -> RateLimit:
        return RateLimit(messages_per_s, bytes_per_s, self._limits.burst_s, self._clock())

    def statistics(self) -> RateStatistics:
        """As of now."""
        return RateStatistics(principals=len(self._principals), refused_total=self._refused)


class Rate:
    """What one client on one connection is limited by: the connection's limit, its principal's, or both."""

    __slots__ = ("_clock", "_limits")

    def __init__(self, limits: list[tuple[str, RateLimit]], clock: Callable[[], float]) -> None:
        """Limits, each with its reason among those of `gateway.pauses`."""
        self._limits = limits
        self._clock = clock

    def spend(self, messages: int, size: int) -> None:
        """Messages came, of `size` bytes together."""
        now = self._clock()
        for _, limit in self._limits:
            limit.spend(messages, size, now)

    def grant(self, most: int, mean: float) -> int:
        """How many messages of some `mean` bytes may come now, at most `most`. They count as if they had come.

        Their bytes do not: `spend` these.
        """
        now = self._clock()
        for _, limit in self._limits:
            most = limit.affordable(most, mean, now)
        if most:
            self.spend(most, 0)
        return most

    def give_back(self, messages: int) -> None:
        """So many of those that were granted will not come."""
        now = self._clock()
        for _, limit in self._limits:
            limit.give_back(messages, now)

    def wait(self, ahead_s: float = 0.0, mean: float = 0.0) -> tuple[float, str]:
        """See `RateLimit.wait_s`: the longest wait of the limits, and the reason that it has."""
        now = self._clock()
        return max([(limit.wait_s(now, ahead_s, mean), reason) for reason, limit in self._limits])


class ReadingPause:
    """Pauses the reading of one connection while its client owes something for what was read."""

    __slots__ = ("_pause", "_rate", "_resume", "_timer")

    def __init__(self, rate: Rate, pause: Callable[[str], None], resume: Callable[..., None]) -> None:
        """`pause` is called with a reason, `resume` with those that hold no more."""
        self._rate = rate
        self._pause = pause
        self._resume = resume
        self._timer: asyncio.TimerHandle | None = None

    def spend(self, messages: int, size: int) -> None:
        """Messages were read, of `size` bytes together."""
        self._rate.spend(messages, size)
        if self._timer is None:
            self._look(paused=False)

    def _look(self, *, paused: bool = True) -> None:
        self._timer = None
        wait_s, reason = self._rate.wait()
        if wait_s > 0:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)
            self._pause(reason)
            self._resume(*[other for other in RATES if other != reason])
        elif paused:
            self._resume(*RATES)

    def end(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class CreditPause:
    """The links of one connection that get no credit while its client owes something."""

    __slots__ = ("_subject", "_timer", "_waiting", "rate")

    def __init__(self, rate: Rate, subject: str) -> None:
        """Nobody waits; `subject`: what the connection's pauses are told of."""
        self.rate = rate
        self._subject = subject
        self._waiting: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def grant(self, most: int, mean: float, again: Callable[[], None]) -> int:
        """How much credit may be granted now, at most `most`; `again` is called when there may be more."""
        found = self.rate.grant(most, mean)
        if not found:
            self._waiting[again] = None
            if self._timer is None:
                self._wait(mean)
        return found

    def _wait(self, mean: float) -> None:
        wait_s, reason = self.rate.wait(AHEAD_S, mean)
        pauses.begin(reason, self, self._subject)
        for other in RATES:
            if other != reason:
                pauses.end(other, self)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._over)

    def _over(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        for again in waiting:
            again()
        if not self._waiting:
            pauses.end_all(self, *RATES)

    def forget(self, again: Callable[[], None], credit: int) -> None:
        """A link is gone, with credit that it has not used."""
        self._waiting.pop(again, None)
        self.rate.give_back(credit)

    def end(self) -> None:
        """The connection is gone."""
        pauses.end_all(self, *RATES)
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
