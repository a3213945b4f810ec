"""The online state of all clients: the presence topic's contents, this gateway's connections, and pending writes.

There is no I/O here: `take` returns the value to write for a key, `apply` processes every record of the topic in log
order. For each key one write is in flight at a time, until it was read back; of later changes only the latest state is
written then. Records read before our own record is read back are older than it. So all gateways agree that of two
CONNECTs the later one in the log is the last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Final

import msgspec

from gateway.presence.records import (
    DEATH,
    OFFLINE,
    ONLINE,
    SERVER,
    Ended,
    SessionKept,
    decode,
    encode,
)

GONE: Final = b""  # represents a tombstone in `pending`
MOST_DUE: Final = 100_000
"""With more states due, because Kafka does not answer, clients that connect and disconnect again are not reported."""


class Known(msgspec.Struct, frozen=True, gc=False):
    """The state of a key in the topic."""

    online: bool
    epoch: int
    gateway: str
    principal: str
    since: int
    value: bytes  # of the record


class Present(msgspec.Struct, frozen=True):
    """A connection of this gateway."""

    client: str
    principal: str
    protocol: str
    address: str
    since: int  # epoch milliseconds
    session: SessionKept = SessionKept()
    # closes the connection if the key's client connects elsewhere; None: a key may have several connections, or
    # session records decide (ADR 0043)
    yields: Callable[[], None] | None = None


class _Mine:
    """This gateway's own state of a key, which may be newer than the topic's."""

    __slots__ = ("connections", "epoch", "left", "pending")

    def __init__(self) -> None:
        self.connections: dict[Hashable, Present] = {}  # the first one is reported
        self.epoch = 0  # of the reported state
        self.left: tuple[Present, Ended, int] | None = None  # the ended last connection, reason and time
        self.pending: bytes | None = None  # value written but not read back


class Ledger:
    """The online states of the clients of all gateways."""

    def __init__(
        self,
        owner: str,  # this process
        *,
        is_alive: Callable[[str], bool],  # whether heartbeats of another process are received
        is_dead: Callable[[str], bool],  # whether they have been missing for long; unknown just after our start
        is_ours: Callable[[str], bool],  # whether it is dead and this gateway is first to take over its clients
    ) -> None:
        self.known: dict[str, Known] = {}
        self.due: dict[str, None] = {}  # keys for `take`, in order
        self.takeovers = self.deaths = self.mended = self.forgotten = self.invalid = 0
        self._owner = owner
        self._is_alive = is_alive
        self._is_dead = is_dead
        self._is_ours = is_ours
        self._mine: dict[str, _Mine] = {}
        self._behind: set[str] = set()  # keys whose last record in the log is outdated
        self._over: set[str] = set()  # keys to delete

    @property
    def online(self) -> int:
        """Number of keys with a connection here."""
        return sum(1 for mine in self._mine.values() if mine.connections)

    @property
    def is_idle(self) -> bool:
        """Whether no write is due or in flight."""
        return not self.due and all(mine.pending is None for mine in self._mine.values())

    def principal_elsewhere(self, key: str) -> str | None:
        """Return the principal connected under a key at another live gateway, or None."""
        known = self.known.get(key)
        if known is None or not known.online or known.gateway == self._owner or not self._is_alive(known.gateway):
            return None
        return known.principal

    # connections of this gateway

    def enter(self, key: str, connection: Hashable, present: Present) -> None:
        """Note a new connection."""
        mine = self._mine.get(key)
        if mine is None:
            mine = self._mine[key] = _Mine()
        mine.connections[connection] = present
        mine.left = None
        if len(mine.connections) == 1:
            self._advance(key, mine)

    def leave(self, key: str, connection: Hashable, ended: Ended, now: int) -> None:
        """Note the end of a connection; does nothing if it was taken over, or never entered."""
        mine = self._mine.get(key)
        if mine is None or connection not in mine.connections:
            return
        shown = next(iter(mine.connections)) == connection
        present = mine.connections.pop(connection)
        if mine.connections:
            if shown:
                self._advance(key, mine)
            return
        known = self.known.get(key)
        told = mine.pending is not None or (known is not None and known.online and known.gateway == self._owner)
        if not told and len(self.due) > MOST_DUE:
            self.due.pop(key, None)
            del self._mine[key]
            self.forgotten += 1
            return
        mine.left = (present, ended, now)
        self._want(key)

    def _advance(self, key: str, mine: _Mine) -> None:
        """Report another connection from now on, with a new epoch."""
        known = self.known.get(key)
        mine.epoch = max(mine.epoch, known.epoch if known is not None else 0) + 1
        self._want(key)

    def _want(self, key: str) -> None:
        self.due[key] = None

    # writing

    def take(self, key: str, now: int) -> bytes | None:
        """Return the value to write for a due key: a record's value, `GONE` for a tombstone, or None for nothing.

        The write is in flight until `apply` gets its record, or `failed` is called.
        """
        self.due.pop(key, None)
        mine = self._mine.get(key)
        if mine is not None and mine.pending is not None:
            return None  # handled when the write was read back
        value = self._wanted(key, mine, now)
        if value is None:
            if mine is not None and not mine.connections:
                del self._mine[key]
            return None
        if mine is None:
            mine = self._mine[key] = _Mine()
        mine.pending = value
        return value

    def _wanted(self, key: str, mine: _Mine | None, now: int) -> bytes | None:
        known = self.known.get(key)
        over = key in self._over
        self._over.discard(key)
        if mine is not None and mine.connections:
            if known is not None and known.epoch >= mine.epoch:
                mine.epoch = known.epoch + 1
            return self._record(mine, next(iter(mine.connections.values())))
        if mine is not None and mine.left is not None:
            present, ended, when = mine.left
            if known is None or (known.gateway == self._owner if known.online else known.epoch < mine.epoch):
                return self._record(mine, present, ended, when)
            mine.left = None  # the client has connected elsewhere meanwhile
        if known is None:
            return None
        if known.online and known.gateway == self._owner:
            return self._ended(known, Ended(SERVER), now)
        if known.online and self._is_dead(known.gateway):
            self.deaths += 1
            return self._ended(known, Ended(DEATH), now)
        if key in self._behind and (known.gateway == self._owner or self._is_dead(known.gateway)):
            self.mended += 1
            return known.value
        return GONE if over and not known.online else None

    def _record(self, mine: _Mine, present: Present, ended: Ended | None = None, when: int = 0) -> bytes:
        return encode(
            {
                "state": ONLINE if ended is None else OFFLINE,
                "client": present.client,
                "principal": present.principal,
                "protocol": present.protocol,
                "address": present.address,
                "gateway": self._owner,
                "since": present.since if ended is None else when,
                "epoch": mine.epoch,
                "session": present.session,
                **({} if ended is None else {"reason": ended}),
            }
        )

    @staticmethod
    def _ended(known: Known, ended: Ended, now: int) -> bytes:
        """Return the offline record for a connection that is known only from the topic."""
        record = decode(known.value)
        assert record is not None
        return encode(msgspec.structs.replace(record, state=OFFLINE, since=now, reason=ended))

    def failed(self, key: str) -> None:
        """Handle a failed write, or one with unknown result."""
        mine = self._mine.get(key)
        if mine is not None:
            mine.pending = None
        if mine is not None and mine.connections:
            self._look(key)  # the client may have connected elsewhere meanwhile
        else:
            self._want(key)

    # reading

    def apply(self, key: str, value: bytes | None, *, own: bool) -> bool:
        """Process a record of the topic; return whether it is now the key's valid record.

        `own`: this process wrote it. Connections that lose their key are closed before this returns.
        """
        mine, known = self._mine.get(key), self.known.get(key)
        record = None if value is None else decode(value)
        if value is not None and record is None:
            self.invalid += 1
            return False
        answered = own and mine is not None and mine.pending == (value or GONE)
        if answered:
            assert mine is not None
            mine.pending = None
        stale = record is not None and known is not None and record.epoch < known.epoch
        if record is None:
            self.known.pop(key, None)
            self._behind.discard(key)
        elif stale:
            self._behind.add(key)
        else:
            assert value is not None
            self._behind.discard(key)
            self.known[key] = Known(
                record.state == ONLINE, record.epoch, sys.intern(record.gateway), record.principal, record.since, value
            )
        if answered and mine is not None and record is not None:
            if record.state == OFFLINE and record.epoch == mine.epoch:
                mine.left = None
            if mine.connections and record.state == ONLINE and known is not None and known.epoch >= record.epoch:
                self._met(key, mine, known)
        self._look(key)
        return not stale

    def _met(self, key: str, mine: _Mine, known: Known) -> None:
        """Handle that our record was read behind another gateway's with the same or a higher epoch.

        The last CONNECT is ours, and is written again with a new epoch, unless the client id is in use by another
        principal.
        """
        if known.gateway == self._owner:
            return
        present = next(iter(mine.connections.values()))
        theirs = known.online and known.principal != present.principal and self._is_alive(known.gateway)
        if theirs and present.yields is not None:
            self._yield(mine)
        else:
            self._want(key)

    def _look(self, key: str) -> None:
        """Compare the topic's state of a key with our own, and have a difference written, or yield to the topic."""
        mine, known = self._mine.get(key), self.known.get(key)
        if key in self.due or (mine is not None and mine.pending is not None):
            return
        if mine is not None and mine.connections:
            if known is None or not known.online or known.epoch < mine.epoch or known.gateway == self._owner:
                right = known is not None and known.online and known.epoch == mine.epoch and key not in self._behind
                if not right:
                    self._want(key)
                return
            present = next(iter(mine.connections.values()))
            if present.yields is None:
                return
            if present.principal != known.principal:
                self._want(key)  # the client id was ours first
                return
            self.takeovers += 1
            self._yield(mine)
        ours = known is not None and known.gateway == self._owner
        wrong = ours and known is not None and (known.online or key in self._behind)
        if wrong or (mine is not None and mine.left is not None):
            self._want(key)
        elif mine is not None:
            del self._mine[key]

    def _yield(self, mine: _Mine) -> None:
        """Close the connections here, since the client is connected elsewhere; their end is not reported."""
        connections, mine.connections = mine.connections, {}
        for present in connections.values():
            if present.yields is not None:
                present.yields()

    # other gateways, and periodic work

    def look_again(self) -> None:
        """Check all due keys again: since then the clients may have connected elsewhere."""
        for key in list(self.due):
            del self.due[key]
            mine = self._mine.get(key)
            if mine is None or not mine.connections:
                self._want(key)
            else:
                self._look(key)

    def bury(self) -> Iterator[None]:
        """Report, in steps, the clients of dead gateways as offline, if this gateway takes those over."""
        for key in list(self.known):
            known = self.known.get(key)
            if known is not None and (known.online or key in self._behind) and self._is_ours(known.gateway):
                self._want(key)
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
                    self._over.add(key)
                    self._want(key)
                elif is_dead and (known.online or key in self._behind):
                    self._want(key)
            yield

    def anew(self, is_in: Callable[[str], bool]) -> None:
        """Write the known states of some keys again, since their partition was recreated."""
        for key in list(self._mine.keys() | self.known.keys()):
            if not is_in(key):
                continue
            mine = self._mine.get(key)
            if mine is not None:
                mine.pending = None
            if key in self.known:
                self._behind.add(key)
            self._look(key)
