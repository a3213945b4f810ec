"""The audit trail: a line for each login, each refusal and each act of an administrator (ADR 0082).

Whoever refuses or admits somebody says so here; nothing is said per message that is allowed. Off, it is a look at
`audit.enabled`. Refusals are limited for each client, so that one that is refused in a loop fills nothing: what is left
out is counted, and told as `more`. There is one `audit` for the process, as there is one log.

No line has a secret. Of a login that was refused the name is told only when somebody has logged in by it before, for
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
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec

from gateway.secret import Redactor
from gateway.security.throttle import host_of
from gateway.statistics import counter

VERSION: Final = 1
TEXT: Final = 256  # characters of a text of somebody else's
AT_ONCE: Final = 5  # refusals of one client within `PERIOD_S` that are told
PERIOD_S: Final = 10.0
CLIENTS: Final = 10_000  # whose refusals are counted; beyond, the one that was first is told
EVERY_S: Final = 1_000  # refusals of all clients that are told within `PERIOD_S`
KNOWN: Final = 10_000  # names that have logged in

Event = Literal["login", "right", "act"]
Result = Literal["accepted", "refused", "busy", "done"]


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line."""

    v: int  # of this form: 1
    at: str  # ISO 8601, UTC
    gateway: str  # the gateway's id
    event: Event  # what it is about
    result: Result  # how it went
    protocol: str = ""  # mqtt, amqp, http, management; "" for a signal
    listener: str = ""  # the listener at which the client has connected, by its name
    address: str = ""  # the client's, `host:port`
    client: str = ""  # its id
    principal: str = ""  # who that is
    name_digest: str = ""  # in its place, of a name that nobody has logged in by: tells equal ones apart
    method: str = ""  # anonymous, password, scram, token, certificate
    what: str = ""  # what was not allowed, or was done
    on: str = ""  # what that was about: a topic, a client, a group
    reason: str = ""  # why not
    more: int = 0  # so many like this were left out before


class AuditStatistics(msgspec.Struct):
    """What became of the lines, since the start."""

    lines_total: Annotated[int, counter("lines of the audit trail")] = 0
    left_out_total: Annotated[int, counter("refusals that were counted and not told, because there were too many")] = 0
    dropped_total: Annotated[int, counter("lines that the file or Kafka did not take in time, or never")] = 0
    write_errors_total: Annotated[int, counter("writes to the audit file that failed")] = 0


class Sink(Protocol):
    """Where lines go."""

    def write(self, line: bytes) -> bool:
        """Take a line, without waiting; False: it is lost."""
        ...


class Where(msgspec.Struct, frozen=True):
    """Whose connection something is about."""

    protocol: str
    address: str = ""
    listener: str = ""
    client: str = ""


def where_of(protocol: str, socket: Any, client: str = "") -> Where:
    """Where a pump's or an HTTP connection's client is."""
    return Where(protocol, socket.peer, socket.entrance.name, client)


def _shown(text: str) -> str:
    """A text of somebody else's, as far as it is told; a half of a surrogate pair is none."""
    short = text if len(text) <= TEXT else text[:TEXT] + "…"
    return short.encode("utf-8", "replace").decode()


class _Refusals:
    """Those of one client and kind within a period."""

    __slots__ = ("last", "left_out", "told", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.told = 0
        self.left_out = 0
        self.last: dict[str, Any] = {}


class Audit:
    """Makes the lines."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """Off; `clock`: seconds, `wall_clock`: epoch seconds."""
        self.enabled = False
        self.counts = AuditStatistics()
        self._clock = clock
        self._wall_clock = wall_clock
        self._sinks: tuple[Sink, ...] = ()
        self._gateway = ""
        self._redactor = Redactor()
        self._secret = b""
        self._known: OrderedDict[str, None] = OrderedDict()
        self._refusals: OrderedDict[tuple[str, str], _Refusals] = OrderedDict()
        self._told = 0  # refusals within the period of all
        self._told_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, gateway: str, sinks: tuple[Sink, ...], redactor: Redactor) -> None:
        """Write from now on; `redactor` blanks the configuration's own secrets."""
        self.counts = AuditStatistics()
        self._gateway, self._sinks, self._redactor = gateway, sinks, redactor
        self._secret = secrets.token_bytes(32)
        self.enabled = bool(sinks)

    def end(self) -> None:
        """Tell what was left out, and write no more."""
        for key in list(self._refusals):
            self._tell_rest(self._refusals.pop(key))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.enabled = False
        self._sinks = ()
        self._known.clear()

    # what is told

    def accepted(self, where: Where, principal: str, method: str) -> None:
        """A client has logged in."""
        if not self.enabled:
            return
        if principal in self._known:
            self._known.move_to_end(principal)
        else:
            self._known[principal] = None
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._write("login", "accepted", where, principal=principal, method=method)

    def refused(self, where: Where, reason: str, *, name: str = "", method: str = "", busy: bool = False) -> None:
        """A login was refused; `name`: who it said it was, `busy`: it was not looked at."""
        if not self.enabled:
            return
        facts: dict[str, Any] = {"reason": reason, "method": method}
        if name in self._known:
            facts["principal"] = name
        elif name:
            digest = hmac.digest(self._secret, name.encode("utf-8", "surrogatepass"), hashlib.sha256)
            facts["name_digest"] = digest.hex()[:16]
        self._limited(host_of(where.address), "login", "busy" if busy else "refused", where, facts)

    def denied(self, where: Where, principal: str, what: str, on: str = "", reason: str = "") -> None:
        """A client that has logged in was refused something."""
        if self.enabled:
            facts = {"principal": principal, "what": what, "on": on, "reason": reason}
            self._limited(where.client or host_of(where.address) or principal, "right", "refused", where, facts)

    def act(self, where: Where, principal: str, what: str, on: str = "") -> None:
        """An administrator has done something; `principal` "": somebody on this machine."""
        if self.enabled:
            self._write("act", "done", where, principal=principal, what=what, on=on)

    # inside

    def _limited(self, whose: str, event: Event, result: Result, where: Where, facts: dict[str, Any]) -> None:
        """Tell a refusal, or count it."""
        now = self._clock()
        if now >= self._told_until:
            self._told, self._told_until = 0, now + PERIOD_S
        key = (f"{where.protocol} {whose}", event)
        refusals = self._refusals.get(key)
        if refusals is None or now >= refusals.until:
            if refusals is not None:
                self._tell_rest(self._refusals.pop(key))
            if len(self._refusals) >= CLIENTS:
                self._tell_rest(self._refusals.popitem(last=False)[1])
            refusals = self._refusals[key] = _Refusals(now + PERIOD_S)
            self._wake_at(refusals.until)
        if refusals.told < AT_ONCE and self._told < EVERY_S:
            refusals.told += 1
            self._told += 1
            self._write(event, result, where, **facts)
            return
        refusals.left_out += 1
        self.counts.left_out_total += 1
        refusals.last = {"event": event, "result": result, "where": where, **facts}

    def _wake_at(self, until: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, until - self._clock()) + 0.1, self._look)

    def _look(self) -> None:
        """Periods are over: what was left out in them is told."""
        self._timer = None
        now = self._clock()
        while self._refusals:
            key, first = next(iter(self._refusals.items()))
            if first.until > now:
                self._wake_at(first.until)
                return
            del self._refusals[key]
            self._tell_rest(first)

    def _tell_rest(self, refusals: _Refusals) -> None:
        if refusals.left_out:
            self._write(**refusals.last, more=refusals.left_out)

    def _write(self, event: Event, result: Result, where: Where, **facts: Any) -> None:
        facts = {name: _shown(value) if isinstance(value, str) else value for name, value in facts.items()}
        entry = Entry(
            v=VERSION,
            at=datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(timespec="milliseconds"),
            gateway=self._gateway,
            event=event,
            result=result,
            protocol=where.protocol,
            listener=where.listener,
            address=where.address,
            client=_shown(where.client),
            **facts,
        )
        line = self._redactor.clean(msgspec.json.encode(entry).decode()).encode()
        self.counts.lines_total += 1
        for sink in self._sinks:
            if not sink.write(line):
                self.counts.dropped_total += 1

    def statistics(self) -> AuditStatistics:
        """Counts so far."""
        return self.counts


audit: Final = Audit()
"""The process's."""
