"""All MQTT sessions that this process knows: who holds which client id, and their records in `__trivium_sessions`.

A session lives here as an object while it has a connection or something unfinished. Otherwise it is the bytes of its
two records, and a deadline when it has one. The records are written by the gateway that has the session; the others
follow them. Each gateway gives a sign of life now and then; what a silent one had is taken over: its clients are gone,
so their wills become due and their sessions begin to expire.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import msgspec
import structlog

from gateway.identity import GatewayIdentity
from gateway.kafka.contracts import Owner, Refused, Result
from gateway.kafka.state import StateTopic
from gateway.mqtt.accounting import Accounting
from gateway.mqtt.gateways import SIGN_S, Gateways
from gateway.mqtt.records import (
    FLIGHT,
    GATEWAY,
    NEVER,
    SESSION,
    FlightRecord,
    SessionRecord,
    Testament,
    decode_flight,
    decode_gateway,
    decode_session,
    encode,
)
from gateway.mqtt.session import Session
from gateway.mqtt.wills import Wills, due_at
from mapping.outcomes import Outcome
from mapping.record import GW_OWNER, Received

if TYPE_CHECKING:
    from gateway.mqtt.services import Services

log = structlog.get_logger(__name__)

TOPIC: Final = "__trivium_sessions"
TICK_S: Final = 1.0  # positions are written that often
ROUND_S: Final = 60.0  # positions of sessions that got nothing
RELEASE_S: Final = 3.0  # for another gateway to let go of a session
CLOSING_S: Final = 3.0
READY_S: Final = 10.0  # a CONNECT waits so long for the state to be loaded


class Statistics(msgspec.Struct, frozen=True):
    """A snapshot.

    Attributes:
        connected: sessions with a connection here.
        stored: kept sessions that are known, of all gateways.
        takeovers_total: connections that lost their client id to a newer one.
        expired_total: sessions that this gateway ended because their time had run out.
        wills_total: wills that this gateway published.
    """

    connected: int
    stored: int
    takeovers_total: int
    expired_total: int
    wills_total: int


class _Written:
    """The owner of one write that somebody waits for."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Kafka answered (contract: `gateway.kafka.contracts.Owner`)."""
        if not self.done.done():
            self.done.set_result(result)


class Sessions:
    """See the module."""

    def __init__(
        self,
        identity: GatewayIdentity,
        wills: Wills,
        accounting: Accounting,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], int],
        nonce: Callable[[], str],
    ) -> None:
        """Nothing is known before the table is loaded.

        Args:
            identity: of this gateway.
            wills: publishes them.
            accounting: finds in the log what a dead gateway stored for QoS 2.
            clock: monotonic seconds.
            wall_clock: epoch milliseconds.
            nonce: makes names that are not repeated.
        """
        self.gateways = Gateways(identity, clock, wall_clock)
        self.owner = self.gateways.owner
        self.live: dict[str, Session] = {}
        self.takeovers = 0
        self.expired = 0
        self._wills = wills
        self._accounting = accounting
        self._clock = clock
        self._wall_clock = wall_clock
        self._nonce = nonce
        self._table: StateTopic | None = None
        self._mark = ((GW_OWNER, self.owner.encode()),)
        self._records: dict[str, bytes] = {}
        self._flights: dict[str, bytes] = {}
        self._deadlines: list[tuple[int, str]] = []
        self._touched: set[Session] = set()
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
        self._table = table

    def apply(self, record: Received) -> None:
        """A record of the table (contract: `gateway.kafka.state.Apply`)."""
        if record.headers and record.headers[0] == self._mark[0]:
            return  # our own
        key = (record.key or b"").decode("utf-8", "replace")
        kind, _, name = key.partition("/")
        if kind + "/" == FLIGHT:
            self._apply_flight(name, record.value)
        elif kind + "/" == SESSION:
            self._apply_session(name, record.value)
        elif kind + "/" == GATEWAY:
            self.gateways.apply(name, decode_gateway(record.value))

    def restarted(self, partition: int) -> None:
        """A partition of the table is read anew (contract: `gateway.kafka.state.Restarted`).

        What is in memory is what there was, so it is written down again.
        """
        log.warning("the topic of sessions was made anew", topic=TOPIC, partition=partition)
        for client_id, value in self._records.items():
            self._put(SESSION, client_id, value)
        for client_id, value in self._flights.items():
            self._put(FLIGHT, client_id, value)

    def _apply_session(self, client_id: str, value: bytes | None) -> None:
        record = decode_session(value)
        mine = self.live.get(client_id)
        if mine is not None:
            if record is not None and record.epoch > mine.epoch:
                self._hand_over(mine, record)
            return
        if record is None or value is None:
            self._records.pop(client_id, None)
            self._flights.pop(client_id, None)
            return
        self._records[client_id] = value

    def _apply_flight(self, client_id: str, value: bytes | None) -> None:
        if client_id in self.live:
            return
        if value is None:
            self._flights.pop(client_id, None)
            return
        self._flights[client_id] = value
        waiting = self._released.get(client_id)
        if waiting is not None:
            record = decode_flight(value)
            if record is not None and record.final:
                waiting.set()

    def _hand_over(self, session: Session, record: SessionRecord) -> None:
        """Another gateway has the session now: close its connection, write what we know, and forget it."""
        client = session.client
        if client is not None:
            self.takeovers += 1
            session.will = None  # it is the other's now
            session.detach()
            client.taken_over()
        self.live.pop(session.client_id, None)
        self._touched.discard(session)
        self._leaving.discard(session)
        self._records[session.client_id] = encode(record)
        if session.journal is not None:
            session.journal.stop()
            final = encode(msgspec.structs.replace(session.flight_record(), final=True))
            self._flights[session.client_id] = final
            self._put(FLIGHT, session.client_id, final)

    def _put(self, kind: str, client_id: str, value: bytes | None, owner: Owner | None = None) -> None:
        assert self._table is not None
        place = client_id.encode()
        self._table.write(kind.encode() + place, value, self._mark, owner=owner, place=place)

    def write_flight(self, client_id: str, value: bytes, owner: Owner) -> None:
        """Write a session's flight record."""
        self._flights[client_id] = value
        self._put(FLIGHT, client_id, value, owner)

    def write_session(self, session: Session, owner: Owner | None = None) -> None:
        """Write a session's record as it is now."""
        value = encode(session.describe(self.owner))
        self._records[session.client_id] = value
        self._put(SESSION, session.client_id, value, owner)

    async def save(self, session: Session) -> None:
        """Write both records, and wait until they are stored; Refused when Kafka does not take them."""
        writes = [_Written()]
        self.write_session(session, writes[0])
        if session.kept:
            writes.append(_Written())
            self.write_flight(session.client_id, encode(session.flight_record()), writes[1])
        for written in writes:
            result = await written.done
            if result.outcome is not Outcome.STORED:
                raise Refused(result.outcome, result.reason)

    def touch(self, session: Session) -> None:
        """A delivery of a kept session began or ended: its flight record is written within `TICK_S`."""
        self._touched.add(session)

    # CONNECT

    async def open(
        self,
        client_id: str,
        principal: str,
        *,
        clean_start: bool,
        expiry: int,
        will: Testament | None,
        services: Services,
    ) -> tuple[Session, bool]:
        """Give the client id to a new connection; a former one is told and closed [MQTT-3.1.4-3].

        Args:
            client_id: of CONNECT, or assigned.
            principal: who the client is. Another's session is not given away, nor ended.
            clean_start: what there was is discarded [MQTT-3.1.2-4].
            expiry: Session Expiry Interval in seconds.
            will: of CONNECT.
            services: of a session that is made.

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
            self._check_owner(client_id, principal)
            former = self.live.get(client_id)
            if former is not None and former.client is not None:
                self.takeovers += 1
                former.client.taken_over()  # which leaves the session
            if clean_start:
                self._end(client_id)
            session = None if clean_start else await self._find(client_id, services)
            present = session is not None
            if session is None:
                self._end(client_id)
                session = Session(client_id, principal, self._nonce(), services, kept=expiry > 0)
            await session.prepare()
            self._leaving.discard(session)
            session.expiry, session.will, session.gone_at = expiry, will, None
            self.live[client_id] = session
            if session.kept or will is not None:
                session.epoch += 1
                try:
                    await self.save(session)
                except Refused:
                    self.leave(session, with_will=False)
                    raise
            return session, present

    def _check_owner(self, client_id: str, principal: str) -> None:
        """Refuse a client id whose session belongs to another principal."""
        session = self.live.get(client_id)
        owner = session.principal if session is not None else None
        if session is None:
            record = decode_session(self._records.get(client_id))
            if record is not None and not self._is_over(record):
                owner = record.principal
        if owner is not None and owner != principal:
            raise Refused(Outcome.DENIED, "the client id is somebody else's")

    async def _find(self, client_id: str, services: Services) -> Session | None:
        """The session of a client id, from memory or from its records."""
        session = self.live.get(client_id)
        if session is not None:
            if session.exchanges is not None and session.exchanges.doubtful:
                await self._accounting.confirm(session.exchanges)
            return session
        record = decode_session(self._records.get(client_id))
        if record is None or self._is_over(record):
            return None
        if record.gone_at is None and self.gateways.is_alive(record.owner):
            await self._take_over(client_id, record)
        record = decode_session(self._records.get(client_id))
        if record is None:
            return None
        flight = decode_flight(self._flights.get(client_id))
        if flight is not None and flight.scan and not flight.final:
            flight = (await self._accounting.account({client_id: flight}))[client_id]
        session = Session(client_id, record.principal, record.nonce, services, kept=True)
        session.restore(record, flight)
        return session

    async def _take_over(self, client_id: str, record: SessionRecord) -> None:
        """Ask the gateway that has the session to let go of it, and wait a moment for what it knows."""
        released = self._released[client_id] = asyncio.Event()
        claim = msgspec.structs.replace(record, epoch=record.epoch + 1, owner=self.owner)
        self._records[client_id] = encode(claim)
        self._put(SESSION, client_id, self._records[client_id])
        try:
            async with asyncio.timeout(RELEASE_S):
                await released.wait()
        except TimeoutError:
            log.warning("a gateway did not let go of a session", client=client_id, gateway=record.owner)
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
        if session.will is not None and due_at(session.will, session.expiry, session.gone_at) <= session.gone_at:
            self._publish_will(session.client_id, session.will)
            session.will = None
        self.write_session(session)
        assert session.journal is not None
        session.journal.save()
        self._leaving.add(session)
        self._watch(session.client_id, session.describe(self.owner))

    def _end(self, client_id: str) -> None:
        """The session is over: its will is due [MQTT-3.1.2-8], its records go."""
        session = self.live.pop(client_id, None)
        value = self._records.pop(client_id, None)
        will: Testament | None = None
        if session is not None:
            self._touched.discard(session)
            self._leaving.discard(session)
            if session.journal is not None:
                session.journal.stop()
            will = session.will
        elif value is not None:
            record = decode_session(value)
            will = record.will if record is not None else None
        if value is None:
            if will is not None:
                self._publish_will(client_id, will)
            return
        has_flight = self._flights.pop(client_id, None) is not None

        def forget() -> None:
            if client_id not in self._records:
                self._put(SESSION, client_id, None)
                if has_flight:
                    self._put(FLIGHT, client_id, None)

        if will is not None:
            self._publish_will(client_id, will, forget)  # after a crash in between it is published again
        else:
            forget()

    def _publish_will(self, client_id: str, will: Testament, then: Callable[[], None] = lambda: None) -> None:
        self._wills.publish(client_id, will, then)

    # time

    async def run(self, loaded: asyncio.Event) -> None:
        """Everything that time brings: positions, signs of life, wills, expiries, gateways that fell silent."""
        await loaded.wait()
        self.gateways.loaded()
        await self._adopt(self.gateways.is_predecessor)
        self._ready.set()
        for tick in itertools.count():
            if tick % int(SIGN_S / TICK_S) == 0:
                self._sign()
                if self.gateways.bury():
                    await self._adopt(self.gateways.adopts)
            if tick % int(ROUND_S / TICK_S) == 0:
                self._round()
            self._save_positions()
            self._keep_deadlines()
            await asyncio.sleep(TICK_S)

    def _sign(self) -> None:
        assert self._table is not None
        sign = encode(self.gateways.sign())
        self._table.write((GATEWAY + self.gateways.name).encode(), sign, self._mark, owner=None)

    def _save_positions(self) -> None:
        touched, self._touched = self._touched, set()
        for session in touched:
            if session.journal is not None:
                session.journal.save()
        for session in list(self._leaving):
            assert session.journal is not None
            if session.journal.idle and not (session.exchanges is not None and session.exchanges.busy):
                if session.journal.dirty:
                    session.journal.save()
                    continue
                self._leaving.discard(session)
                if session.client is None and self.live.get(session.client_id) is session:
                    del self.live[session.client_id]
            else:
                session.journal.dirty = True

    def _round(self) -> None:
        """Sessions that got nothing for long still move on with the log; quiet ones give up their floors."""
        for session in self.live.values():
            if session.journal is None or session.client is None:
                continue
            quiet = session.exchanges is not None and session.exchanges.rest()
            if quiet or session.filters:
                session.journal.save()

    def _watch(self, client_id: str, record: SessionRecord) -> None:
        """Note when something is to be done for a session without a connection."""
        if record.gone_at is None:
            return
        if record.will is not None:
            due = record.will.due
            heapq.heappush(self._deadlines, (due or due_at(record.will, record.expiry, record.gone_at), client_id))
        if record.expiry != NEVER:
            heapq.heappush(self._deadlines, (record.gone_at + 1000 * record.expiry, client_id))

    def _keep_deadlines(self) -> None:
        """Publish the wills and end the sessions whose time has come."""
        now = self._wall_clock()
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, client_id = heapq.heappop(deadlines)
            session = self.live.get(client_id)
            stored = decode_session(self._records.get(client_id))
            record = session.describe(self.owner) if session is not None else stored
            if record is None or record.gone_at is None or record.owner != self.owner:
                continue  # it came back, or ended, or went elsewhere
            if record.expiry != NEVER and record.gone_at + 1000 * record.expiry <= now:
                self.expired += 1
                self._end(client_id)
            elif record.will is not None and (record.will.due or 0) <= now:
                self._publish_will(client_id, record.will)
                value = encode(msgspec.structs.replace(record, will=None))
                if session is not None:
                    session.will = None
                self._records[client_id] = value
                self._put(SESSION, client_id, value)

    # gateways that are gone

    async def _adopt(self, adopts: Callable[[str], bool]) -> None:
        """Take over the sessions of owners that are gone: their clients are gone since now."""
        unclear: dict[str, FlightRecord] = {}
        found: list[tuple[str, SessionRecord]] = []
        for client_id, value in self._records.items():
            if client_id in self.live or self.owner.encode() in value:
                continue
            record = decode_session(value)
            if record is not None and record.owner != self.owner and adopts(record.owner):
                found.append((client_id, record))
                flight = decode_flight(self._flights.get(client_id))
                if flight is not None and flight.scan and not flight.final:
                    unclear[client_id] = flight
        if unclear:
            for client_id, flight in (await self._accounting.account(unclear)).items():
                self._flights[client_id] = encode(flight)
                self._put(FLIGHT, client_id, self._flights[client_id])
        for client_id, record in found:
            if client_id not in self.live and self._records.get(client_id) is not None:
                self._take_in(client_id, record)

    def _take_in(self, client_id: str, record: SessionRecord) -> None:
        gone_at = record.gone_at if record.gone_at is not None else self._wall_clock()
        will = record.will
        if will is not None and will.due is None:
            will = msgspec.structs.replace(will, due=due_at(will, record.expiry, gone_at))
        unclean = record.unclean or record.gone_at is None
        adopted = msgspec.structs.replace(
            record, owner=self.owner, epoch=record.epoch + 1, gone_at=gone_at, will=will, unclean=unclean
        )
        self._records[client_id] = encode(adopted)
        if record.gone_at is None:
            self._put(SESSION, client_id, self._records[client_id])
        self._watch(client_id, adopted)

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
        if self._ready.is_set():
            assert self._table is not None
            self._table.write((GATEWAY + self.gateways.name).encode(), None, self._mark, owner=None)

    def statistics(self) -> Statistics:
        """See `Statistics`."""
        return Statistics(len(self), len(self._records), self.takeovers, self.expired, self._wills.published)
