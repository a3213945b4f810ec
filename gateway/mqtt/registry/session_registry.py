"""All MQTT sessions that this process knows: who holds which client id, and their records in `__trivium_sessions`.

A session lives here as an object while it has a connection or something unfinished. Otherwise it is the bytes of its
two records, and a deadline when it has one. The records are written by the gateway that has the session; the others
follow them. What happens to a session is a transition of the table in `gateway.mqtt.session.lifecycle`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import structlog

from gateway.kafka.state import StateTopic
from gateway.mqtt.counters import SessionStatistics
from gateway.mqtt.registry.deadlines import Deadlines
from gateway.mqtt.registry.heartbeats import Gateways
from gateway.mqtt.registry.takeover import Claim, Unanswered, followed, is_released, judge, others, taken_over
from gateway.mqtt.registry.wills import Wills, due_at
from gateway.mqtt.session.lifecycle import TABLE, Action, Event, State
from gateway.mqtt.session.session import Session, SessionParts
from gateway.mqtt.state.records import (
    GATEWAY,
    INFLIGHT,
    NEVER,
    RELEASE,
    SESSION,
    InflightRecord,
    SessionRecord,
    decode_gateway,
    decode_inflight_head,
    decode_session,
    encode,
)
from gateway.turns import in_turns
from mapping.record import Received

log = structlog.get_logger(__name__)

TOPIC: Final = "__trivium_sessions"


class Sessions:
    """The sessions of this process, and the transitions that they make."""

    def __init__(self, gateways: Gateways, parts: SessionParts, wills: Wills, wall_clock: Callable[[], int]) -> None:
        """`wills` publishes wills; `wall_clock` counts epoch milliseconds."""
        self.gateways = gateways  # this one and the others
        self.owner = gateways.owner
        self.live: dict[str, Session] = {}  # the sessions that are objects, by client id
        self.parts = parts  # what sessions are made with
        self.saving: set[Session] = set()  # those of `live` in the state SAVING
        self.takeovers = 0  # connections that were closed for a newer one
        self._expired = 0
        self._wills = wills
        self._wall_clock = wall_clock
        self._store = parts.store
        self._deadlines = Deadlines()
        self._unread: dict[str, int] = {}  # client id -> epoch of a record of ours that was not read back yet
        self._claims: dict[str, Claim] = {}
        self._handing_over: dict[str, Session] = {}  # claimed by others, with a QoS 2 message on the way to Kafka

    def __len__(self) -> int:
        """Sessions with a connection here."""
        return sum(1 for session in self.live.values() if session.client is not None)

    # states

    def state(self, client_id: str) -> State:
        """Where the session of a client id is."""
        session = self.live.get(client_id)
        if session is not None:
            return session.state
        if client_id in self._claims:
            return State.CLAIMING
        record = self.record(client_id)
        if record is None:
            return State.ABSENT
        return State.AWAY if record.owner == self.owner else State.ELSEWHERE

    def _on(self, client_id: str, event: Event) -> Action:
        """Take the step of the table; the caller does what it says."""
        action, after = TABLE[self.state(client_id)][event]
        session = self.live.get(client_id)
        if session is not None:
            session.state = after
            return action
        if after is not State.CLAIMING:
            claim = self._claims.pop(client_id, None)
            if claim is not None:
                claim.lose()
        return action

    def record(self, client_id: str) -> SessionRecord | None:
        """The record of a client id, by whomever it was written."""
        return decode_session(self._store.records.get(client_id))

    # what other gateways write

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
            self.gateways.apply(name, decode_gateway(record.value))
            for client_id in list(self._claims):
                self._look(client_id)

    def _read_back(self, client_id: str, value: bytes | None) -> None:
        """A record of ours was read: what others write from now on is later."""
        claim = self._claims.get(client_id)
        if claim is None and client_id not in self._unread:
            return
        mine, record = decode_session(value), self.record(client_id)
        if mine is not None and mine.epoch == self._unread.get(client_id):
            del self._unread[client_id]
        if claim is not None and mine is not None and record is not None and mine.epoch == record.epoch:
            claim.is_read = True
            self._look(client_id)

    def restarted(self, partition: int) -> None:
        """A partition of the table is read anew (contract: `gateway.kafka.state.Restarted`).

        What is in memory is what there was, so it is written down again.
        """
        log.warning("the topic of sessions was made anew", topic=TOPIC, partition=partition)
        self._store.put_all(partition)

    def _apply_session(self, client_id: str, value: bytes | None) -> None:
        """The highest epoch is right, and of equals the last in the log; what is written late is written over."""
        record = decode_session(value)
        session = self.live.get(client_id)
        event = self._judge(client_id, record)
        if event is None:
            return
        action = self._on(client_id, event)
        if action is Action.HAND_OVER:
            assert session is not None
            assert record is not None
            self._hand_over(session, record)
        elif action is Action.SET_ASIDE:
            assert session is not None
            assert record is not None
            session.gone_at = session.gone_at or self._wall_clock()
            aside = msgspec.structs.replace(session.describe(self.owner), predecessors=others(record, self.owner))
            self._hand_over(session, aside)
            self._store.write_session(client_id, aside)
            self._deadlines.watch(client_id, aside)
        elif action is Action.ASK:
            assert record is not None
            self._claims[client_id].waiting.update(others(record, self.owner))  # our claim ends what it has
        elif action is Action.WRITE and session is not None:
            self._store.write_session(client_id, session.describe(self.owner))
        elif action is Action.WRITE:
            self._store.put(SESSION, client_id, self._store.records[client_id])
        elif action is Action.FORGET:
            self._store.records.pop(client_id, None)
            self._store.inflight.pop(client_id, None)
        elif action in {Action.FOLLOW, Action.RELEASE}:
            assert record is not None
            self._store.records[client_id] = encode(followed(record, self.record(client_id)))
            if action is Action.RELEASE and client_id not in self._handing_over:
                self._store.release(client_id)

    def _judge(self, client_id: str, record: SessionRecord | None) -> Event | None:
        """What another gateway's record means; None: nothing, for ours is behind it in the log, or has no record."""
        session, claim, known = self.live.get(client_id), self._claims.get(client_id), self.record(client_id)
        if session is None:
            epoch = known.epoch if known is not None else None
            ours = known is not None and known.owner == self.owner
            return judge(record, epoch, self.owner, ours=ours, is_read=claim is None or claim.is_read)
        is_read = client_id not in self._unread
        event = judge(record, session.epoch, self.owner, ours=True, is_read=is_read)
        if event in {Event.OUTDATED, Event.DELETED}:
            return event if is_read and known is not None else None
        if event is Event.RIVAL and (session.client is not None or (record is not None and record.predecessors)):
            return None  # the client was never served there, or it waits for us
        return event

    def _apply_inflight(self, client_id: str, value: bytes | None) -> bool:
        """Of two the higher epoch is right; whether it is the last of its writer."""
        mine = self.live.get(client_id)
        if mine is not None:
            if mine.journal is not None:
                mine.journal.save()  # ours is to be the last
            return False
        if value is None:
            self._store.inflight.pop(client_id, None)
            return False
        known = self._store.inflight.get(client_id)
        record, before = decode_inflight_head(value), decode_inflight_head(known)
        assert record is not None
        if known is None or before is None or record.epoch >= before.epoch:
            self._store.inflight[client_id] = value
        elif self.state(client_id) is State.AWAY:
            self._store.put(INFLIGHT, client_id, known)  # its writer did not know yet that the session is ours
        return record.final

    def _answered(self, client_id: str, gateway: str) -> None:
        """A gateway has nothing of a session on its way to Kafka."""
        claim = self._claims.get(client_id)
        if claim is not None:
            claim.answered(gateway)
            self._look(client_id)

    def _look(self, client_id: str) -> None:
        """Has everybody answered a claim?"""
        claim = self._claims.get(client_id)
        if claim is not None:
            claim.look(self.gateways.is_alive, handing_over=client_id in self._handing_over)

    def _hand_over(self, session: Session, record: SessionRecord) -> None:
        """Another gateway has the session now: close its connection, and answer when Kafka has answered."""
        client_id, client = session.client_id, session.client
        self._remove(session)
        self._handing_over[client_id] = session
        self._store.records[client_id] = encode(followed(record, self.record(client_id)))
        session.will = None  # it is the other's now
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
            known = decode_inflight_head(self._store.inflight.get(client_id))
            if known is None or mine.epoch >= known.epoch:
                self._store.write_inflight(client_id, msgspec.structs.replace(mine, final=True))
            else:  # it has gone on without us
                self._store.release(client_id)
            self._look(client_id)

        if session.inbound_qos2 is None:
            idle()
        else:
            session.inbound_qos2.when_idle(idle)  # else what is on its way to Kafka would come a second time

    # a CONNECT

    def enter(self, session: Session) -> None:
        """A CONNECT goes on with this session: from now on it is an object, and does not expire."""
        self._on(session.client_id, Event.CONNECT)
        self.saving.discard(session)
        self.live[session.client_id] = session
        session.state = State.OPENING
        session.gone_at = None

    async def save(self, session: Session, *, claimed: bool = False) -> None:
        """Write both records of a session of `live`, and wait until they are stored.

        `claimed`: the epoch was raised: what others wrote before this is in the log is older.

        Raises:
            Refused: Kafka does not take them.
        """
        if claimed:
            self._unread[session.client_id] = session.epoch
        inflight = session.inflight_record() if session.kept else None
        await self._store.save(session.client_id, session.describe(self.owner), inflight)

    def ready(self, session: Session) -> None:
        """The CONNECT's records are stored: the caller attaches the connection."""
        self._on(session.client_id, Event.READY)

    def fail(self, session: Session, *, present: bool) -> None:
        """The CONNECT has failed: the session is as before, or there is none again (`present`: there was one)."""
        session.detach()
        if self.live.get(session.client_id) is not session:
            return
        if present:
            self._save(session, Event.FAIL)
        else:
            session.will = None
            self.end(session.client_id)

    def take_released(self, client_id: str) -> None:
        """A CONNECT has come: take the session without asking if its gateway has released it, because it stops."""
        if self.state(client_id) is not State.ELSEWHERE or client_id in self._handing_over:
            return
        record = self.record(client_id)
        if record is not None and is_released(record, decode_inflight_head(self._store.inflight.get(client_id))):
            self.take_over(client_id, record, Event.RELEASED, clean=True)

    def must_ask(self, client_id: str) -> bool:
        """Whether a CONNECT has to ask before it gets the session: somebody may have a message of it on the way."""
        record = self.record(client_id)
        if client_id in self.live or record is None:
            return False
        return client_id in self._handing_over or bool(others(record, self.owner))

    async def claim(self, client_id: str, wait_s: float) -> bool:
        """Ask everybody who may have a message of the session on its way to Kafka, and take the session over.

        A will that is due by the connection's end is published here [MQTT-3.1.2-8]. `must_ask` is true, and the
        gateways may take `wait_s`.

        Returns:
            False when somebody else was faster.

        Raises:
            Unanswered: a living gateway has not answered in time; the next CONNECT asks again.
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
                "gateways have not let go of a session in time", client=client_id, gateways=sorted(claim.waiting)
            )
            raise Unanswered from None
        finally:  # also when the CONNECT was given up: the session's will and its expiry are ours to see to
            ours = self._claims.get(client_id) is claim
            if ours:
                left = msgspec.structs.replace(former, epoch=claimed.epoch, predecessors=() if answered else asked)
                self.take_over(client_id, left, Event.RELEASED, clean=answered and claim.clean)
        return ours

    def take_over(self, client_id: str, record: SessionRecord, event: Event, *, clean: bool = False) -> None:
        """A session of another gateway is ours, without a connection, by RELEASED or ORPHANED.

        `record` is of its former gateway; its predecessors are those who have not answered. `clean`: that gateway has
        written its last in-flight record. Nothing is written of one that was released unasked: its CONNECT will.
        """
        unasked = event is Event.RELEASED and self.state(client_id) is State.ELSEWHERE
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
        """The session's connection is gone, or about to be.

        Nothing happens when it is not here any more. `with_will`: its will is to be published; not after DISCONNECT
        0x00 [MQTT-3.14.4-3].
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
            self._publish_will(client_id, session.describe(self.owner))

    def _save(self, session: Session, event: Event) -> None:
        """Write what is left of a session without a connection, and note what time will bring."""
        assert session.journal is not None
        self._on(session.client_id, event)
        self._store.write_session(session.client_id, session.describe(self.owner))
        session.journal.save((self._released, session) if self._store.leaving else None)
        self.saving.add(session)
        self._deadlines.watch(session.client_id, session.describe(self.owner))

    def _released(self, session: Session) -> None:
        """Kafka has what was saved: what another gateway does with the session is to find no object here."""
        if session in self.saving and session.is_stored:
            self.saved(session)
        elif session.journal is not None:
            session.journal.dirty = True  # it is released when Kafka has answered for everything

    def saved(self, session: Session) -> None:
        """Everything is stored: the session is its records from now on."""
        self._on(session.client_id, Event.SAVED)
        self._remove(session)
        session.dissolve()

    def end(self, client_id: str) -> None:
        """The session is over: its will is due [MQTT-3.1.2-8], its records go."""
        session = self.live.get(client_id)
        record = self.record(client_id)
        self._on(client_id, Event.END)
        stored = self._store.records.pop(client_id, None) is not None
        has_inflight = self._store.inflight.pop(client_id, None) is not None
        will, principal = (record.will, record.principal) if record is not None else (None, "")
        if session is not None:
            self._remove(session)
            session.dissolve()
            will, principal = session.will, session.principal

        def forget() -> None:
            if stored and client_id not in self._store.records:
                self._store.put(SESSION, client_id, None)
                if has_inflight:
                    self._store.put(INFLIGHT, client_id, None)

        if will is not None:
            self._wills.publish(client_id, principal, will, forget)  # after a crash in between it is published again
        else:
            forget()

    def _remove(self, session: Session) -> None:
        """The session is an object no longer."""
        del self.live[session.client_id]
        self._unread.pop(session.client_id, None)
        if session.journal is not None:
            self.parts.deliveries.touched.discard(session.journal)
        self.saving.discard(session)

    def _publish_will(self, client_id: str, record: SessionRecord) -> SessionRecord:
        """Publish the will of a session's record; the record without it, which is stored after that."""
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
        """Publish the wills and end the sessions whose time has come."""
        now = self._wall_clock()
        in_turns(self._meet(list(self._deadlines.due(now)), now))

    def _meet(self, due: list[str], now: int) -> Iterator[None]:
        """What is to be done for each; thousands may have left at the same moment."""
        for client_id in due:
            yield
            if self.state(client_id) not in {State.SAVING, State.AWAY}:
                continue  # it came back, or ended, or went elsewhere
            session = self.live.get(client_id)
            record = session.describe(self.owner) if session is not None else self.record(client_id)
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
        """Counts for the metrics."""
        return SessionStatistics(
            connected=len(self),
            stored=len(self._store.records),
            takeovers_total=self.takeovers,
            expired_total=self._expired,
            wills_total=self._wills.published,
            invalid_total=self._store.invalid,
        )
