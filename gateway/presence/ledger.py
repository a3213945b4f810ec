"""The online state of all clients: the presence topic's contents, this gateway's connections, and pending writes.

There is no I/O here: `take` returns the value to write for a key, `apply` processes every record of the topic in log
order. For each key one write is in flight at a time, until it was read back; of later changes only the latest state is
written then. Records read before our own record is read back are older than it. So all gateways agree that of two
CONNECTs the later one in the log is the last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Annotated, Final

import msgspec

from gateway.presence.records import decode, encode
from gateway.views.presence import Ended, Present
from telemetry.statistics import counter, gauge

TOMBSTONE: Final = b""  # represents a tombstone in `pending`
MAX_DUE: Final = 100_000
"""With more states due, because Kafka does not answer, clients that connect and disconnect again are not reported."""


class PresenceStatistics(msgspec.Struct):
    """This gateway's view of the presence topic, and counts since the start."""

    online: Annotated[int, gauge("clients that are connected here")] = 0
    known: Annotated[int, gauge("clients in the presence topic, of all gateways")] = 0
    waiting: Annotated[int, gauge("clients whose state waits to be written")] = 0
    written_total: Annotated[int, counter("records written")] = 0
    takeovers_total: Annotated[
        int, counter("connections closed, since their client had connected to another gateway")
    ] = 0
    deaths_total: Annotated[int, counter("clients of dead gateways that were reported as offline")] = 0
    mended_total: Annotated[int, counter("records written again because an outdated one followed them")] = 0
    forgotten_total: Annotated[int, counter("short connections not reported because Kafka did not answer")] = 0
    invalid_total: Annotated[int, counter("invalid records in the topic")] = 0


class KnownClient(msgspec.Struct, frozen=True, gc=False):
    """The state of a key in the topic."""

    online: bool
    epoch: int
    gateway: str
    principal: str
    since: int
    value: bytes  # of the record


class _Local(msgspec.Struct, eq=False):
    """This gateway's own state of a key, which may be newer than the topic's."""

    connections: dict[Hashable, Present] = {}  # the first one is reported
    epoch: int = 0  # of the reported state
    left: tuple[Present, Ended, int] | None = None  # the ended last connection, reason and time
    pending: bytes | None = None  # value written but not read back


class PresenceLedger:
    """The online states of the clients of all gateways."""

    def __init__(
        self,
        owner: str,  # this process
        *,
        is_alive: Callable[[str], bool],  # whether heartbeats of another process are received
        is_dead: Callable[[str], bool],  # whether they have been missing for long; unknown just after our start
        takes_over: Callable[[str], bool],  # whether it is dead and this gateway is first to take over its clients
    ) -> None:
        self.known: dict[str, KnownClient] = {}
        self.due: dict[str, None] = {}  # keys for `take`, in order
        self.counts = PresenceStatistics()
        self._owner = owner
        self._is_alive = is_alive
        self._is_dead = is_dead
        self._takes_over = takes_over
        self._local: dict[str, _Local] = {}
        self._outdated: set[str] = set()  # keys whose last record in the log is outdated
        self._to_delete: set[str] = set()

    @property
    def online(self) -> int:
        """Number of keys with a connection here."""
        return sum(1 for local in self._local.values() if local.connections)

    @property
    def is_idle(self) -> bool:
        """Whether no write is due or in flight."""
        return not self.due and all(local.pending is None for local in self._local.values())

    def principal_elsewhere(self, key: str) -> str | None:
        """Return the principal connected under a key at another live gateway, or None."""
        known = self.known.get(key)
        if known is None or not known.online or known.gateway == self._owner or not self._is_alive(known.gateway):
            return None
        return known.principal

    # connections of this gateway

    def enter(self, key: str, connection: Hashable, present: Present) -> None:
        """Note a new connection."""
        local = self._local.get(key)
        if local is None:
            local = self._local[key] = _Local()
        local.connections[connection] = present
        local.left = None
        if len(local.connections) == 1:
            self._advance(key, local)

    def leave(self, key: str, connection: Hashable, ended: Ended, now: int) -> None:
        """Note the end of a connection; does nothing if it was taken over, or never entered."""
        local = self._local.get(key)
        if local is None or connection not in local.connections:
            return
        shown = next(iter(local.connections)) == connection
        present = local.connections.pop(connection)
        if local.connections:
            if shown:
                self._advance(key, local)
            return
        known = self.known.get(key)
        reported = local.pending is not None or (known is not None and known.online and known.gateway == self._owner)
        if not reported and len(self.due) > MAX_DUE:
            self.due.pop(key, None)
            del self._local[key]
            self.counts.forgotten_total += 1
            return
        local.left = (present, ended, now)
        self._mark_due(key)

    def _advance(self, key: str, local: _Local) -> None:
        """Report another connection from now on, with a new epoch."""
        known = self.known.get(key)
        local.epoch = max(local.epoch, known.epoch if known is not None else 0) + 1
        self._mark_due(key)

    def _mark_due(self, key: str) -> None:
        self.due[key] = None

    # writing

    def take(self, key: str, now: int) -> bytes | None:
        """Return the value to write for a due key: a record's value, `TOMBSTONE` for a tombstone, or None for nothing.

        The write is in flight until `apply` gets its record, or `failed` is called.
        """
        self.due.pop(key, None)
        local = self._local.get(key)
        if local is not None and local.pending is not None:
            return None  # handled when the write was read back
        value = self._next_value(key, local, now)
        if value is None:
            if local is not None and not local.connections:
                del self._local[key]
            return None
        if local is None:
            local = self._local[key] = _Local()
        local.pending = value
        return value

    def _next_value(self, key: str, local: _Local | None, now: int) -> bytes | None:
        known = self.known.get(key)
        over = key in self._to_delete
        self._to_delete.discard(key)
        if local is not None and local.connections:
            if known is not None and known.epoch >= local.epoch:
                local.epoch = known.epoch + 1
            return self._record(local, next(iter(local.connections.values())))
        if local is not None and local.left is not None:
            present, ended, when = local.left
            if known is None or (known.gateway == self._owner if known.online else known.epoch < local.epoch):
                return self._record(local, present, ended, when)
            local.left = None  # the client has connected elsewhere meanwhile
        if known is None:
            return None
        if known.online and known.gateway == self._owner:
            return self._ended(known, Ended("server"), now)
        if known.online and self._is_dead(known.gateway):
            self.counts.deaths_total += 1
            return self._ended(known, Ended("death"), now)
        if key in self._outdated and (known.gateway == self._owner or self._is_dead(known.gateway)):
            self.counts.mended_total += 1
            return known.value
        return TOMBSTONE if over and not known.online else None

    def _record(self, local: _Local, present: Present, ended: Ended | None = None, when: int = 0) -> bytes:
        return encode(
            {
                "state": "online" if ended is None else "offline",
                "client": present.client,
                "principal": present.principal,
                "protocol": present.protocol,
                "address": present.address,
                "gateway": self._owner,
                "since": present.since if ended is None else when,
                "epoch": local.epoch,
                "session": present.session,
                **({} if ended is None else {"reason": ended}),
            }
        )

    @staticmethod
    def _ended(known: KnownClient, ended: Ended, now: int) -> bytes:
        """Return the offline record for a connection that is known only from the topic."""
        record = decode(known.value)
        assert record is not None
        return encode(msgspec.structs.replace(record, state="offline", since=now, reason=ended))

    def failed(self, key: str) -> None:
        """Handle a failed write, or one with unknown result."""
        local = self._local.get(key)
        if local is not None:
            local.pending = None
        if local is not None and local.connections:
            self._reconcile(key)  # the client may have connected elsewhere meanwhile
        else:
            self._mark_due(key)

    # reading

    def apply(self, key: str, value: bytes | None, *, own: bool) -> bool:
        """Process a record of the topic; return whether it is now the key's valid record.

        `own`: this process wrote it. Connections that lose their key are closed before this returns.
        """
        local, known = self._local.get(key), self.known.get(key)
        record = None if value is None else decode(value)
        if value is not None and record is None:
            self.counts.invalid_total += 1
            return False
        answered = own and local is not None and local.pending == (value or TOMBSTONE)
        if answered:
            assert local is not None
            local.pending = None
        stale = record is not None and known is not None and record.epoch < known.epoch
        if record is None:
            self.known.pop(key, None)
            self._outdated.discard(key)
        elif stale:
            self._outdated.add(key)
        else:
            assert value is not None
            self._outdated.discard(key)
            self.known[key] = KnownClient(
                record.state == "online",
                record.epoch,
                sys.intern(record.gateway),
                record.principal,
                record.since,
                value,
            )
        if answered and local is not None and record is not None:
            if record.state == "offline" and record.epoch == local.epoch:
                local.left = None
            if local.connections and record.state == "online" and known is not None and known.epoch >= record.epoch:
                self._conflict(key, local, known)
        self._reconcile(key)
        return not stale

    def _conflict(self, key: str, local: _Local, known: KnownClient) -> None:
        """Handle that our record was read behind another gateway's with the same or a higher epoch.

        The last CONNECT is ours, and is written again with a new epoch, unless the client id is in use by another
        principal.
        """
        if known.gateway == self._owner:
            return
        present = next(iter(local.connections.values()))
        is_taken = known.online and known.principal != present.principal and self._is_alive(known.gateway)
        if is_taken and present.on_takeover is not None:
            self._yield(local)
        else:
            self._mark_due(key)

    def _reconcile(self, key: str) -> None:
        """Compare the topic's state of a key with our own, and have a difference written, or yield to the topic."""
        local, known = self._local.get(key), self.known.get(key)
        if key in self.due or (local is not None and local.pending is not None):
            return
        if local is not None and local.connections:
            if known is None or not known.online or known.epoch < local.epoch or known.gateway == self._owner:
                right = known is not None and known.online and known.epoch == local.epoch and key not in self._outdated
                if not right:
                    self._mark_due(key)
                return
            present = next(iter(local.connections.values()))
            if present.on_takeover is None:
                return
            if present.principal != known.principal:
                self._mark_due(key)  # the client id was ours first
                return
            self.counts.takeovers_total += 1
            self._yield(local)
        ours = known is not None and known.gateway == self._owner
        wrong = ours and known is not None and (known.online or key in self._outdated)
        if wrong or (local is not None and local.left is not None):
            self._mark_due(key)
        elif local is not None:
            del self._local[key]

    def _yield(self, local: _Local) -> None:
        """Close the connections here, since the client is connected elsewhere; their end is not reported."""
        connections, local.connections = local.connections, {}
        for present in connections.values():
            if present.on_takeover is not None:
                present.on_takeover()

    # other gateways, and periodic work

    def reconcile_due(self) -> None:
        """Check all due keys again: since then the clients may have connected elsewhere."""
        for key in list(self.due):
            del self.due[key]
            local = self._local.get(key)
            if local is None or not local.connections:
                self._mark_due(key)
            else:
                self._reconcile(key)

    def report_dead(self) -> Iterator[None]:
        """Report, in steps, the clients of dead gateways as offline, if this gateway takes those over."""
        for key in list(self.known):
            known = self.known.get(key)
            if known is not None and (known.online or key in self._outdated) and self._takes_over(known.gateway):
                self._mark_due(key)
            yield

    def sweep(self, before: int) -> Iterator[None]:
        """Delete, in steps, clients that are offline since `before` (epoch ms), and correct states of dead gateways.

        Every gateway does the latter, since the one that takes over may have presence switched off.
        """
        for key in list(self.known):
            known = self.known.get(key)
            if known is not None:
                is_dead = self._is_dead(known.gateway)
                if not known.online and known.since < before and (is_dead or known.gateway == self._owner):
                    self._to_delete.add(key)
                    self._mark_due(key)
                elif is_dead and (known.online or key in self._outdated):
                    self._mark_due(key)
            yield

    def restarted(self, is_in: Callable[[str], bool]) -> None:
        """Write the known states of some keys again, since their partition was recreated."""
        for key in list(self._local.keys() | self.known.keys()):
            if not is_in(key):
                continue
            local = self._local.get(key)
            if local is not None:
                local.pending = None
            if key in self.known:
                self._outdated.add(key)
            self._reconcile(key)
