"""Limits of clients: connections, logins, and messages and bytes a second in each direction (`limits.rules`).

A rule's limits are shared by the connections of a principal, a tenant or a listener (`per`), or each connection has its
own. A share is kept while connections use it and while it has a debt, up to `REMEMBERED`. Without rules, which is the
default, nothing here is called per message.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Final, Literal, get_args

import msgspec

from flowcontrol.bucket import Bucket, RateLimit
from gateway.limits.brakes import AHEAD_S, OUT_AHEAD_S, Brake, Pace
from gateway.security.identity import Identity
from gateway.settings.config import ConfigError
from gateway.settings.limits import LimitRule, LimitsConfig, Per
from gateway.views.pauses import OUTGOING_RATES, RATES
from telemetry.statistics import counter, gauge

REMEMBERED: Final = 10_000
"""Unused shares that are kept because of their debt, so that a client cannot escape it by reconnecting."""
MOST_DEBT: Final = (10_000, 8 * 1024 * 1024)
"""The largest debt of a share in messages and bytes, by the default settings: what one read or request may carry."""
FULL_RETRY_S: Final = 1
"""Retry time for clients with too many connections: the time when one of them closes is unknown."""
_REASONS: Final = {per: (RATES[number], OUTGOING_RATES[number]) for number, per in enumerate(get_args(Per))}

Kind = Literal["connections", "connects"]
Key = tuple[int, str, str]
"""Identifies a share: the rule's number, the tenant, and the name within it."""


class LimitStatistics(msgspec.Struct, frozen=True):
    """Shares and refusals; waiting clients are counted in `gateway.views.pauses`."""

    shares: Annotated[dict[str, int], gauge("shares of limits that are in memory", "per")]
    refused_connections_total: Annotated[
        dict[str, int], counter("logins refused by the limit of connections, or of connects a second", "limit")
    ]
    refused_total: Annotated[int, counter("requests answered with 429 because the client is above its rate")]
    disconnected_total: Annotated[int, counter("MQTT clients disconnected because they were above their rate")]


class LimitExceeded(Exception):  # noqa: N818 - an answer, not a failure
    """The client may not connect now. The text is for the client."""

    def __init__(self, kind: Kind, per: Per, wait_s: float) -> None:
        what = "connections" if kind == "connections" else "connects a second"
        super().__init__(f"too many {what} of the {per}")
        self.kind = kind
        self.wait_s = wait_s  # seconds until it may try again


class LimitShare:
    """The state of a rule's limits, shared by all clients with the same key or used by one connection."""

    __slots__ = ("_connects", "connections", "incoming", "key", "outgoing", "rule")

    def __init__(
        self, rule: LimitRule, key: Key | None, burst_s: float, clock: Callable[[], float], most_debt: tuple[int, int]
    ) -> None:
        """Start without connections or debts."""
        now = clock()
        reason, outgoing_reason = _REASONS[rule.per]
        self.key = key
        self.connections = 0
        self.rule = rule
        self._connects: Bucket | None = None
        if rule.connects_per_s:
            self._connects = Bucket(rule.connects_per_s, max(1.0, rule.connects_per_s * burst_s), now)
        self.incoming: Brake | None = None
        if rule.in_messages_per_s or rule.in_bytes_per_s:
            limit = RateLimit(rule.in_messages_per_s, rule.in_bytes_per_s, burst_s, now, most_debt)
            self.incoming = Brake(limit, reason, AHEAD_S, clock, disconnects=rule.disconnect)
        self.outgoing: Brake | None = None
        if rule.out_messages_per_s or rule.out_bytes_per_s:
            limit = RateLimit(rule.out_messages_per_s, rule.out_bytes_per_s, burst_s, now, most_debt)
            self.outgoing = Brake(limit, outgoing_reason, OUT_AHEAD_S, clock)

    def check(self, now: float, *, replacing: bool) -> None:
        """Raise LimitExceeded if no more may connect. `replacing`: one of its connections is about to close."""
        rule = self.rule
        if rule.connections and self.connections >= rule.connections + replacing:
            raise LimitExceeded("connections", rule.per, FULL_RETRY_S)
        if self._connects is not None and (wait_s := self._connects.wait_s(now, 1.0)) > 0:
            raise LimitExceeded("connects", rule.per, wait_s)

    def enter(self, now: float) -> None:
        """Count a new connection."""
        self.connections += 1
        if self._connects is not None:
            self._connects.spend(1, now)

    def is_unused(self, now: float) -> bool:
        """Return whether the share is unused and without debt, so that it can be dropped."""
        return (
            not self.connections
            and (self._connects is None or self._connects.level(now) >= self._connects.burst)
            and all(brake is None or brake.limit.is_full(now) for brake in (self.incoming, self.outgoing))
        )


class Limits:
    """The limits of all clients."""

    def __init__(
        self,
        config: LimitsConfig,
        clock: Callable[[], float],
        listeners: Iterable[str],
        most_debt: tuple[int, int] = MOST_DEBT,
    ) -> None:
        """`clock` returns monotonic seconds; `most_debt` is the largest debt of a share, in messages and bytes.

        Raises:
            ConfigError: A rule names none of `listeners`.
        """
        known = set(listeners)
        for number, rule in enumerate(config.rules, 1):
            if rule.listener is not None and rule.listener not in known:
                raise ConfigError(
                    f"limits.rules[{number}].listener: there is no listener {rule.listener!r}; expected one of"
                    f" {', '.join(sorted(known))}"
                )
        self.clock = clock
        # By kind. A rule without any limit counts too: it is an exception to the rules after it.
        by_kind = (
            [numbered for numbered in enumerate(config.rules) if numbered[1].per == per] for per in get_args(Per)
        )
        self._kinds = [rules for rules in by_kind if rules]
        self._burst_s = config.burst_s
        self._most_debt = most_debt
        self._shares: dict[Key, LimitShare] = {}
        self._left: collections.OrderedDict[Key, None] = collections.OrderedDict()  # without connections, oldest first
        self._refused_connections: dict[str, int] = {"connections": 0, "connects": 0}
        self.refused = 0
        self.disconnected = 0

    def enter(
        self, identity: Identity, address: str, listener: str, former: ClientLimits | None = None
    ) -> ClientLimits | None:
        """Count a client that has logged in at a listener. Anonymous clients are identified by `address`.

        `former` are the limits of a connection that closes when this one is admitted. Returns None if there are no
        rules. Raises LimitExceeded if the client may not connect; then nothing was counted.
        """
        if not self._kinds:
            return None
        now = self.clock()
        shares = []
        for rule, key in self.choose(identity, address, listener):
            share = None if key is None else self._shares.get(key)
            shares.append(share or LimitShare(rule, key, self._burst_s, self.clock, self._most_debt))
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

    def choose(self, identity: Identity, address: str, listener: str) -> Iterator[tuple[LimitRule, Key | None]]:
        """Yield the rules for a client at a listener, of each kind the first that matches, and the keys of its shares.

        Anonymous clients are identified by address. A rule per tenant does not apply to clients without a tenant.
        """
        principals = identity.principals
        for rules in self._kinds:
            for number, rule in rules:
                if _is_for(rule, principals, identity.tenant, listener):
                    yield rule, _key(number, rule, identity, address, listener)
                    break

    def leave(self, shares: tuple[LimitShare, ...]) -> None:
        """Count a closed connection. Shares without connections are kept while they have a debt."""
        for share in shares:
            share.connections -= 1
            if share.key is not None and not share.connections:
                self._left[share.key] = None
        now = self.clock()
        while self._left:
            oldest = next(iter(self._left))
            if len(self._left) <= REMEMBERED and not self._shares[oldest].is_unused(now):
                break
            del self._left[oldest], self._shares[oldest]

    def statistics(self) -> LimitStatistics:
        """Return the current counts."""
        self.leave(())
        return LimitStatistics(
            shares=dict(collections.Counter(share.rule.per for share in self._shares.values())),
            refused_connections_total=dict(self._refused_connections),
            refused_total=self.refused,
            disconnected_total=self.disconnected,
        )


class ClientLimits:
    """The limits of one client on one connection, until `leave`."""

    __slots__ = ("_left", "_limits", "identity", "incoming", "outgoing", "shares")

    def __init__(self, limits: Limits, identity: Identity, shares: tuple[LimitShare, ...]) -> None:
        self.identity = identity
        self.shares = shares
        self._limits = limits
        self._left = False
        incoming = tuple(share.incoming for share in shares if share.incoming is not None)
        outgoing = tuple(share.outgoing for share in shares if share.outgoing is not None)
        self.incoming = Pace(incoming, limits.clock) if incoming else None  # for publishing; None: unlimited
        self.outgoing = Pace(outgoing, limits.clock) if outgoing else None  # for receiving

    def leave(self) -> None:
        """Count the connection as closed; only the first call has an effect."""
        if not self._left:
            self._left = True
            self._limits.leave(self.shares)


def _is_for(rule: LimitRule, principals: set[str], tenant: str | None, listener: str) -> bool:
    return (
        rule.principal in principals
        and (rule.listener is None or rule.listener == listener)
        and (rule.tenant is None or rule.tenant == tenant)
        and (rule.per != "tenant" or tenant is not None)
    )


def _key(number: int, rule: LimitRule, identity: Identity, address: str, listener: str) -> Key | None:
    """Return the key of a client's share; None: the connection does not share its limits."""
    if rule.per == "connection":
        return None
    if rule.per == "listener":
        return number, "", listener
    tenant = identity.tenant or ""
    if rule.per == "tenant":
        return number, tenant, ""
    # A leading slash marks an address and a trailing one a login's name, so the two never collide.
    return number, tenant, f"/{address}" if identity.method == "anonymous" else f"{identity.name}/"
