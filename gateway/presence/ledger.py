"""Who is online: what the presence topic says, what this gateway knows better, and what it has to write.

No I/O: `take` says what is to be written for a key, `apply` is told every record of the topic in the order of the log.
For each key one write is on its way at a time, until it was read back; what changes meanwhile is written then, the
latest state only. What lies in the log before a record of ours that was not read back yet is older than it. So of two
CONNECTs the later in the log is the last, for every gateway alike.
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

GONE: Final = b""  # the value of a deletion, as it is noted
MOST_DUE: Final = 100_000
"""While Kafka takes nothing and so many states wait already, clients that come and go leave none."""


class Known(msgspec.Struct, frozen=True, gc=False):
    """What the topic says of a key."""

    online: bool
    epoch: int
    gateway: str
    principal: str
    since: int
    value: bytes  # the record


class Present(msgspec.Struct, frozen=True):
    """A connection of this gateway."""

    client: str
    principal: str
    protocol: str
    address: str
    since: int  # epoch milliseconds
    session: SessionKept = SessionKept()
    # closes it, where a key has one connection over all gateways; None: it may have several, or others decide that
    yields: Callable[[], None] | None = None


class _Mine:
    """What this gateway knows of a key better than the topic."""

    __slots__ = ("connections", "epoch", "left", "pending")

    def __init__(self) -> None:
        self.connections: dict[Hashable, Present] = {}  # the first of them is shown
        self.epoch = 0  # of the state that is shown
        self.left: tuple[Present, Ended, int] | None = None  # the last connection has ended, why, and when
        self.pending: bytes | None = None  # written, and not read back


class Ledger:
    """The states of all clients, of all gateways."""

    def __init__(
        self,
        owner: str,  # this process
        *,
        is_alive: Callable[[str], bool],  # whether another process was heard of
        is_dead: Callable[[str], bool],  # whether it has long not been; who has just started does not know
        is_ours: Callable[[str], bool],  # whether it is dead, and we are the first to care for what it has left
    ) -> None:
        """Begin with nothing known."""
        self.known: dict[str, Known] = {}
        self.due: dict[str, None] = {}  # keys to be looked at by `take`, in this order
        self.takeovers = self.deaths = self.mended = self.forgotten = self.invalid = 0
        self._owner = owner
        self._is_alive = is_alive
        self._is_dead = is_dead
        self._is_ours = is_ours
        self._mine: dict[str, _Mine] = {}
        self._behind: set[str] = set()  # keys whose last record in the log is not the right one
        self._over: set[str] = set()  # keys that are to be deleted

    @property
    def online(self) -> int:
        """How many keys have a connection here."""
        return sum(1 for mine in self._mine.values() if mine.connections)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be written, nor on its way."""
        return not self.due and all(mine.pending is None for mine in self._mine.values())

    def principal_elsewhere(self, key: str) -> str | None:
        """Who is connected under a key at another gateway that lives; None: nobody."""
        known = self.known.get(key)
        if known is None or not known.online or known.gateway == self._owner or not self._is_alive(known.gateway):
            return None
        return known.principal

    # connections of this gateway

    def enter(self, key: str, connection: Hashable, present: Present) -> None:
        """A client has connected."""
        mine = self._mine.get(key)
        if mine is None:
            mine = self._mine[key] = _Mine()
        mine.connections[connection] = present
        mine.left = None
        if len(mine.connections) == 1:
            self._advance(key, mine)

    def leave(self, key: str, connection: Hashable, ended: Ended, now: int) -> None:
        """Its connection has ended; without effect when it was taken over, or never entered."""
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
        """Another connection is shown from now on."""
        known = self.known.get(key)
        mine.epoch = max(mine.epoch, known.epoch if known is not None else 0) + 1
        self._want(key)

    def _want(self, key: str) -> None:
        self.due[key] = None

    # writing

    def take(self, key: str, now: int) -> bytes | None:
        """What is to be written for a key that is due: a record's value, `GONE` for a deletion, or None: nothing.

        It counts as on its way until `apply` was told of it, or `failed`.
        """
        self.due.pop(key, None)
        mine = self._mine.get(key)
        if mine is not None and mine.pending is not None:
            return None  # looked at again when it was read back
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
            mine.left = None  # the client is elsewhere, or was since
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
        """The record of a connection of which nobody knows more than the topic says."""
        record = decode(known.value)
        assert record is not None
        return encode(msgspec.structs.replace(record, state=OFFLINE, since=now, reason=ended))

    def failed(self, key: str) -> None:
        """Kafka has not taken what was on its way, or nobody knows."""
        mine = self._mine.get(key)
        if mine is not None:
            mine.pending = None
        if mine is not None and mine.connections:
            self._look(key)  # the client may be elsewhere by now
        else:
            self._want(key)

    # reading

    def apply(self, key: str, value: bytes | None, *, own: bool) -> bool:
        """A record of the topic; whether it is what the topic says of the key from now on.

        `own`: this process wrote it. Connections that have to go are closed before this returns.
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
        """Our record was read behind another one that has its epoch, or a higher one: the last CONNECT is ours.

        It gets an epoch of its own. But a client id is not taken from another principal.
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
        """Is what the topic says of a key what we know?"""
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
                self._want(key)  # it was ours first
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
        """The client is elsewhere: its connections here go, and nothing is written of them."""
        connections, mine.connections = mine.connections, {}
        for present in connections.values():
            if present.yields is not None:
                present.yields()

    # other gateways, and time

    def look_again(self) -> None:
        """Much may have been read since something was due: a client whose turn did not come may be elsewhere."""
        for key in list(self.due):
            del self.due[key]
            mine = self._mine.get(key)
            if mine is None or not mine.connections:
                self._want(key)
            else:
                self._look(key)

    def bury(self) -> Iterator[None]:
        """In steps: the clients of gateways that are dead, and for which we are the first to care, are offline."""
        for key in list(self.known):
            known = self.known.get(key)
            if known is not None and (known.online or key in self._behind) and self._is_ours(known.gateway):
                self._want(key)
            yield

    def sweep(self, before: int) -> Iterator[None]:
        """In steps: delete what is offline since `before` (epoch milliseconds), and do what dead gateways cannot.

        Every gateway does, whoever was the first to care: that one may not tell presence.
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
        """A part of the topic is read from its beginning: it was made anew, and what it said is not there any more."""
        for key in list(self._mine.keys() | self.known.keys()):
            if not is_in(key):
                continue
            mine = self._mine.get(key)
            if mine is not None:
                mine.pending = None
            if key in self.known:
                self._behind.add(key)
            self._look(key)
