"""The audit trail: one line for each login, each refusal and each administrative action (ADR 0082).

The code that accepts or refuses a client reports it to `gateway.runtime.audited`, which calls this trail; allowed
messages are not reported. Refusals are limited per client, so that a client in a loop does not fill the disk;
suppressed lines are counted and reported as `more`.

No line contains a secret. The name of a refused login is written only if a client has logged in with it before, because
people type passwords into the wrong field.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import msgspec

from gateway.runtime.audited import Where
from gateway.runtime.recent import Recent
from gateway.runtime.secret import Redactor
from gateway.runtime.texts import cut
from gateway.security.throttle import host_of
from telemetry.statistics import counter

VERSION: Final = 1
TEXT: Final = 256  # characters of a text from outside
AT_ONCE: Final = 5  # refusals of one client that are written within `PERIOD_S`
PERIOD_S: Final = 10.0
CLIENTS: Final = 10_000  # clients whose refusals are counted; above this the oldest is flushed
EVERY_S: Final = 1_000  # refusals of all clients that are written within `PERIOD_S`
KNOWN: Final = 10_000  # names that have logged in

Event = Literal["login", "right", "act"]
Result = Literal["accepted", "refused", "busy", "done"]


class AuditEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of the trail (wire format)."""

    v: int  # version of this format: 1
    at: str  # ISO 8601, UTC
    gateway: str  # the gateway's id
    event: Event  # a login, a right, an administrative act
    result: Result  # the result
    protocol: str = ""  # mqtt, amqp, http, management; "" for a signal
    listener: str = ""  # the listener at which the client has connected, by its name
    address: str = ""  # of the client, `host:port`
    client: str = ""  # the client's id
    principal: str = ""  # the authenticated name
    name_digest: str = ""  # instead of a name that has never logged in; equal names have equal digests
    method: str = ""  # anonymous, password, scram, token, certificate
    what: str = ""  # the operation that was refused or performed
    on: str = ""  # its object: a topic, a client, a group
    reason: str = ""  # why it was refused
    more: int = 0  # number of suppressed lines like this one


class AuditStatistics(msgspec.Struct):
    """Counts of lines since the start."""

    lines_total: Annotated[int, counter("lines of the audit trail")] = 0
    left_out_total: Annotated[int, counter("refusals counted but not written because there were too many")] = 0
    dropped_total: Annotated[int, counter("lines lost because the file or Kafka was too slow or failed")] = 0
    write_errors_total: Annotated[int, counter("failed writes to the audit file")] = 0


Sink = Callable[[bytes], bool]
"""Accepts a line without waiting. Returns False if the line is lost."""


def _nothing() -> None:
    """There is no file."""


def _shown(text: str) -> str:
    """Shorten a text from outside and replace lone surrogates."""
    return cut(text, TEXT).encode("utf-8", "replace").decode()


class _Refusals(msgspec.Struct, eq=False):
    """The refusals of one client and event within a period."""

    until: float  # the period's end
    written: int = 0
    left_out: int = 0
    last: dict[str, Any] = {}  # the last one that was left out


class AuditTrail:
    """Formats the lines and passes them to the sinks."""

    def __init__(
        self,
        gateway: str,
        redactor: Redactor,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Write nothing until there are `sinks`.

        `redactor` blanks the configuration's secrets, `clock` returns monotonic and `wall_clock` epoch seconds.
        """
        self.sinks: tuple[Sink, ...] = ()
        self.reopen: Callable[[], None] = _nothing  # at SIGHUP
        self.counts = AuditStatistics()
        self._clock = clock
        self._wall_clock = wall_clock
        self._gateway = gateway
        self._redactor = redactor
        self._secret = secrets.token_bytes(32)
        self._known: Recent[str, None] = Recent(KNOWN)
        self._refusals: OrderedDict[tuple[str, str], _Refusals] = OrderedDict()
        self._recent = 0  # refusals of all clients in the current period
        self._recent_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Write the summaries of suppressed lines and stop."""
        for key in list(self._refusals):
            self._write_summary(self._refusals.pop(key))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.sinks = ()

    # events

    def accepted(self, where: Where, principal: str, method: str) -> None:
        """Record a successful login."""
        self._known[principal] = None
        self._write("login", "accepted", where, principal=principal, method=method)

    def refused(self, where: Where, reason: str, *, name: str = "", busy: bool = False) -> None:
        """Record a refused login. `name` is the claimed name; `busy` means that the login was not checked."""
        facts = {"reason": reason}
        if name in self._known:
            facts["principal"] = name
        elif name:
            digest = hmac.digest(self._secret, name.encode("utf-8", "surrogatepass"), hashlib.sha256)
            facts["name_digest"] = digest.hex()[:16]
        self._limited(host_of(where.address), "login", "busy" if busy else "refused", where, facts)

    def denied(self, where: Where, principal: str, what: str, on: str = "", reason: str = "") -> None:
        """Record that a logged-in client was refused an operation."""
        facts = {"principal": principal, "what": what, "on": on, "reason": reason}
        self._limited(where.client or host_of(where.address) or principal, "right", "refused", where, facts)

    def act(self, where: Where, principal: str, what: str, on: str = "") -> None:
        """Record an administrative action. `principal` is "" for an action from this machine without a login."""
        self._write("act", "done", where, principal=principal, what=what, on=on)

    # inside

    def _limited(self, client: str, event: Event, result: Result, where: Where, facts: dict[str, str]) -> None:
        """Write a refusal, or only count it if there are too many. What is kept of it is short."""
        facts = {name: _shown(text) for name, text in facts.items()}
        client, where = _shown(client), msgspec.structs.replace(where, client=_shown(where.client))
        now = self._clock()
        if now >= self._recent_until:
            self._recent, self._recent_until = 0, now + PERIOD_S
        key = (f"{where.protocol} {client}", event)
        refusals = self._refusals.get(key)
        if refusals is None or now >= refusals.until:
            if refusals is not None:
                self._write_summary(self._refusals.pop(key))
            if len(self._refusals) >= CLIENTS:
                self._write_summary(self._refusals.popitem(last=False)[1])
            refusals = self._refusals[key] = _Refusals(now + PERIOD_S)
            self._arm(refusals.until)
        if refusals.written < AT_ONCE and self._recent < EVERY_S:
            refusals.written += 1
            self._recent += 1
            self._write(event, result, where, **facts)
            return
        refusals.left_out += 1
        self.counts.left_out_total += 1
        refusals.last = {"event": event, "result": result, "where": where, **facts}

    def _arm(self, until: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, until - self._clock()) + 0.1, self._flush)

    def _flush(self) -> None:
        """Write the summaries of suppressed lines whose period is over."""
        self._timer = None
        now = self._clock()
        while self._refusals:
            key, first = next(iter(self._refusals.items()))
            if first.until > now:
                self._arm(first.until)
                return
            del self._refusals[key]
            self._write_summary(first)

    def _write_summary(self, refusals: _Refusals) -> None:
        if refusals.left_out:
            self._write(**refusals.last, more=refusals.left_out)

    def _write(self, event: Event, result: Result, where: Where, **facts: Any) -> None:
        where = msgspec.structs.replace(where, client=_shown(where.client))
        facts = {name: _shown(value) if isinstance(value, str) else value for name, value in facts.items()}
        entry = AuditEntry(
            v=VERSION,
            at=datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(timespec="milliseconds"),
            gateway=self._gateway,
            event=event,
            result=result,
            **msgspec.structs.asdict(where),
            **facts,
        )
        line = self._redactor.clean(msgspec.json.encode(entry).decode()).encode()
        self.counts.lines_total += 1
        for sink in self.sinks:
            if not sink(line):
                self.counts.dropped_total += 1

    def statistics(self) -> AuditStatistics:
        """Return the current counts."""
        return self.counts
