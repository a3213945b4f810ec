"""The MQTT sessions of all gateways as this process knows them, and their records in `__trivium_sessions`.

A session is a `Session` object while it has a connection or unfinished work. Otherwise only the bytes of its two
records and possibly a deadline are kept. The gateway that owns the session writes the records; the others follow them.
All state changes are transitions of the table in `gateway.mqtt.session.lifecycle`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import structlog

from gateway.mqtt.counters import SessionStatistics
from gateway.mqtt.registry.deadlines import Deadlines
from gateway.mqtt.registry.heartbeats import Gateways
from gateway.mqtt.registry.takeover import Claim, Unanswered, classify, is_released, merge_claims, others, taken_over
from gateway.mqtt.registry.wills import Wills, due_at
from gateway.mqtt.session.lifecycle import TABLE, Action, Event, SessionState
from gateway.mqtt.session.session import Session, SessionParts
from gateway.mqtt.state.records import (
    GATEWAY,
    INFLIGHT,
    NEVER,
    RELEASE,
    SESSION,
    SHARE,
    GatewayRecord,
    InflightHead,
    InflightRecord,
    SessionRecord,
    decode,
    encode,
)
from gateway.runtime.turns import in_turns
from mapping.record import Received

log = structlog.get_logger(__name__)

TOPIC: Final = "__trivium_sessions"


class Sessions:
    """The session registry of this process; executes the life cycle's transitions."""

    def __init__(self, gateways: Gateways, parts: SessionParts, wills: Wills, wall_clock: Callable[[], int]) -> None:
        """`wall_clock` returns epoch milliseconds."""
        self.gateways = gateways  # all gateways, this one included
        self.owner = gateways.owner
        self.live: dict[str, Session] = {}  # sessions with an object, by client id
        self.parts = parts  # for creating sessions
        self.saving: set[Session] = set()  # those of `live` in the state SAVING
        self.takeovers = 0  # connections closed because of a newer one
        self._expired = 0
        self._wills = wills
        self._wall_clock = wall_clock
        self._store = parts.store
        self._deadlines = Deadlines()
        self._unread: dict[str, int] = {}  # client id -> epoch of our record that was not read back yet
        self._claims: dict[str, Claim] = {}
        self._handing_over: dict[str, Session] = {}  # claimed by another gateway, with QoS 2 messages in flight

    def __len__(self) -> int:
        """Return the number of sessions with a connection here."""
        return sum(1 for session in self.live.values() if session.client is not None)

    # states

    def state(self, client_id: str) -> SessionState:
        """Return the state of a client id's session."""
        session = self.live.get(client_id)
        if session is not None:
            return session.state
        if client_id in self._claims:
            return SessionState.CLAIMING
        record = self.record(client_id)
        if record is None:
            return SessionState.ABSENT
        return SessionState.AWAY if record.owner == self.owner else SessionState.ELSEWHERE

    def _on(self, client_id: str, event: Event) -> Action:
        """Change the state by the table, and return the action for the caller to do."""
        action, after = TABLE[self.state(client_id)][event]
        session = self.live.get(client_id)
        if session is not None:
            session.state = after
            return action
        if after is not SessionState.CLAIMING:
            claim = self._claims.pop(client_id, None)
            if claim is not None:
                claim.lose()
        return action

    def record(self, client_id: str) -> SessionRecord | None:
        """Return the session record of a client id, from any gateway."""
        return decode(SessionRecord, self._store.records.get(client_id))

    # records of other gateways

    def apply(self, record: Received) -> None:
        """Process a record of the table (contract: `gateway.kafka.state.Apply`)."""
        change = self._store.read(record)
        if change is None:
            return
        kind, name = change
        if kind == SHARE:
            self._store.shares.apply(name, record.value)
        elif self._store.is_own(record):
            if kind == SESSION:
                self._read_back(name, record.value)
        elif kind == INFLIGHT:
            if self._apply_inflight(name, record.value):
                self._answered(name, self._store.writer_of(record))
        elif kind == RELEASE:
            self._answered(name, self._store.writer_of(record))
        elif kind == SESSION:
            self._apply_session(name, record.value)
        elif kind == GATEWAY:
            self.gateways.apply(name, decode(GatewayRecord, record.value))
            for client_id in list(self._claims):
                self._check_claim(client_id)

    def _read_back(self, client_id: str, value: bytes | None) -> None:
        """Note that our own record was read back: records of others from now on are later in the log."""
        claim = self._claims.get(client_id)
        if claim is None and client_id not in self._unread:
            return
        mine, record = decode(SessionRecord, value), self.record(client_id)
        if mine is not None and mine.epoch == self._unread.get(client_id):
            del self._unread[client_id]
        if claim is not None and mine is not None and record is not None and mine.epoch == record.epoch:
            claim.is_read = True
            self._check_claim(client_id)

    def restarted(self, partition: int) -> None:
        """Write all records of a partition again, since its topic was recreated.

        Contract: `gateway.kafka.state.Restarted`.
        """
        log.warning("the sessions topic was recreated", topic=TOPIC, partition=partition)
        self._store.put_all(partition)

    def _apply_session(self, client_id: str, value: bytes | None) -> None:
        """Process another gateway's session record: the highest epoch wins, of equal epochs the last in the log."""
        record = decode(SessionRecord, value)
        session = self.live.get(client_id)
        event = self._classify(client_id, record)
        if event is None:
            return
        action = self._on(client_id, event)
        if action is Action.WRITE and session is not None:
            self._store.write_session(client_id, session.describe())
        elif action is Action.WRITE:
            self._store.put(SESSION, client_id, self._store.records[client_id])
        elif action is Action.FORGET:
            self._store.records.pop(client_id, None)
            self._store.inflight.pop(client_id, None)
            self._deadlines.forget(client_id)
        elif record is None:
            return  # nothing to forget
        elif action is Action.HAND_OVER and session is not None:
            self._hand_over(session, record)
        elif action is Action.SET_ASIDE and session is not None:
            session.gone_at = session.gone_at or self._wall_clock()
            aside = msgspec.structs.replace(session.describe(), predecessors=others(record, self.owner))
            self._hand_over(session, aside)
            self._store.write_session(client_id, aside)
            self._deadlines.watch(client_id, aside)
        elif action is Action.ASK:
            self._claims[client_id].waiting.update(others(record, self.owner))  # our claim ends that session there
        elif action in {Action.FOLLOW, Action.RELEASE}:
            self._store.records[client_id] = encode(merge_claims(record, self.record(client_id)))
            if action is Action.RELEASE and client_id not in self._handing_over:
                self._store.release(client_id)

    def _classify(self, client_id: str, record: SessionRecord | None) -> Event | None:
        """Classify another gateway's record; None if it has no effect here."""
        session, claim, known = self.live.get(client_id), self._claims.get(client_id), self.record(client_id)
        if session is None:
            epoch = known.epoch if known is not None else None
            ours = known is not None and known.owner == self.owner
            return classify(record, epoch, self.owner, ours=ours, is_read=claim is None or claim.is_read)
        is_read = client_id not in self._unread
        event = classify(record, session.epoch, self.owner, ours=True, is_read=is_read)
        if event in {Event.OUTDATED, Event.DELETED}:
            return event if is_read and known is not None else None
        if event is Event.RIVAL and (session.client is not None or (record is not None and record.predecessors)):
            return None  # the client was never served there, or that gateway waits for us
        return event

    def _apply_inflight(self, client_id: str, value: bytes | None) -> bool:
        """Process another gateway's in-flight record (the higher epoch wins); return whether it is its final one."""
        mine = self.live.get(client_id)
        if mine is not None:
            if mine.journal is not None:
                mine.journal.save()  # ours must be the last in the log
            return False
        if value is None:
            self._store.inflight.pop(client_id, None)
            return False
        known = self._store.inflight.get(client_id)
        record, before = decode(InflightHead, value), decode(InflightHead, known)
        assert record is not None
        if known is None or before is None or record.epoch >= before.epoch:
            self._store.inflight[client_id] = value
        elif self.state(client_id) is SessionState.AWAY:
            self._store.put(INFLIGHT, client_id, known)  # its writer did not know yet that we own the session
        return record.final

    def _answered(self, client_id: str, gateway: str) -> None:
        """Note that a gateway has no messages of a session in flight."""
        claim = self._claims.get(client_id)
        if claim is not None:
            claim.answered(gateway)
            self._check_claim(client_id)

    def _check_claim(self, client_id: str) -> None:
        """Check whether all gateways have answered a claim."""
        claim = self._claims.get(client_id)
        if claim is not None:
            claim.check(self.gateways.is_alive, handing_over=client_id in self._handing_over)

    def _hand_over(self, session: Session, record: SessionRecord) -> None:
        """Give a session to another gateway: close its connection, and answer when nothing is in flight any more."""
        client_id, client = session.client_id, session.client
        self._remove(session)
        self._handing_over[client_id] = session
        self._store.records[client_id] = encode(merge_claims(record, self.record(client_id)))
        session.will = None  # the new owner publishes it
        session.detach()
        if client is not None:
            self.takeovers += 1
            client.taken_over()
        if session.journal is not None:
            session.journal.stop()

        def idle() -> None:
            if self._handing_over.get(client_id) is not session:
                return
            del self._handing_over[client_id]
            kept = session.journal is not None
            mine = session.inflight_record() if kept else InflightRecord(session.session_id, session.epoch)
            known = decode(InflightHead, self._store.inflight.get(client_id))
            if known is None or mine.epoch >= known.epoch:
                self._store.write_inflight(client_id, msgspec.structs.replace(mine, final=True))
            else:  # a newer in-flight record exists
                self._store.release(client_id)
            self._check_claim(client_id)

        if session.inbound_qos2 is None:
            idle()
        else:
            session.inbound_qos2.when_idle(idle)  # otherwise messages in flight would be stored twice

    # CONNECT

    def enter(self, session: Session) -> None:
        """Put the session for a CONNECT into `live`; from now on it does not expire."""
        self._on(session.client_id, Event.CONNECT)
        self.saving.discard(session)
        self.live[session.client_id] = session
        session.state = SessionState.OPENING
        session.gone_at = None

    async def save(self, session: Session, *, claimed: bool = False) -> None:
        """Write both records of a live session, and wait until they are stored.

        `claimed`: the epoch was raised, so records of others before this one in the log are older.

        Raises:
            Refused: Kafka does not store them.
        """
        if claimed:
            self._unread[session.client_id] = session.epoch
        inflight = session.inflight_record() if session.kept else None
        await self._store.save(session.client_id, session.describe(), inflight)

    def ready(self, session: Session) -> None:
        """Note that the records for a CONNECT are stored; the caller attaches the connection."""
        self._on(session.client_id, Event.READY)

    def fail(self, session: Session, *, present: bool) -> None:
        """Undo a failed CONNECT: save a session that existed before (`present`), or end a new one."""
        session.detach()
        if self.live.get(session.client_id) is not session:
            return
        if present:
            self._save(session, Event.FAIL)
        else:
            session.will = None
            self.end(session.client_id)

    def take_released(self, client_id: str) -> None:
        """Take over, without a claim, a session that its stopping gateway has released."""
        if self.state(client_id) is not SessionState.ELSEWHERE or client_id in self._handing_over:
            return
        record = self.record(client_id)
        if record is not None and is_released(record, decode(InflightHead, self._store.inflight.get(client_id))):
            self.take_over(client_id, record, Event.RELEASED, clean=True)

    def must_claim(self, client_id: str) -> bool:
        """Whether a CONNECT needs a claim, since another gateway, or this one, may have messages in flight."""
        record = self.record(client_id)
        if client_id in self.live or record is None:
            return False
        return client_id in self._handing_over or bool(others(record, self.owner))

    async def claim(self, client_id: str, wait_s: float) -> bool:
        """Ask all gateways that may have messages of the session in flight, and take the session over.

        Call it only if `must_claim` is true; the gateways have `wait_s` seconds to answer. A will that is due because
        the connection has ended is published here [MQTT-3.1.2-8].

        Returns:
            False if another gateway was faster.

        Raises:
            Unanswered: a live gateway has not answered in time; the next CONNECT asks again.
        """
        former = self.record(client_id)
        assert former is not None
        self._on(client_id, Event.CLAIM)
        asked = others(former, self.owner)
        claim = self._claims[client_id] = Claim(asked)
        claimed = msgspec.structs.replace(
            former, epoch=former.epoch + 1, owner=self.owner, gone_at=None, predecessors=asked
        )
        self._store.write_session(client_id, claimed)
        answered = False
        try:
            answered = await asyncio.wait_for(claim.over, wait_s)
        except TimeoutError:
            log.warning(
                "gateways have not released a session in time", client=client_id, gateways=sorted(claim.waiting)
            )
            raise Unanswered from None
        finally:  # also for a cancelled CONNECT: this gateway is now responsible for will and expiry
            ours = self._claims.get(client_id) is claim
            if ours:
                left = msgspec.structs.replace(former, epoch=claimed.epoch, predecessors=() if answered else asked)
                self.take_over(client_id, left, Event.RELEASED, clean=answered and claim.clean)
        return ours

    def take_over(self, client_id: str, record: SessionRecord, event: Event, *, clean: bool = False) -> None:
        """Own another gateway's session, without a connection, after RELEASED or OWNER_DIED.

        `record` is from its former gateway; its predecessors have not answered. `clean`: that gateway has written its
        last in-flight record. A session that was released without a claim is not written here, but by its CONNECT.
        """
        unasked = event is Event.RELEASED and self.state(client_id) is SessionState.ELSEWHERE
        self._on(client_id, event)
        left = tuple(filter(self.gateways.is_alive, record.predecessors))
        ours = taken_over(record, self.owner, self._wall_clock(), clean=clean, predecessors=left)
        self._store.records[client_id] = encode(ours)
        asked = record.gone_at is None or record.predecessors or not self.gateways.is_predecessor(record.owner)
        if asked and not unasked:
            self._store.put(SESSION, client_id, self._store.records[client_id])
        self._deadlines.watch(client_id, ours)
        self.keep_deadlines()

    # the end of a connection, and of a session

    def leave(self, session: Session, *, with_will: bool) -> None:
        """End the session's connection; does nothing if the session is no longer here.

        `with_will`: its will is published; false after DISCONNECT 0x00 [MQTT-3.14.4-3].
        """
        client_id = session.client_id
        if self.live.get(client_id) is not session:
            return
        session.detach()
        session.gone_at = self._wall_clock()
        if session.will is not None:
            due = due_at(session.will, session.expiry, session.gone_at)
            session.will = msgspec.structs.replace(session.will, due=due) if with_will else None
        if session.expiry == 0:
            self.end(client_id)
            return
        self._save(session, Event.DISCONNECT)
        if session.will is not None and (session.will.due or 0) <= session.gone_at:
            self._publish_will(client_id, session.describe())

    def _save(self, session: Session, event: Event) -> None:
        """Write the records of a session without a connection, and note its deadlines."""
        assert session.journal is not None
        self._on(session.client_id, event)
        self._store.write_session(session.client_id, session.describe())
        session.journal.save((self._released, session) if self._store.leaving else None)
        self.saving.add(session)
        self._deadlines.watch(session.client_id, session.describe())

    def _released(self, session: Session) -> None:
        """Unload a stored session at once when the gateway stops, before another gateway takes it over."""
        if session in self.saving and session.is_stored:
            self.saved(session)
        elif session.journal is not None:
            session.journal.dirty = True  # released later, when Kafka has answered for everything

    def saved(self, session: Session) -> None:
        """Drop the object of a completely stored session; only its records stay."""
        self._on(session.client_id, Event.SAVED)
        self._remove(session)
        session.unload()

    def end(self, client_id: str) -> None:
        """End a session: publish its will [MQTT-3.1.2-8] and delete its records."""
        session = self.live.get(client_id)
        record = self.record(client_id)
        self._on(client_id, Event.END)
        stored = self._store.records.pop(client_id, None) is not None
        has_inflight = self._store.inflight.pop(client_id, None) is not None
        self._deadlines.forget(client_id)
        will, principal = (record.will, record.principal) if record is not None else (None, "")
        if session is not None:
            self._remove(session)
            session.unload()
            will, principal = session.will, session.principal

        def forget() -> None:
            if stored and client_id not in self._store.records:
                self._store.put(SESSION, client_id, None)
                if has_inflight:
                    self._store.put(INFLIGHT, client_id, None)

        if will is not None:
            self._wills.publish(client_id, principal, will, forget)  # published again after a crash in between
        else:
            forget()

    def _remove(self, session: Session) -> None:
        """Remove the session's object from the registry."""
        del self.live[session.client_id]
        self._unread.pop(session.client_id, None)
        if session.journal is not None:
            self.parts.deliveries.touched.discard(session.journal)
        self.saving.discard(session)

    def _publish_will(self, client_id: str, record: SessionRecord) -> SessionRecord:
        """Publish a session's will; return the record without it, which is stored after the will."""
        assert record.will is not None
        self._on(client_id, Event.WILL)
        session = self.live.get(client_id)
        if session is not None:
            session.will = None
        left = msgspec.structs.replace(record, will=None)
        self._store.records[client_id] = encode(left)

        def forget() -> None:
            now = self.record(client_id)
            if now is not None and now.owner == self.owner:
                self._store.put(SESSION, client_id, self._store.records[client_id])

        self._wills.publish(client_id, left.principal, record.will, forget)
        return left

    # deadlines

    def keep_deadlines(self) -> None:
        """Publish the wills and end the sessions that are due."""
        now = self._wall_clock()
        in_turns(self._process_due(list(self._deadlines.due(now)), now))

    def _process_due(self, due: list[str], now: int) -> Iterator[None]:
        """Process the due sessions in slices, since thousands may have disconnected at the same moment."""
        for client_id in due:
            yield
            if self.state(client_id) not in {SessionState.SAVING, SessionState.AWAY}:
                continue  # it reconnected, ended, or moved to another gateway
            session = self.live.get(client_id)
            record = session.describe() if session is not None else self.record(client_id)
            if record is None or record.gone_at is None:
                continue
            if record.expiry != NEVER and record.gone_at + 1000 * record.expiry <= now:
                self._expired += 1
                self.end(client_id)
                continue
            if record.will is not None and (record.will.due or 0) <= now:
                record = self._publish_will(client_id, record)
            self._deadlines.watch(client_id, record)

    def statistics(self) -> SessionStatistics:
        """Return a snapshot for the metrics."""
        return SessionStatistics(
            connected=len(self),
            stored=len(self._store.records),
            stored_bytes=self._store.records.size,
            refused_total=self._store.records.refused,
            takeovers_total=self.takeovers,
            expired_total=self._expired,
            wills_total=self._wills.published,
            invalid_total=self._store.invalid,
        )
