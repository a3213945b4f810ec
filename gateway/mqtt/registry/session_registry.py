"""All MQTT sessions that this process knows: who holds which client id, and their records in `__trivium_sessions`.

A session lives here as an object while it has a connection or something unfinished. Otherwise it is the bytes of its
two records, and a deadline when it has one. The records are written by the gateway that has the session; the others
follow them. Each gateway writes heartbeats; what a silent one had is taken over: its clients are gone,
so their wills become due and their sessions begin to expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Final
from weakref import WeakValueDictionary

import msgspec
import structlog

from gateway.kafka.contracts import Refused
from gateway.kafka.state import StateTopic
from gateway.mqtt.counters import SessionStatistics
from gateway.mqtt.registry.crash_recovery import Accounting, in_time
from gateway.mqtt.registry.deadlines import Deadlines
from gateway.mqtt.registry.heartbeats import HEARTBEAT_S, Gateways
from gateway.mqtt.registry.takeover import find_orphans, inherited
from gateway.mqtt.registry.wills import Wills, due_at
from gateway.mqtt.session.session import Session, SessionParts
from gateway.mqtt.state.records import (
    FLIGHT,
    GATEWAY,
    NEVER,
    SESSION,
    FlightRecord,
    PendingWill,
    SessionRecord,
    decode_flight,
    decode_gateway,
    decode_session,
    encode,
)
from gateway.spawn import keep_on, together
from gateway.turns import in_turns
from mapping.outcomes import Outcome
from mapping.record import Received

log = structlog.get_logger(__name__)

TOPIC: Final = "__trivium_sessions"
TICK_S: Final = 1.0  # positions are written that often
ROUND_S: Final = 60.0  # positions of sessions that got nothing
RELEASE_S: Final = 3.0  # for another gateway to let go of a session
CLOSING_S: Final = 3.0
READY_S: Final = 7.0  # a CONNECT waits so long for the state to be loaded


class Sessions:
    """See the module."""

    def __init__(
        self,
        gateways: Gateways,
        parts: SessionParts,
        wills: Wills,
        accounting: Accounting,
        *,
        wall_clock: Callable[[], int],
        nonce: Callable[[], str],
        follow: Callable[[str], Awaitable[None]],
    ) -> None:
        """Nothing is known before the table is loaded.

        Args:
            gateways: this one and the others.
            parts: what sessions are made with; of its store this is the reader.
            wills: publishes them.
            accounting: finds in the log what a dead gateway stored for QoS 2.
            wall_clock: epoch milliseconds.
            nonce: makes names that are not repeated.
            follow: waits until all that other gateways have stored of a client id is known.
        """
        self.gateways = gateways
        self.owner = gateways.owner
        self.live: dict[str, Session] = {}
        self.takeovers = self.expired = 0
        self._wills = wills
        self._accounting = accounting
        self._wall_clock = wall_clock
        self._nonce = nonce
        self._follow = follow
        self._parts = parts
        self._store = parts.store
        self._touched = parts.deliveries.touched
        self._deadlines = Deadlines()
        self._claims: dict[str, int] = {}  # client id -> epoch of a record of ours that was not read back yet
        self._round_of: list[Session] = []
        self._leaving: set[Session] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._released: dict[str, asyncio.Event] = {}
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        """Sessions with a connection here."""
        return sum(1 for session in self.live.values() if session.client is not None)

    # the table

    def bind(self, table: StateTopic) -> None:
        """The table that `apply` is told about."""
        self._store.bind(table)

    def apply(self, record: Received) -> None:
        """A record of the table (contract: `gateway.kafka.state.Apply`)."""
        found = self._store.read(record)
        if found is None:
            return
        kind, name = found
        if self._store.is_own(record):
            if name in self._claims and kind == SESSION:
                mine = decode_session(record.value)
                if mine is not None and mine.epoch == self._claims[name]:
                    del self._claims[name]
            return
        if kind == FLIGHT:
            self._apply_flight(name, record.value)
        elif kind == SESSION:
            self._apply_session(name, record.value)
        elif kind == GATEWAY:
            self.gateways.apply(name, decode_gateway(record.value))

    def restarted(self, partition: int) -> None:
        """A partition of the table is read anew (contract: `gateway.kafka.state.Restarted`).

        What is in memory is what there was, so it is written down again.
        """
        log.warning("the topic of sessions was made anew", topic=TOPIC, partition=partition)
        self._store.put_all()

    def _apply_session(self, client_id: str, value: bytes | None) -> None:
        """The highest epoch is right, and of equals the last in the log; what is written late is written over."""
        record = decode_session(value)
        mine = self.live.get(client_id)
        if mine is not None:
            earlier = client_id not in self._claims  # ours is before it in the log
            if record is not None and (record.epoch > mine.epoch or (record.epoch == mine.epoch and earlier)):
                self._hand_over(mine, record)
            elif earlier and client_id in self._store.records:
                self._write(mine)
            return
        if record is None or value is None:
            self._store.records.pop(client_id, None)
            self._store.flights.pop(client_id, None)
            return
        known = decode_session(self._store.records.get(client_id))
        ours = known is not None and known.owner == self.owner
        if known is not None and record.epoch < known.epoch:
            if ours:
                self._store.put(SESSION, client_id, self._store.records[client_id])
            return
        self._store.records[client_id] = value
        if ours and record.gone_at is None and record.owner != self.owner:  # it is claimed, and its client is gone
            flight = decode_flight(self._store.flights.get(client_id))
            if flight is not None:
                self._let_go(client_id, flight)

    def _apply_flight(self, client_id: str, value: bytes | None) -> None:
        mine = self.live.get(client_id)
        if mine is not None:
            if mine.journal is not None:
                mine.journal.save()  # ours is to be the last
            return
        if value is None:
            self._store.flights.pop(client_id, None)
            return
        self._store.flights[client_id] = value
        waiting = self._released.get(client_id)
        if waiting is not None:
            record = decode_flight(value)
            if record is not None and record.final:
                waiting.set()

    def _hand_over(self, session: Session, record: SessionRecord) -> None:
        """Another gateway has the session now: close its connection, write what we know, and forget it."""
        client_id, client = session.client_id, session.client
        self._remove(session)
        self._store.records[client_id] = encode(record)
        session.will = None  # it is the other's now
        session.detach()
        if client is not None:
            self.takeovers += 1
            client.taken_over()
        if session.journal is not None:
            session.journal.stop()

        def let_go() -> None:
            if client_id not in self.live:
                kept = session.journal is not None
                self._let_go(client_id, session.flight_record() if kept else FlightRecord(session.nonce, session.epoch))

        if session.exchanges is None:
            let_go()
        else:
            session.exchanges.when_idle(let_go)  # else what is on its way to Kafka would come a second time

    def _let_go(self, client_id: str, flight: FlightRecord) -> None:
        """Write down that this is all we know of a session that another gateway has claimed."""
        self._store.write_flight(client_id, msgspec.structs.replace(flight, final=True))

    def _remove(self, session: Session) -> None:
        """The session is an object no longer."""
        self.live.pop(session.client_id, None)
        self._claims.pop(session.client_id, None)
        if session.journal is not None:
            self._touched.discard(session.journal)
        self._leaving.discard(session)

    def _write(self, session: Session) -> None:
        """Write a session's record as it is now."""
        self._store.write_session(session.client_id, session.describe(self.owner))

    async def save(self, session: Session) -> None:
        """Write both records of a session, and wait until they are stored; Refused when Kafka does not take them."""
        flight = session.flight_record() if session.kept else None
        await self._store.save(session.client_id, session.describe(self.owner), flight)

    # CONNECT

    async def open(
        self,
        client_id: str,
        principal: str,
        *,
        clean_start: bool,
        expiry: int,
        will: PendingWill | None,
    ) -> tuple[Session, bool]:
        """Give the client id to a new connection; a former one is told and closed [MQTT-3.1.4-3].

        Args:
            client_id: of CONNECT, or assigned.
            principal: who the client is. Another's session is not given away, nor ended.
            clean_start: what there was is discarded [MQTT-3.1.2-4].
            expiry: Session Expiry Interval in seconds.
            will: of CONNECT.

        Returns:
            The session, prepared but not attached, and whether it was there before [MQTT-3.2.2-2].

        Raises:
            Refused: DENIED: the session is somebody else's; else Kafka does not answer, or refuses to store it.
        """
        if not self._ready.is_set():
            try:
                async with asyncio.timeout(READY_S):
                    await self._ready.wait()
            except TimeoutError:
                raise Refused(Outcome.BUSY, "the sessions are not loaded from Kafka yet") from None
        lock = self._locks.get(client_id)
        if lock is None:
            lock = self._locks[client_id] = asyncio.Lock()
        async with lock:
            if client_id not in self.live and not self.gateways.is_alone and (expiry or will or not clean_start):
                await in_time(self._follow(client_id))
            self._check_owner(client_id, principal)
            former = self.live.get(client_id)
            if former is not None and former.client is not None:
                self.takeovers += 1
                former.client.taken_over()  # which leaves the session
            if client_id not in self.live:
                await self._inherit(client_id)
            session = None if clean_start else await self._find(client_id)
            present = session is not None
            if session is None:
                known = self.live.get(client_id) or decode_session(self._store.records.get(client_id))
                self._end(client_id)
                session = Session(client_id, principal, self._nonce(), self._parts, kept=expiry > 0)
                session.epoch = known.epoch if known is not None else 0  # other gateways may know the former one
            await self._begin(session, expiry, will, present=present)
            return session, present

    async def _begin(self, session: Session, expiry: int, will: PendingWill | None, *, present: bool) -> None:
        """Make a session ready for a connection; when that fails it is as before."""
        client_id = session.client_id
        before = session.expiry, session.will, session.gone_at
        self._leaving.discard(session)
        self.live[client_id] = session
        session.gone_at = None  # from now on it does not expire
        try:
            await session.prepare()
            if self.live.get(client_id) is session:
                session.expiry, session.will = expiry, will
                if session.kept or will is not None:
                    session.epoch += 1
                    self._claims[client_id] = session.epoch
                    await self.save(session)
            if self.live.get(client_id) is not session:
                raise Refused(Outcome.BUSY, "another connection uses this client id")
        except BaseException:
            session.expiry, session.will, session.gone_at = before
            self._withdraw(session, present=present)
            raise

    def _withdraw(self, session: Session, *, present: bool) -> None:
        """A CONNECT has failed."""
        session.detach()
        if self.live.get(session.client_id) is not session:
            return
        if not present:
            session.will = None
            self._end(session.client_id)
            return
        self._write(session)
        self._go(session)

    def _check_owner(self, client_id: str, principal: str) -> None:
        """Refuse a client id whose session belongs to another principal."""
        session = self.live.get(client_id)
        owner = session.principal if session is not None else None
        if session is None:
            record = decode_session(self._store.records.get(client_id))
            if record is not None and not self._is_over(record):
                owner = record.principal
        if owner is not None and owner != principal:
            raise Refused(Outcome.DENIED, "the client id is somebody else's")

    async def _find(self, client_id: str) -> Session | None:
        """The session of a client id, from memory or from its records."""
        session = self.live.get(client_id)
        if session is not None:
            if session.exchanges is not None and session.exchanges.doubtful:
                await in_time(self._accounting.confirm(session.exchanges))
            return session if self.live.get(client_id) is session else None
        record = decode_session(self._store.records.get(client_id))
        if record is None or self._is_over(record):
            return None
        flight = decode_flight(self._store.flights.get(client_id))
        if flight is not None and flight.scan:
            flight = (await in_time(self._accounting.account({client_id: flight})))[client_id]
        session = Session(client_id, record.principal, record.nonce, self._parts, kept=True)
        session.restore(record, flight)
        return session

    async def _inherit(self, client_id: str) -> None:
        """End the connection that a client has elsewhere, as far as its record tells of one.

        The gateway that has it lets go of the session and writes what it knows, for which we wait a moment; or it is
        dead. A will that is due by the connection's end is published here [MQTT-3.1.2-8].
        """
        record = decode_session(self._store.records.get(client_id))
        if record is None or record.gone_at is not None:
            return
        claim = self._store.records[client_id] = encode(
            msgspec.structs.replace(record, epoch=record.epoch + 1, owner=self.owner)
        )
        released = False
        if record.owner != self.owner and self.gateways.is_alive(record.owner):
            self._store.put(SESSION, client_id, claim)
            released = await self._wait_for_release(client_id)
            if not released:
                log.warning("a gateway did not let go of a session", client=client_id, gateway=record.owner)
        if self._store.records.get(client_id) is not claim:
            raise Refused(Outcome.BUSY, "another connection uses this client id")
        self._take_in(client_id, msgspec.structs.replace(record, epoch=record.epoch + 1), clean=released)

    async def _wait_for_release(self, client_id: str) -> bool:
        released = self._released[client_id] = asyncio.Event()
        try:
            return await asyncio.wait_for(released.wait(), RELEASE_S)
        except TimeoutError:
            return False
        finally:
            del self._released[client_id]

    def _is_over(self, record: SessionRecord) -> bool:
        if record.gone_at is None or record.expiry == NEVER:
            return record.gone_at is None and record.expiry == 0 and not self.gateways.is_alive(record.owner)
        return record.gone_at + 1000 * record.expiry <= self._wall_clock()

    # the end of a connection

    def leave(self, session: Session, *, with_will: bool) -> None:
        """The session's connection is gone, or about to be.

        Args:
            session: attached or not; nothing happens when it is not here any more.
            with_will: whether its will is to be published; not after DISCONNECT 0x00 [MQTT-3.14.4-3].
        """
        if self.live.get(session.client_id) is not session:
            return
        session.detach()
        session.gone_at = self._wall_clock()
        if session.will is not None:
            due = due_at(session.will, session.expiry, session.gone_at)
            session.will = msgspec.structs.replace(session.will, due=due) if with_will else None
        if session.expiry == 0:
            self._end(session.client_id)
            return
        self._write(session)
        self._go(session)
        if session.will is not None and (session.will.due or 0) <= session.gone_at:
            will, session.will = session.will, None
            self._publish_will(session.client_id, will, session.describe(self.owner))

    def _go(self, session: Session) -> None:
        """Write down what is left of a session without a connection, and note what time will bring."""
        assert session.journal is not None
        session.journal.save()
        self._leaving.add(session)
        self._watch(session.client_id, session.describe(self.owner))

    def _end(self, client_id: str) -> None:
        """The session is over: its will is due [MQTT-3.1.2-8], its records go."""
        session = self.live.get(client_id)
        value = self._store.records.pop(client_id, None)
        will: PendingWill | None = None
        principal = ""
        if session is not None:
            principal = session.principal
            self._remove(session)
            session.dissolve()
            will = session.will
        elif value is not None:
            record = decode_session(value)
            if record is not None:
                will, principal = record.will, record.principal
        if value is None:
            if will is not None:
                self._wills.publish(client_id, principal, will, lambda: None)
            return
        has_flight = self._store.flights.pop(client_id, None) is not None

        def forget() -> None:
            if client_id not in self._store.records:
                self._store.put(SESSION, client_id, None)
                if has_flight:
                    self._store.put(FLIGHT, client_id, None)

        if will is not None:
            self._wills.publish(client_id, principal, will, forget)  # after a crash in between it is published again
        else:
            forget()

    def _publish_will(self, client_id: str, will: PendingWill, left: SessionRecord) -> None:
        """Publish a will; `left` is the record without it, which is stored after that."""
        self._store.records[client_id] = encode(left)

        def forget() -> None:
            value = self._store.records.get(client_id)
            if value is not None and self.owner.encode() in value:
                self._store.put(SESSION, client_id, value)

        self._wills.publish(client_id, left.principal, will, forget)

    # time

    async def run(self, loaded: asyncio.Event) -> None:
        """Everything that time brings: positions, heartbeats, wills, expiries, gateways that fell silent."""
        await loaded.wait()
        self.gateways.loaded()
        # Each is tried again by itself: without heartbeats other gateways would take our sessions away.
        await together(
            *(keep_on(part, "sessions") for part in (self._send_heartbeats, self._tick, self._care_for_the_dead))
        )

    async def _tick(self) -> None:
        await self._ready.wait()
        while True:
            self._round()
            self._save_positions()
            self._keep_deadlines()
            await asyncio.sleep(TICK_S)

    async def _send_heartbeats(self) -> None:
        """Write heartbeats, whatever else takes its time."""
        while not self._store.stopped:
            self._store.put_heartbeat(self.gateways.name, self.gateways.heartbeat())
            await asyncio.sleep(HEARTBEAT_S)

    async def _care_for_the_dead(self) -> None:
        if not self._ready.is_set():
            await self._adopt(self.gateways.is_predecessor)
            self._ready.set()
        while True:
            if self.gateways.mark_dead():
                await self._adopt(self.gateways.adopts)
            await asyncio.sleep(TICK_S)

    def _save_positions(self) -> None:
        for journal in self._touched:
            journal.save()
        self._touched.clear()
        for session in list(self._leaving):
            assert session.journal is not None
            if session.journal.idle and not (session.exchanges is not None and session.exchanges.busy):
                if session.journal.dirty:
                    session.journal.save()
                    continue
                self._leaving.discard(session)
                if session.client is None and self.live.get(session.client_id) is session:
                    del self.live[session.client_id]
                    session.dissolve()
            else:
                session.journal.dirty = True

    def _round(self) -> None:
        """Sessions that got nothing for long still move on with the log; quiet ones give up their floors.

        Each has its turn once in `ROUND_S`, not all at once.
        """
        if not self._round_of:
            self._round_of = list(self.live.values())
        for _ in range(min(len(self._round_of), 1 + int(len(self.live) * TICK_S / ROUND_S))):
            session = self._round_of.pop()
            if session.journal is None or session.client is None:
                continue
            quiet = session.exchanges is not None and session.exchanges.rest()
            if quiet or session.subscriptions.by_filter:
                session.journal.save()

    def _watch(self, client_id: str, record: SessionRecord) -> None:
        """Note when something is to be done for a session without a connection."""
        if record.gone_at is None:
            return
        if record.will is not None:
            due = record.will.due
            self._deadlines.note(client_id, due or due_at(record.will, record.expiry, record.gone_at))
        if record.expiry != NEVER:
            self._deadlines.note(client_id, record.gone_at + 1000 * record.expiry)

    def _keep_deadlines(self) -> None:
        """Publish the wills and end the sessions whose time has come."""
        now = self._wall_clock()
        in_turns(self._meet(list(self._deadlines.due(now)), now))

    def _meet(self, due: list[str], now: int) -> Iterator[None]:
        """What is to be done for each; thousands may have left at the same moment."""
        for client_id in due:
            yield
            session = self.live.get(client_id)
            stored = decode_session(self._store.records.get(client_id))
            record = session.describe(self.owner) if session is not None else stored
            if record is None or record.gone_at is None or record.owner != self.owner:
                continue  # it came back, or ended, or went elsewhere
            if record.expiry != NEVER and record.gone_at + 1000 * record.expiry <= now:
                self.expired += 1
                self._end(client_id)
                continue
            if record.will is not None and (record.will.due or 0) <= now:
                left = msgspec.structs.replace(record, will=None)
                if session is not None:
                    session.will = None
                self._publish_will(client_id, record.will, left)
                record = left
            self._watch(client_id, record)

    # gateways that are gone

    async def _adopt(self, adopts: Callable[[str], bool]) -> None:
        """Take over the sessions of owners that are gone: their clients are gone since now."""
        for client_id, record in await find_orphans(self._store, self.live, adopts, self._accounting, self.owner):
            self._take_in(client_id, record, clean=False)

    def _take_in(self, client_id: str, record: SessionRecord, *, clean: bool) -> None:
        """A session is ours, without a connection; `clean`: its former gateway has told all."""
        adopted = inherited(record, self.owner, self._wall_clock(), clean=clean)
        self._store.records[client_id] = encode(adopted)
        if record.gone_at is None or not self.gateways.is_predecessor(record.owner):
            self._store.put(SESSION, client_id, self._store.records[client_id])
        self._watch(client_id, adopted)
        self._keep_deadlines()

    # the end

    async def stop(self) -> None:
        """Write what is left of every session; connections were closed before."""
        for session in list(self.live.values()):
            if session.client is not None:
                self.leave(session, with_will=True)
        try:
            async with asyncio.timeout(CLOSING_S):
                while self._leaving:
                    self._save_positions()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            log.warning("not all sessions were written", sessions=len(self._leaving))
        self._store.stopped = True
        if self._ready.is_set():
            self._store.put_heartbeat(self.gateways.name, None)

    def statistics(self) -> SessionStatistics:
        """See `SessionStatistics`."""
        return SessionStatistics(
            connected=len(self),
            stored=len(self._store.records),
            takeovers_total=self.takeovers,
            expired_total=self.expired,
            wills_total=self._wills.published,
            invalid_total=self._store.invalid,
        )
