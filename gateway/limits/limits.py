"""Limits of clients: connections, logins, messages and bytes a second, both ways (`limits.rules`).

A rule's limits are shared by what it is per: the connections of a principal, of a tenant, of a listener; or each
connection has its own. What is shared is remembered while somebody has it, and as long as something is owed, up to a
bound. Without rules, which is the default, nothing here is called for a message.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Annotated, Final, Literal, get_args

import msgspec

from flowcontrol.bucket import Bucket, RateLimit
from gateway.limits.brakes import AHEAD_S, OUT_AHEAD_S, Brake, Pace
from gateway.limits.rules import Key, LimitRules
from gateway.pauses import OUTGOING_RATES, RATES
from gateway.security.identity import Identity
from gateway.settings.limits import LimitRule, LimitsConfig, Per
from gateway.statistics import counter, gauge

REMEMBERED: Final = 10_000
"""Shares that nobody has now and that still owe something: who comes back still owes."""
FULL_RETRY_S: Final = 1
"""Whoever has too many connections is told to come again then; when one of them ends is not known."""
_REASONS: Final = {per: (RATES[number], OUTGOING_RATES[number]) for number, per in enumerate(get_args(Per))}

Kind = Literal["connections", "connects"]


class LimitStatistics(msgspec.Struct, frozen=True):
    """Who is limited; who waits is among the pauses (`gateway.pauses`)."""

    shares: Annotated[dict[str, int], gauge("what has limits in common, as far as it is remembered", "per")]
    refused_connections_total: Annotated[
        dict[str, int], counter("logins refused by limits: of connections at a time, of connects a second", "limit")
    ]
    refused_total: Annotated[int, counter("requests answered 429 because their client owes for messages")]
    disconnected_total: Annotated[int, counter("MQTT clients sent away because they have published too much")]


class LimitExceeded(Exception):  # noqa: N818 - an answer, not an error of anybody
    """A client may not connect now; the text says why, for the client."""

    def __init__(self, kind: Kind, per: Per, wait_s: float) -> None:
        what = "connections" if kind == "connections" else "connects a second"
        super().__init__(f"too many {what} of the {per}")
        self.kind = kind
        self.wait_s = wait_s  # until it may try again


class Share:
    """What all clients of one key of a rule have together, or one connection for itself."""

    __slots__ = ("_connects", "_rule", "connections", "incoming", "key", "outgoing")

    def __init__(self, rule: LimitRule, key: Key | None, burst_s: float, clock: Callable[[], float]) -> None:
        """Nobody has it yet."""
        now = clock()
        reason, outgoing_reason = _REASONS[rule.per]
        self.key = key
        self.connections = 0
        self._rule = rule
        self._connects: Bucket | None = None
        if rule.connects_per_s:
            self._connects = Bucket(rule.connects_per_s, max(1.0, rule.connects_per_s * burst_s), now)
        self.incoming: Brake | None = None
        if rule.in_messages_per_s or rule.in_bytes_per_s:
            limit = RateLimit(rule.in_messages_per_s, rule.in_bytes_per_s, burst_s, now)
            self.incoming = Brake(limit, reason, AHEAD_S, clock, disconnects=rule.disconnect)
        self.outgoing: Brake | None = None
        if rule.out_messages_per_s or rule.out_bytes_per_s:
            limit = RateLimit(rule.out_messages_per_s, rule.out_bytes_per_s, burst_s, now)
            self.outgoing = Brake(limit, outgoing_reason, OUT_AHEAD_S, clock)

    @property
    def per(self) -> Per:
        """Its rule's kind."""
        return self._rule.per

    def check(self, now: float, *, replacing: bool) -> None:
        """Raise LimitExceeded when one more may not connect; `replacing`: one of its connections is about to end."""
        rule = self._rule
        if rule.connections and self.connections >= rule.connections + replacing:
            raise LimitExceeded("connections", rule.per, FULL_RETRY_S)
        if self._connects is not None and (wait_s := self._connects.wait_s(now, 1.0)) > 0:
            raise LimitExceeded("connects", rule.per, wait_s)

    def enter(self, now: float) -> None:
        """One more has connected."""
        self.connections += 1
        if self._connects is not None:
            self._connects.spend(1, now)

    def is_new(self, now: float) -> bool:
        """Whether it is as if it had just been made."""
        return (
            not self.connections
            and (self._connects is None or self._connects.level(now) >= self._connects.burst)
            and all(brake is None or brake.limit.is_full(now) for brake in (self.incoming, self.outgoing))
        )


class Limits:
    """The limits of all clients."""

    def __init__(self, config: LimitsConfig, clock: Callable[[], float], listeners: Iterable[str]) -> None:
        """Nobody is connected. `clock`: seconds, monotonic; `listeners`: the names that rules may have.

        Raises:
            ConfigError: a rule is for another listener.
        """
        self.clock = clock
        self._rules = LimitRules(config.rules, listeners)
        self._burst_s = config.burst_s
        self._shares: dict[Key, Share] = {}
        self._left: collections.OrderedDict[Key, None] = collections.OrderedDict()  # of these, whom nobody has
        self._refused_connections: dict[str, int] = {"connections": 0, "connects": 0}
        self.refused = 0
        self.disconnected = 0

    def enter(
        self, identity: Identity, address: str, listener: str, former: ClientLimits | None = None
    ) -> ClientLimits | None:
        """A client has logged in on a connection that came to a listener; anonymous ones are told by `address`.

        `former`: those of a connection that ends when this one is admitted.

        Returns:
            What holds for it; None: there are no limits at all.

        Raises:
            LimitExceeded: it may not; nothing was counted.
        """
        if not len(self._rules):
            return None
        now = self.clock()
        shares = []
        for rule, key in self._rules.choose(identity, address, listener):
            share = None if key is None else self._shares.get(key)
            shares.append(share or Share(rule, key, self._burst_s, self.clock))
        held = former.shares if former is not None else ()
        try:
            for share in shares:
                share.check(now, replacing=share in held)
        except LimitExceeded as exceeded:
            self._refused_connections[exceeded.kind] += 1
            raise
        for share in shares:
            share.enter(now)
            if share.key is not None:
                self._shares[share.key] = share
                self._left.pop(share.key, None)
        return ClientLimits(self, identity, tuple(shares))

    def leave(self, shares: tuple[Share, ...]) -> None:
        """A connection is gone. What nobody has any more is remembered while it is not as new."""
        for share in shares:
            share.connections -= 1
            if share.key is not None and not share.connections:
                self._left[share.key] = None
        now = self.clock()
        while self._left:
            oldest = next(iter(self._left))
            if len(self._left) <= REMEMBERED and not self._shares[oldest].is_new(now):
                break
            del self._left[oldest], self._shares[oldest]

    def statistics(self) -> LimitStatistics:
        """As of now."""
        self.leave(())
        return LimitStatistics(
            shares=dict(collections.Counter(share.per for share in self._shares.values())),
            refused_connections_total=dict(self._refused_connections),
            refused_total=self.refused,
            disconnected_total=self.disconnected,
        )


class ClientLimits:
    """What holds for one client on one connection, until `leave`."""

    __slots__ = ("_left", "_limits", "identity", "incoming", "outgoing", "shares")

    def __init__(self, limits: Limits, identity: Identity, shares: tuple[Share, ...]) -> None:
        self.identity = identity
        self.shares = shares
        self._limits = limits
        self._left = False
        incoming = tuple(share.incoming for share in shares if share.incoming is not None)
        outgoing = tuple(share.outgoing for share in shares if share.outgoing is not None)
        self.incoming = Pace(incoming, limits.clock) if incoming else None  # what it publishes; None: any amount
        self.outgoing = Pace(outgoing, limits.clock) if outgoing else None  # what it is sent

    def leave(self) -> None:
        """The connection is gone."""
        if not self._left:
            self._left = True
            self._limits.leave(self.shares)
