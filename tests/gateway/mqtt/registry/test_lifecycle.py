"""The life cycle of a session as a table: a real registry goes through every cell, and never leaves the table.

Kafka, the other gateway and the clock are lists and numbers here, so that a test can stop between any two answers.
`test_two_gateways.py` and `loadtest.scenarios.kills` show the same with Kafka and processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.contracts import Refused, Result
from gateway.mqtt.counters import Counters
from gateway.mqtt.registry.crash_recovery import complete
from gateway.mqtt.registry.heartbeats import FROZEN_S, SILENT_S, Gateways
from gateway.mqtt.registry.opening import Opening
from gateway.mqtt.registry.session_registry import Sessions
from gateway.mqtt.registry.upkeep import Upkeep
from gateway.mqtt.session.acks import Slot
from gateway.mqtt.session.deliveries import DeliveryParts
from gateway.mqtt.session.lifecycle import TABLE, Action, Event, SessionState
from gateway.mqtt.session.qos2 import Qos2Parts
from gateway.mqtt.session.session import Session, SessionParts
from gateway.mqtt.session.shared import ShareParts
from gateway.mqtt.state.records import (
    GATEWAY,
    INFLIGHT,
    RELEASE,
    SESSION,
    GatewayRecord,
    InflightRecord,
    PendingWill,
    SessionRecord,
    decode,
    encode,
)
from gateway.mqtt.state.store import SessionStore
from gateway.runtime.fence import Fence
from gateway.runtime.identity import GatewayIdentity
from mapping.outcomes import Outcome
from mapping.record import GW_OWNER, Received, Record
from protocols.mqtt.packets import Version, Will
from protocols.mqtt.properties import Properties
from tests.support.waiting import wait_until

ID = "client"
OTHER = "other/1"
WILL = PendingWill(Will("t/will", b"gone", 0, properties=Properties(will_delay_interval=10)), Version.V5)
STORED = Result(Outcome.STORED)


class Watched(Sessions):
    """Sessions that record their steps."""

    expected: SessionState | None = None
    wrong: list[str]
    steps: list[tuple[SessionState, Event, Action]]

    def _on(self, client_id: str, event: Event) -> Action:
        before = self.state(client_id)
        if self.expected is not None and before is not self.expected:
            self.wrong.append(f"{before.name} where the table said {self.expected.name}")
        if event not in TABLE[before]:
            self.wrong.append(f"{event.name} in {before.name}")
        action, self.expected = TABLE[before][event]
        assert super()._on(client_id, event) is action
        self.steps.append((before, event, action))
        return action


class World:
    """One client id at a gateway; Kafka, the router and the client's connection are this object."""

    client_id = ID
    grant = None
    is_open = takes_more = reports_failures = True
    window = 10
    name = "nothing is retained"

    def __init__(self, directory: Path) -> None:
        self.now_ms = 1_000_000
        self.writes: list[tuple[str, bytes | None, Any, Any]] = []  # kind, value, owner, token: not answered yet
        self.written: list[tuple[str, bytes | None]] = []
        self.tokens: list[Any] = []  # QoS 2 messages on their way to Kafka
        self.wills: list[Callable[[], None]] = []
        self.published = 0
        self.closed = 0
        self.behind: tuple[str, int] | None = None  # a record in the table that was not read yet
        self.task: asyncio.Task[tuple[Session, bool]] | None = None
        identity = GatewayIdentity(directory)
        identity.close()
        self.gateways = Gateways(identity, lambda: self.now_ms / 1000, lambda: self.now_ms)
        self.gateways.loaded()
        self.heartbeat()
        store = SessionStore(self.gateways.owner)
        me: Any = self
        parts = SessionParts(
            router=me,
            live_reader=me,
            counters=Counters(),
            budget=lambda: ConnectionBudget(1 << 30, 1 << 30),
            store=store,
            deliveries=DeliveryParts(me, me, Counters(), lambda: self.now_ms, set()),
            shares=ShareParts(me, me, me),
            qos2=Qos2Parts(me, me, me, me),
        )
        self.sessions = Watched(self.gateways, parts, me, lambda: self.now_ms)
        self.sessions.wrong, self.sessions.steps = [], []
        self.sessions.parts.store.bind(me)
        self.opening = Opening(
            self.sessions, me, wall_clock=lambda: self.now_ms, new_session_id=lambda: "nonce", follow=self.follow
        )
        self.opening.ready.set()
        self.table_is_read = asyncio.Event()
        self.fence = Fence(lambda: self.now_ms / 1000)
        self.upkeep = Upkeep(self.sessions, me, self.opening.ready, self.table_is_read.wait, self.fence)
        self.store = store

    # what the parts use

    def write(
        self, key: bytes, value: bytes | None, headers: Any, *, owner: Any, token: Any = None, partition_key: Any = None
    ) -> None:
        kind = key.decode().partition("/")[0] + "/"
        self.writes.append((kind, value, owner, token))
        self.written.append((kind, value))

    async def follow(self, client_id: str) -> None:
        if self.behind is not None:
            await self.claimed_by(*self.behind)

    def topic_ids(self, filters: Any) -> dict[str, str]:
        return {}

    async def hold(self, wanted: Any) -> dict[str, Any]:
        return {}

    async def ends(self, *_: Any) -> dict[str, Any]:
        return {}

    def offered(self, *_: Any) -> dict[str, Any]:
        return {}

    def advance(self, *_: Any) -> None:
        """Start offsets are of no interest here."""

    of = offered

    def forget(self, outbox: Any) -> None:
        """The live reader loses a subscriber."""

    def submit(self, record: Record, owner: Any, token: Any) -> None:
        self.tokens.append((owner, token))

    def withdraw(self, owner: Any) -> None:
        """Nothing waits here."""

    def publish(self, client_id: str, principal: str, will: PendingWill, then: Callable[[], None]) -> None:
        self.published += 1
        self.wills.append(then)

    # the connection

    def taken_over(self) -> None:
        """Detach the session, as the client does."""
        self.closed += 1
        if self.session is not None:
            self.sessions.leave(self.session, with_will=True)

    def answered(self) -> None:
        """Ignore that PUBRECs are due."""

    # what can be asked, and done

    @property
    def state(self) -> SessionState:
        return self.sessions.state(ID)

    @property
    def session(self) -> Session | None:
        return self.sessions.live.get(ID)

    @property
    def record(self) -> SessionRecord:
        if self.session is not None:
            return self.session.describe()
        return self.sessions.record(ID) or SessionRecord("nonce", "somebody", 0)

    def heartbeat(self) -> None:
        self.gateways.apply("other", GatewayRecord("1", self.now_ms))

    async def settle_down(self) -> None:
        """Run everything that does not wait for an event."""
        loop = asyncio.get_running_loop()
        for _ in range(10):
            turn = loop.create_future()
            loop.call_soon(turn.set_result, None)
            await turn

    async def kafka_answers(self, result: Result = STORED) -> None:
        """Answer the writes of session records, also those that follow from the answers."""
        await self.settle_down()
        while self.writes:
            writes, self.writes = self.writes, []
            for kind, value, owner, token in writes:
                if owner is not None and not (result is not STORED and isinstance(owner, SessionStore)):
                    owner.settle([token], [0], result)
                if result is STORED:
                    self.sessions.apply(self.received(kind, value, self.store._mark))
            await self.settle_down()
        self.attach()

    def attach(self) -> None:
        """Give a finished CONNECT its session."""
        if self.task is not None and self.task.done():
            task, self.task = self.task, None
            if not task.cancelled() and task.exception() is None:
                session, _ = task.result()
                if self.session is session:
                    session.attach(self)  # type: ignore[arg-type]
            elif not task.cancelled():
                assert isinstance(task.exception(), Refused), task.exception()

    def answers(self) -> list[str]:
        """The answers written for the claiming gateway."""
        records = [(kind, decode(InflightRecord, value)) for kind, value in self.written if kind in {INFLIGHT, RELEASE}]
        return ["nothing" if record is None else "final" for _, record in records if record is None or record.final]

    def received(self, kind: str, value: bytes | None, headers: Any = (), name: str = ID) -> Received:
        return Received("__trivium_sessions", (kind + name).encode(), value, headers, self.now_ms, 0, 0)

    async def connect(self, *, clean: bool = False, expiry: int = 60, will: PendingWill | None = WILL) -> None:
        self.task = asyncio.ensure_future(
            self.opening.open(ID, "somebody", clean_start=clean, expiry=expiry, will=will)
        )
        await self.settle_down()

    async def foreign(self, kind: str, record: msgspec.Struct | None, writer: str = OTHER, name: str = ID) -> None:
        value = encode(record) if record is not None else None
        self.sessions.apply(self.received(kind, value, ((GW_OWNER, writer.encode()),), name))
        await self.settle_down()
        self.attach()

    def send_qos_2(self) -> None:
        assert self.session is not None
        inbound_qos2 = self.session.inbound()
        inbound_qos2._persisted_topics.add("t")
        inbound_qos2.publish(Record("t", None, b""), 1, Slot(1, None, 2))

    async def happen(self, event: Event) -> None:
        record = self.record
        match event:
            case Event.CONNECT | Event.CLAIM:
                await self.connect()
            case Event.READY:
                await self.kafka_answers()
            case Event.FAIL:
                await self.kafka_answers(Result(Outcome.BUSY))
            case Event.DISCONNECT:
                assert self.session is not None
                self.sessions.leave(self.session, with_will=True)
            case Event.END if self.state is SessionState.OPENING:
                await self.kafka_answers(Result(Outcome.BUSY))
            case Event.END if self.state is SessionState.CONNECTED:
                assert self.session is not None
                self.session.expiry = 0
                self.sessions.leave(self.session, with_will=True)
            case Event.END if self.state in {SessionState.SAVING, SessionState.AWAY}:
                self.now_ms += 61_000
                self.sessions.keep_deadlines()
            case Event.END:
                self.sessions.end(ID)
            case Event.WILL:
                self.now_ms += 11_000
                self.sessions.keep_deadlines()
            case Event.SAVED:
                await self.kafka_answers()
                self.upkeep._save_positions()
                await self.kafka_answers()
                self.upkeep._save_positions()
            case Event.RELEASED if self.state is SessionState.ELSEWHERE:
                await self.foreign(INFLIGHT, InflightRecord("nonce", record.epoch, released_by=OTHER))
                await self.connect()
            case Event.RELEASED:
                await self.kafka_answers()
                await self.foreign(INFLIGHT, InflightRecord("nonce", record.epoch, final=True))
                self.stop_connect()
            case Event.OWNER_DIED:
                self.now_ms += int(SILENT_S * 1000) + 1000
                self.gateways.mark_dead()
                await self.upkeep._take_over_from(self.gateways.takes_over)
            case Event.CLAIMED | Event.MOVED:
                asked = (self.sessions.owner,) if event is Event.CLAIMED else ()
                await self.claimed_by(OTHER, record.epoch + 1, *asked, gone=event is Event.MOVED)
            case Event.RIVAL:
                await self.claimed_by(OTHER, record.epoch)
            case Event.OUTDATED:
                await self.foreign(SESSION, SessionRecord("nonce", "somebody", 0, OTHER, 60))
            case Event.DELETED:
                await self.foreign(SESSION, None)

    async def claimed_by(self, gateway: str, epoch: int, *asked: str, gone: bool = False) -> None:
        record = SessionRecord("nonce", "somebody", epoch, gateway, 60, self.now_ms if gone else None)
        record = replace(record, will=self.record.will, predecessors=asked)
        await self.foreign(SESSION, record, gateway)

    def store_qos_2(self) -> None:
        owner, token = self.tokens.pop()
        owner.settle([token], [0], Result(Outcome.STORED, 0))

    def stop_connect(self) -> None:
        """Cancel the CONNECT: the client has not waited for CONNACK."""
        if self.task is not None:
            self.task.cancel()
            self.task = None

    async def close(self) -> None:
        self.stop_connect()
        await self.settle_down()
        self.store.stopped = True


AT_HOME = (Event.CONNECT, Event.READY)
PATHS: dict[SessionState, tuple[Event, ...]] = {
    SessionState.ABSENT: (),
    SessionState.ELSEWHERE: (Event.CLAIMED,),
    SessionState.CLAIMING: (Event.CLAIMED, Event.CLAIM),
    SessionState.OPENING: (Event.CONNECT,),
    SessionState.CONNECTED: AT_HOME,
    SessionState.SAVING: (*AT_HOME, Event.DISCONNECT),
    SessionState.AWAY: (*AT_HOME, Event.DISCONNECT, Event.SAVED),
}
CELLS = [(state, event) for state, row in TABLE.items() for event in row]


async def walk(world: World, state: SessionState, event: Event) -> None:
    """Bring the client id into a state from which the event can follow."""
    path = PATHS[state]
    if event is Event.FAIL:
        path = (*PATHS[SessionState.AWAY], Event.CONNECT)
    elif (state, event) == (SessionState.AWAY, Event.CLAIM):
        path = PATHS[SessionState.CLAIMING]
    elif (state, event) == (SessionState.ELSEWHERE, Event.RELEASED):
        path = (Event.MOVED,)  # whom its record does not ask for anybody
    elif state is SessionState.OPENING and event in {Event.OUTDATED, Event.DELETED}:
        path = (*PATHS[SessionState.AWAY], Event.CONNECT)
    for before in path:
        await world.happen(before)
    if state is SessionState.AWAY and event is Event.CLAIM:
        world.stop_connect()  # nobody has answered
    await world.kafka_answers() if state not in {
        SessionState.OPENING,
        SessionState.CLAIMING,
    } else await world.settle_down()
    if state is SessionState.OPENING and event in {Event.OUTDATED, Event.DELETED}:
        world.sessions._unread.clear()  # ours is before it in the log
    elif state is SessionState.SAVING and event is Event.RIVAL:
        world.sessions._unread[ID] = world.record.epoch  # ours is behind it in the log


def test_every_state_can_be_reached_and_what_others_write_has_an_answer() -> None:
    assert set(TABLE) == set(SessionState) == set(PATHS)
    assert {action for row in TABLE.values() for action, _ in row.values()} == set(Action)
    assert {after for row in TABLE.values() for _, after in row.values()} == set(SessionState)
    foreign = (Event.CLAIMED, Event.MOVED, Event.OUTDATED, Event.DELETED)  # from other gateways' records
    missing = {(state, event) for state, row in TABLE.items() for event in foreign if event not in row}
    assert missing == {(SessionState.ABSENT, Event.OUTDATED)}


@pytest.mark.clause("MQTT-3.1.2-4", "MQTT-3.1.2-8", "MQTT-3.1.4-3")
@pytest.mark.parametrize(("state", "event"), CELLS, ids=[f"{state.name}-{event.name}" for state, event in CELLS])
async def test_every_cell(state: SessionState, event: Event, tmp_path: Path) -> None:
    world = World(tmp_path)
    await walk(world, state, event)
    assert world.state is state
    published, closed, steps = world.published, world.closed, len(world.sessions.steps)
    before, epoch = world.store.records.get(ID), world.record.epoch
    had_will = world.record.will is not None and state is not SessionState.OPENING
    world.written.clear()
    await world.happen(event)
    action, after = TABLE[state][event]
    assert world.sessions.steps[steps] == (state, event, action)
    assert world.sessions.wrong == []
    # What follows at once, as IDLE does when nothing is on its way to Kafka, begins in the state that the table says.
    assert [*(step[0] for step in world.sessions.steps[steps + 1 :]), world.state][0] is after
    sessions = [decode(SessionRecord, value) for kind, value in world.written if kind == SESSION]
    inflight = [decode(InflightRecord, value) for kind, value in world.written if kind == INFLIGHT]
    mine = [record for record in sessions if record is not None and record.owner == world.sessions.owner]
    assert world.published - published == (action is Action.PUBLISH_WILL or (action is Action.END and had_will))
    assert world.closed - closed == (action is Action.HAND_OVER and state is SessionState.CONNECTED)
    handed_over = action in {Action.HAND_OVER, Action.SET_ASIDE}
    assert any(one is not None and one.final for one in inflight) == handed_over
    assert ((RELEASE, None) in world.written) == (action is Action.RELEASE)
    if action in {Action.CLAIM, Action.WRITE, Action.SAVE, Action.TAKE_OVER, Action.SET_ASIDE}:
        assert mine
    if action is Action.CLAIM:
        assert [(record.epoch, record.predecessors) for record in mine] == [(epoch + 1, (OTHER,))]
    if action is Action.SET_ASIDE:
        assert world.record.predecessors == (OTHER,)
    if action in {Action.FOLLOW, Action.RELEASE, Action.HAND_OVER}:
        assert world.record.owner == OTHER
    if action is Action.FORGET:
        assert ID not in world.store.records or state is SessionState.CLAIMING, "there the CONNECT makes a new one"
    if action is Action.NOTHING:
        assert (world.written, world.store.records.get(ID)) == ([], before)
    if action is Action.END and before is not None:
        for then in world.wills:
            then()
        assert (SESSION, None) in world.written
    await world.close()


# The protocol of docs/spec/SessionTakeover.tla, action by action, in moments that only luck would bring elsewhere.


async def connected(world: World) -> None:
    await world.happen(Event.CONNECT)
    await world.happen(Event.READY)


async def test_connect_takes_a_session_that_no_gateway_owns(tmp_path: Path) -> None:
    """For example restored by a tool."""
    world = World(tmp_path)
    await world.foreign(SESSION, SessionRecord("nonce", "somebody", 3, "", 60, world.now_ms))
    assert world.state is SessionState.ELSEWHERE
    await world.connect()
    await world.kafka_answers()
    assert (world.state, world.record.epoch, world.sessions.wrong) == (SessionState.CONNECTED, 4, [])
    await world.close()


async def test_ended_sessions_leave_few_deadlines_behind(tmp_path: Path) -> None:
    """A client that ends its sessions early, under ever new client ids, must not fill the memory until they expire."""
    world = World(tmp_path)
    for number in range(3000):
        name = f"c-{number}"
        record = SessionRecord("n", "somebody", 1, world.sessions.owner, 3600, world.now_ms)
        world.store.records[name] = encode(record)
        world.sessions._deadlines.watch(name, record)
        world.sessions.end(name)
    deadlines = world.sessions._deadlines
    assert not deadlines._noted
    assert len(deadlines._heap) <= 1000
    await world.close()


async def test_connect_names_everybody_who_may_have_a_message_on_the_way(tmp_path: Path) -> None:
    """Connect: the owner, and the gateways that have not answered the owner's own claim."""
    world = World(tmp_path)
    await world.claimed_by(OTHER, 5, "third/1")
    await world.happen(Event.CLAIM)
    assert (world.record.epoch, world.record.predecessors) == (6, (OTHER, "third/1"))
    await world.close()


@pytest.mark.parametrize("kind", [INFLIGHT, RELEASE])
async def test_have_waits_for_an_answer_that_is_later_than_the_claim(kind: str, tmp_path: Path) -> None:
    """Acquire: what a gateway wrote before it read the claim does not answer the claim."""
    world = World(tmp_path)
    answer = InflightRecord("nonce", 5, final=True) if kind == INFLIGHT else None
    await world.claimed_by(OTHER, 5)
    await world.happen(Event.CLAIM)
    await world.foreign(kind, answer)
    await world.kafka_answers()
    assert world.sessions.state(ID) is SessionState.CLAIMING, "that was before our claim"
    await world.foreign(kind, answer, "third/1")
    assert world.sessions.state(ID) is SessionState.CLAIMING, "that was not asked"
    await world.foreign(kind, answer)
    await world.kafka_answers()
    assert world.sessions.state(ID) is SessionState.CONNECTED
    assert world.record.predecessors == ()
    await world.close()


async def test_connect_reads_the_table_first(tmp_path: Path) -> None:
    """Connect: another gateway has had the session since; our records of it are outdated."""
    world = World(tmp_path)
    await connected(world)
    await world.happen(Event.DISCONNECT)
    await world.happen(Event.SAVED)
    world.behind = (OTHER, world.record.epoch + 1)
    await world.connect()
    await world.settle_down()
    assert world.sessions.state(ID) is SessionState.CLAIMING
    assert world.record.predecessors == (OTHER,)
    await world.close()


async def test_have_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    """Acquire: the asked process is dead when a new process of its gateway sends heartbeats."""
    world = World(tmp_path)
    await world.claimed_by(OTHER, 5)
    await world.happen(Event.CLAIM)
    await world.kafka_answers()
    assert world.sessions.state(ID) is SessionState.CLAIMING
    await world.foreign(GATEWAY, GatewayRecord("2", world.now_ms), name="other")
    await world.kafka_answers()
    assert world.sessions.state(ID) is SessionState.CONNECTED
    await world.close()


async def test_have_waits_for_what_we_hand_over_ourselves(tmp_path: Path) -> None:
    """Acquire: the client returns before Kafka has answered for its message; sent again, it is not stored twice."""
    world = World(tmp_path)
    await connected(world)
    world.send_qos_2()
    await world.happen(Event.CLAIMED)
    await world.connect()
    await world.kafka_answers()
    await world.foreign(RELEASE, None)
    await world.kafka_answers()
    assert world.sessions.state(ID) is SessionState.CLAIMING
    world.store_qos_2()
    await world.kafka_answers()
    assert world.sessions.state(ID) is SessionState.CONNECTED
    world.send_qos_2()
    assert world.tokens == [], "PUBREC, and nothing to Kafka"
    await world.close()


async def test_a_claim_without_an_answer_is_refused_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave: 0x88 while a live gateway does not answer; the next CONNECT asks it again."""
    monkeypatch.setattr("gateway.mqtt.registry.opening.RELEASE_S", 0.01)
    world = World(tmp_path)
    await world.claimed_by(OTHER, 5)
    await world.connect()
    assert world.task is not None
    with pytest.raises(Refused, match="in flight"):
        await world.task
    assert (world.sessions.state(ID), world.record.predecessors) == (SessionState.AWAY, (OTHER,))
    world.task = None
    await world.happen(Event.CLAIM)
    assert (world.record.epoch, world.record.predecessors) == (7, (OTHER,))
    world.stop_connect()
    await world.settle_down()
    await world.connect(clean=True)
    await wait_until(lambda: world.writes and world.sessions.state(ID) is SessionState.OPENING)
    await world.kafka_answers()
    assert world.sessions.state(ID) is SessionState.CONNECTED, "nothing of a session that ends matters"
    await world.close()


async def test_a_session_that_ends_while_it_is_claimed_is_a_new_one(tmp_path: Path) -> None:
    """The client has ended it elsewhere and connects here: no other gateway was faster."""
    world = World(tmp_path)
    await world.claimed_by(OTHER, 5)
    await world.connect()
    assert (world.state, world.record.epoch) == (SessionState.CLAIMING, 6)
    task = world.task
    assert task is not None
    await world.happen(Event.DELETED)
    await world.kafka_answers()
    assert world.state is SessionState.CONNECTED
    assert not task.result()[1], "what has ended is not present"
    assert world.record.epoch == 7, "the claim is known to other gateways"
    assert not world.sessions.wrong
    await world.close()


class Log:
    """Kafka's log of QoS 2 messages, which is slow to read."""

    def __init__(self) -> None:
        self.is_read = asyncio.Event()
        self.readings: list[InflightRecord] = []

    async def recover(self, records: dict[str, InflightRecord]) -> dict[str, InflightRecord]:
        self.readings += records.values()
        await self.is_read.wait()
        return {client_id: complete(record, ()) for client_id, record in records.items()}

    async def confirm(self, inbound_qos2: Any) -> None:
        await self.is_read.wait()
        inbound_qos2.confirm(())


def unclear(epoch: int, **fields: Any) -> InflightRecord:
    """An in-flight record that does not cover all messages in the log."""
    return InflightRecord("nonce", epoch, scan_from={"t": {0: 0}}, **fields)


async def opened_with_a_slow_log(world: World) -> Log:
    """A dead gateway may have stored messages; the client connects here while we scan the log for them."""
    log = Log()
    world.opening._recovery = log  # type: ignore[assignment]
    await connected(world)
    await world.happen(Event.DISCONNECT)
    await world.happen(Event.SAVED)
    world.store.inflight[ID] = encode(unclear(world.record.epoch))
    await world.connect()
    assert log.readings
    return log


@pytest.mark.parametrize("end", ["deleted elsewhere", "expired"])
async def test_a_session_that_ends_while_its_log_is_read_is_a_new_one(tmp_path: Path, end: str) -> None:
    world = World(tmp_path)
    log = await opened_with_a_slow_log(world)
    before = world.record
    if end == "deleted elsewhere":
        await world.happen(Event.DELETED)
    else:
        world.now_ms += 1000 * before.expiry
        world.sessions.keep_deadlines()
    task = world.task
    assert task is not None
    log.is_read.set()
    await world.kafka_answers()
    assert not task.result()[1], "what has ended is not present"
    assert world.state is SessionState.CONNECTED
    assert not world.sessions.wrong
    await world.close()


async def test_what_comes_while_the_log_is_read_is_looked_at_too(tmp_path: Path) -> None:
    """The former gateway's last in-flight record comes late; it may name more messages, or finished ones."""
    world = World(tmp_path)
    log = await opened_with_a_slow_log(world)
    await world.foreign(INFLIGHT, unclear(world.record.epoch, low_water_mark=3, open={7: 2}))
    task = world.task
    assert task is not None
    log.is_read.set()
    await world.kafka_answers()
    assert [one.low_water_mark for one in log.readings] == [0, 3]
    session, present = task.result()
    assert present
    assert session.inbound().open_ids == [7]
    await world.close()


async def test_a_session_that_expires_while_what_is_uncertain_is_looked_for_is_a_new_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    log = Log()
    world.opening._recovery = log  # type: ignore[assignment]
    await connected(world)
    world.send_qos_2()
    world.reports_failures = False  # in 3.1.1 the client sends it again
    owner, token = world.tokens.pop()
    owner.settle([token], [], Result(Outcome.BUSY))
    await world.happen(Event.DISCONNECT)
    await world.connect()
    world.now_ms += 1000 * world.record.expiry
    world.sessions.keep_deadlines()
    task = world.task
    assert task is not None
    log.is_read.set()
    await world.kafka_answers()
    assert not task.result()[1], "what has ended is not present"
    assert not world.sessions.wrong
    await world.close()


async def test_answer_says_nothing_while_a_message_is_on_the_way(tmp_path: Path) -> None:
    """Answer: once, with the session's state, after Kafka's answer; also if other gateways claim it meanwhile."""
    world = World(tmp_path)
    await connected(world)
    world.send_qos_2()
    world.written.clear()
    await world.happen(Event.CLAIMED)
    await world.claimed_by("third/1", world.record.epoch + 1, OTHER, world.sessions.owner)
    await world.connect()  # a claim of our own, which is lost
    await world.claimed_by("third/1", world.record.epoch + 1, world.sessions.owner)
    assert world.answers() == []
    world.store_qos_2()
    assert world.answers() == ["final"]
    await world.close()


async def test_answer_without_anything_does_not_write_over_what_others_know(tmp_path: Path) -> None:
    """Answer: an older in-flight record would hide a message that the owner has stored since."""
    world = World(tmp_path)
    await world.claimed_by(OTHER, 5)
    await world.foreign(INFLIGHT, InflightRecord("nonce", 5, low_water_mark=1, open={1: 0}))
    await world.claimed_by("third/1", 6, OTHER, world.sessions.owner)
    assert world.answers() == ["nothing"]
    await world.close()


async def test_read_keeps_the_in_flight_record_of_the_higher_epoch(tmp_path: Path) -> None:
    """Read: a gateway that was frozen writes its last record late; it is overwritten."""
    world = World(tmp_path)
    await connected(world)
    await world.happen(Event.DISCONNECT)
    await world.happen(Event.SAVED)
    mine = world.store.inflight[ID]
    world.written.clear()
    await world.foreign(INFLIGHT, InflightRecord("nonce", 0, final=True))
    assert world.store.inflight[ID] == mine
    assert world.written == [(INFLIGHT, mine)]
    await world.close()


async def test_let_go_is_one_write_that_waits_for_what_is_on_the_way(tmp_path: Path) -> None:
    """ReleaseSession: the gateway stops. The session's last in-flight record releases it, but not too early."""
    world = World(tmp_path)
    await connected(world)
    world.send_qos_2()
    world.store.leaving = True
    world.written.clear()
    await world.happen(Event.DISCONNECT)
    await world.kafka_answers()

    def released() -> list[str]:
        return [
            record.released_by
            for kind, value in world.written
            if (record := decode(InflightRecord, value)) and kind == INFLIGHT
        ]

    assert set(released()) == {""}
    world.store_qos_2()
    world.upkeep._save_positions()
    await world.kafka_answers()
    assert released()[-1] == world.sessions.owner
    world.upkeep._save_positions()
    assert world.state is SessionState.AWAY, "and nothing is left of it but its records"
    await connected(world)  # it is back before the gateway has stopped
    assert released()[-1] == ""
    await world.close()


@pytest.mark.parametrize(
    ("epoch", "by", "asked", "state"),
    [
        (5, OTHER, (), SessionState.OPENING),
        (4, OTHER, (), SessionState.CLAIMING),  # it has had the session again since
        (5, "third/1", (), SessionState.CLAIMING),  # not the owner's
        (5, OTHER, ("third/1",), SessionState.CLAIMING),  # who has not answered its owner
    ],
)
async def test_connect_asks_nobody_when_the_owner_has_let_go(
    epoch: int, by: str, asked: tuple[str, ...], state: SessionState, tmp_path: Path
) -> None:
    """Connect: the session was released by a stopping gateway, which is still alive."""
    world = World(tmp_path)
    world.gateways.apply("third", GatewayRecord("1", world.now_ms))
    await world.claimed_by(OTHER, 5, *asked, gone=True)
    await world.foreign(INFLIGHT, InflightRecord("nonce", epoch, released_by=by), by)
    world.written.clear()
    await world.connect()
    assert world.state is state
    written = [decode(SessionRecord, value) for kind, value in world.written if kind == SESSION]
    assert [(record and record.epoch, record and record.owner) for record in written] == [(6, world.sessions.owner)]
    await world.close()


async def test_read_asks_a_rival_too(tmp_path: Path) -> None:
    """Read: two claims with one epoch; the earlier may be answered and served before the later is read."""
    world = World(tmp_path)
    await world.claimed_by(OTHER, 5)
    await world.happen(Event.CLAIM)
    world.gateways.apply("third", GatewayRecord("1", world.now_ms))
    await world.claimed_by("third/1", 6, OTHER)
    await world.kafka_answers()
    await world.foreign(RELEASE, None)
    assert world.sessions.state(ID) is SessionState.CLAIMING
    await world.foreign(RELEASE, None, "third/1")
    await world.kafka_answers()
    assert world.sessions.state(ID) is SessionState.CONNECTED
    await world.close()


async def test_caught_up_comes_before_anybody_is_called_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CaughtUp: a process that was frozen has no recent heartbeats, and would take all sessions from live gateways."""
    monkeypatch.setattr("gateway.mqtt.registry.upkeep.TICK_S", 0.001)
    monkeypatch.setattr("gateway.runtime.fence.TICK_S", 0.001)
    world = World(tmp_path)
    await world.claimed_by(OTHER, 5)
    loaded = asyncio.Event()
    running = asyncio.ensure_future(world.upkeep.run(loaded))
    loaded.set()
    while world.gateways.changed:  # until it has run for long enough to tell who is dead
        world.now_ms += int(FROZEN_S * 1000) - 1
        world.heartbeat()
        await wait_until(lambda: world.fence._ran == world.now_ms / 1000)
    world.now_ms += int(SILENT_S * 1000) + 1000  # SIGSTOP, SIGCONT
    await wait_until(lambda: not world.opening.ready.is_set())
    await world.connect()
    assert world.sessions.state(ID) is SessionState.ELSEWHERE, "not served before"
    world.heartbeat()
    world.table_is_read.set()
    assert not world.fence.is_open
    await world.kafka_answers()  # our heartbeat comes first
    await wait_until(lambda: world.sessions.state(ID) is SessionState.CLAIMING)
    assert world.record.predecessors == (OTHER,), "asked, as it is alive"
    assert [step for step in world.sessions.steps if step[1] is Event.OWNER_DIED] == []
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.close()


async def test_take_over_asks_the_living(tmp_path: Path) -> None:
    """TakeOver: the dead owner had claimed the session from a live gateway, which may have a message in flight."""
    world = World(tmp_path)
    world.gateways.apply("third", GatewayRecord("1", world.now_ms))
    await world.claimed_by(OTHER, 5, "third/1")
    world.now_ms += int(SILENT_S * 1000) + 1000
    world.gateways.apply("third", GatewayRecord("1", world.now_ms))
    world.gateways.mark_dead()
    await world.upkeep._take_over_from(lambda owner: owner == OTHER)
    assert (world.sessions.state(ID), world.record.predecessors) == (SessionState.AWAY, ("third/1",))
    await world.close()


def possible(world: World) -> list[str]:
    """The events that can happen now in this world, independent of the table."""
    found = ["claimed", "moved", "outdated", "deleted", "rival", "final", "let", "dead", "alive", "11s", "61s"]
    found += ["give-up"] if world.task is not None else ["connect", "clean", "short"]
    found += ["kafka", "kafka-fails"] if world.writes else []
    found += ["leave", "qos2"] if world.state is SessionState.CONNECTED and not world.tokens else []
    found += ["qos2-stored"] if world.tokens else []
    found += ["tick"] * 3 if world.sessions.saving else []
    return found


async def outside(world: World, name: str) -> None:
    """One of these."""
    match name:
        case "connect" | "clean" | "short":
            expiry = 0 if name == "short" else 60
            await world.connect(clean=name == "clean", expiry=expiry, will=WILL if expiry else None)
        case "kafka":
            await world.kafka_answers()
        case "kafka-fails":
            await world.kafka_answers(Result(Outcome.BUSY))
        case "leave":
            await world.happen(Event.DISCONNECT)
        case "qos2":
            world.send_qos_2()
        case "qos2-stored":
            world.store_qos_2()
        case "let":
            await world.foreign(RELEASE, None)
        case "claimed" | "moved" | "outdated" | "deleted" | "rival":
            await world.happen(Event[name.upper()])
        case "final":
            await world.foreign(INFLIGHT, InflightRecord("nonce", world.record.epoch, final=True))
        case "dead":
            await world.happen(Event.OWNER_DIED)
        case "alive":
            world.heartbeat()
        case "tick":
            world.upkeep._save_positions()
        case "give-up":
            world.stop_connect()
        case _:
            world.now_ms += 1000 * int(name.removesuffix("s"))
            world.sessions.keep_deadlines()
    await world.settle_down()
    world.attach()


@settings(max_examples=100, deadline=None)
@given(picks=st.lists(st.integers(0, 251), min_size=10, max_size=30))
def test_nothing_leaves_the_table(picks: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    """For events in any order: every event has a cell, and the state is always the table's."""

    async def run() -> None:
        world = World(tmp_path_factory.getbasetemp() / "lifecycle")
        for pick in picks:
            names = possible(world)
            await outside(world, names[pick % len(names)])
            assert world.sessions.wrong == []
            assert world.sessions.expected in {None, world.state}
        await world.close()
        assert world.sessions.wrong == []

    asyncio.run(run())
