"""The life-cycle of a session as a table: every cell is walked on a real registry, and nothing ever leaves it.

Kafka, the other gateway and the clock are lists and numbers here, so that each moment between two answers can be
stopped at. `test_two_gateways.py` and `loadtest.scenarios.kills` show the same with Kafka and processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcontrol.budget import ConnectionBudget
from gateway.identity import GatewayIdentity
from gateway.kafka.contracts import Refused, Result
from gateway.mqtt.counters import Counters
from gateway.mqtt.registry.heartbeats import SILENT_S, Gateways
from gateway.mqtt.registry.opening import Opening
from gateway.mqtt.registry.session_registry import Sessions
from gateway.mqtt.registry.upkeep import Upkeep
from gateway.mqtt.session.acks import Slot
from gateway.mqtt.session.deliveries import DeliveryParts
from gateway.mqtt.session.lifecycle import FOREIGN, TABLE, Action, Event, State
from gateway.mqtt.session.qos2 import Qos2Parts
from gateway.mqtt.session.session import Session, SessionParts
from gateway.mqtt.session.shared import ShareParts
from gateway.mqtt.state.records import (
    INFLIGHT,
    SESSION,
    GatewayRecord,
    InflightRecord,
    PendingWill,
    SessionRecord,
    decode_inflight,
    decode_session,
    encode,
)
from gateway.mqtt.state.store import SessionStore
from mapping.outcomes import Outcome
from mapping.record import Received, Record
from protocols.mqtt.packets import Version, Will
from protocols.mqtt.properties import Properties

ID = "client"
OTHER = "other/1"
WILL = PendingWill(Will("t/will", b"gone", 0, properties=Properties(will_delay_interval=10)), Version.V5)
STORED = Result(Outcome.STORED)


class Watched(Sessions):
    """Sessions whose steps are noted."""

    expected: State | None = None
    wrong: list[str]
    steps: list[tuple[State, Event, Action]]

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
        self.sessions.bind(me)
        self.opening = Opening(
            self.sessions, me, wall_clock=lambda: self.now_ms, new_session_id=lambda: "nonce", follow=self.follow
        )
        self.opening.ready.set()
        self.upkeep = Upkeep(self.sessions, me, self.opening.ready)
        self.store = store

    # what the parts use

    def write(
        self, key: bytes, value: bytes | None, headers: Any, *, owner: Any, token: Any = None, place: Any = None
    ) -> None:
        kind = key.decode().partition("/")[0] + "/"
        self.writes.append((kind, value, owner, token))
        self.written.append((kind, value))

    async def follow(self, client_id: str) -> None:
        """Nothing is on its way here."""

    def topic_ids(self, filters: Any) -> dict[str, str]:
        return {}

    async def hold(self, wanted: Any) -> dict[str, Any]:
        return {}

    async def ends(self, *_: Any) -> dict[str, Any]:
        return {}

    def places(self, *_: Any) -> dict[str, Any]:
        return {}

    def passed(self, *_: Any) -> None:
        """Start offsets are of no interest here."""

    of = places

    def forget(self, outbox: Any) -> None:
        """The live reader loses a subscriber."""

    def submit(self, record: Record, owner: Any, token: Any) -> None:
        self.tokens.append((owner, token))

    def publish(self, client_id: str, principal: str, will: PendingWill, then: Callable[[], None]) -> None:
        self.published += 1
        self.wills.append(then)

    # the connection

    def taken_over(self) -> None:
        """As the client does it: it leaves its session."""
        self.closed += 1
        if self.session is not None:
            self.sessions.leave(self.session, with_will=True)

    def answered(self) -> None:
        """PUBRECs are due."""

    # what can be asked, and done

    @property
    def state(self) -> State:
        return self.sessions.state(ID)

    @property
    def session(self) -> Session | None:
        return self.sessions.live.get(ID)

    @property
    def record(self) -> SessionRecord:
        if self.session is not None:
            return self.session.describe(self.sessions.owner)
        return self.sessions.record(ID) or SessionRecord("nonce", "somebody", 0)

    def heartbeat(self) -> None:
        self.gateways.apply("other", GatewayRecord("1", self.now_ms))

    async def settle_down(self) -> None:
        """Let everything go on that need not wait for an event."""
        loop = asyncio.get_running_loop()
        for _ in range(10):
            turn = loop.create_future()
            loop.call_soon(turn.set_result, None)
            await turn

    async def kafka_answers(self, result: Result = STORED) -> None:
        """For the writes of sessions' records, also for those that follow from the answers."""
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
        """A CONNECT that has come to its end gets its session."""
        if self.task is not None and self.task.done():
            task, self.task = self.task, None
            if not task.cancelled() and task.exception() is None:
                session, _ = task.result()
                if self.session is session:
                    session.attach(self)  # type: ignore[arg-type]
            elif not task.cancelled():
                assert isinstance(task.exception(), Refused), task.exception()

    def received(self, kind: str, value: bytes | None, headers: Any = ()) -> Received:
        return Received("__trivium_sessions", (kind + ID).encode(), value, headers, self.now_ms, 0, 0)

    async def connect(self, *, clean: bool = False, expiry: int = 60, will: PendingWill | None = WILL) -> None:
        self.task = asyncio.ensure_future(
            self.opening.open(ID, "somebody", clean_start=clean, expiry=expiry, will=will)
        )
        await self.settle_down()

    async def foreign(self, kind: str, record: SessionRecord | InflightRecord | None) -> None:
        self.sessions.apply(self.received(kind, encode(record) if record is not None else None))
        await self.settle_down()
        self.attach()

    def send_qos_2(self) -> None:
        assert self.session is not None
        inbound_qos2 = self.session.receiving()
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
            case Event.END if self.state is State.OPENING:
                await self.kafka_answers(Result(Outcome.BUSY))
            case Event.END if self.state is State.CONNECTED:
                assert self.session is not None
                self.session.expiry = 0
                self.sessions.leave(self.session, with_will=True)
            case Event.END if self.state in {State.SAVING, State.AWAY}:
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
            case Event.RELEASED:
                await self.foreign(INFLIGHT, InflightRecord("nonce", record.epoch, final=True))
                self.stop_connect()
            case Event.ORPHANED:
                self.now_ms += int(SILENT_S * 1000) + 1000
                self.gateways.mark_dead()
                await self.upkeep._take_orphans(self.gateways.takes_over)
            case Event.IDLE:
                owner, token = self.tokens.pop()
                owner.settle([token], [0], Result(Outcome.STORED, 0))
            case Event.CLAIMED | Event.MOVED:
                gone_at = None if event is Event.CLAIMED else self.now_ms
                await self.foreign(
                    SESSION,
                    SessionRecord("nonce", "somebody", record.epoch + 1, OTHER, 60, gone_at, will=record.will),
                )
            case Event.OUTDATED:
                await self.foreign(SESSION, SessionRecord("nonce", "somebody", 0, OTHER, 60))
            case Event.DELETED:
                await self.foreign(SESSION, None)

    def stop_connect(self) -> None:
        """The client has not waited for its CONNACK."""
        if self.task is not None:
            self.task.cancel()
            self.task = None

    async def close(self) -> None:
        self.stop_connect()
        await self.settle_down()
        self.store.stopped = True


BACK_ELSEWHERE = (Event.MOVED,)  # and its connection there has ended
AT_HOME = (Event.CONNECT, Event.READY)
PATHS: dict[State, tuple[Event, ...]] = {
    State.ABSENT: (),
    State.ELSEWHERE: (Event.CLAIMED,),
    State.CLAIMING: (Event.CLAIMED, Event.CLAIM),
    State.OPENING: (Event.CONNECT,),
    State.CONNECTED: AT_HOME,
    State.SAVING: (*AT_HOME, Event.DISCONNECT),
    State.AWAY: (*AT_HOME, Event.DISCONNECT, Event.SAVED),
    State.HANDING_OVER: (*AT_HOME, Event.CLAIMED),
}
CELLS = [(state, event) for state, row in TABLE.items() for event in row]


async def walk(world: World, state: State, event: Event) -> None:
    """Bring the client id into a state, in a way in which the event can follow."""
    path = PATHS[state]
    if event is Event.CONNECT and state is State.ELSEWHERE:
        path = BACK_ELSEWHERE
    elif event is Event.CONNECT and state is State.HANDING_OVER:
        path = (*AT_HOME, Event.MOVED)
    elif event is Event.FAIL:
        path = (*PATHS[State.AWAY], Event.CONNECT)
    elif (state, event) == (State.CLAIMING, Event.IDLE):
        path = (*PATHS[State.HANDING_OVER], Event.CLAIM)
    elif state is State.OPENING and event in {Event.OUTDATED, Event.DELETED}:
        path = (*PATHS[State.AWAY], Event.CONNECT)
    for before in path:
        if before in {Event.CLAIMED, Event.MOVED} and world.state is State.CONNECTED:
            world.send_qos_2()
        await world.happen(before)
    await world.kafka_answers() if state not in {State.OPENING, State.CLAIMING} else await world.settle_down()
    if state is State.OPENING and event in {Event.OUTDATED, Event.DELETED}:
        world.sessions._unread.clear()  # ours is before it in the log


def test_every_state_can_be_reached_and_what_others_write_has_an_answer() -> None:
    assert set(TABLE) == set(State) == set(PATHS)
    assert {action for row in TABLE.values() for action, _ in row.values()} == set(Action)
    assert {after for row in TABLE.values() for _, after in row.values()} == set(State)
    missing = {(state, event) for state, row in TABLE.items() for event in FOREIGN if event not in row}
    assert missing == {(State.ABSENT, Event.OUTDATED)}


@pytest.mark.clause("MQTT-3.1.2-4", "MQTT-3.1.2-8", "MQTT-3.1.4-3")
@pytest.mark.parametrize(("state", "event"), CELLS, ids=[f"{state.name}-{event.name}" for state, event in CELLS])
async def test_every_cell(state: State, event: Event, tmp_path: Path) -> None:
    world = World(tmp_path)
    await walk(world, state, event)
    assert world.state is state
    published, closed, steps = world.published, world.closed, len(world.sessions.steps)
    before, epoch = world.store.records.get(ID), world.record.epoch
    had_will = world.record.will is not None and state is not State.OPENING
    world.written.clear()
    await world.happen(event)
    action, after = TABLE[state][event]
    assert world.sessions.steps[steps] == (state, event, action)
    assert world.sessions.wrong == []
    # What follows at once, as IDLE does when nothing is on its way to Kafka, begins in the state that the table says.
    assert [*(step[0] for step in world.sessions.steps[steps + 1 :]), world.state][0] is after
    sessions = [decode_session(value) for kind, value in world.written if kind == SESSION]
    inflight = [decode_inflight(value) for kind, value in world.written if kind == INFLIGHT]
    mine = [record for record in sessions if record is not None and record.owner == world.sessions.owner]
    assert world.published - published == (action is Action.PUBLISH_WILL or (action is Action.END and had_will))
    assert world.closed - closed == (action is Action.HAND_OVER and state is State.CONNECTED)
    assert (
        any(one is not None and one.final for one in inflight)
        == (action is Action.RELEASE and (event is Event.IDLE or state is State.AWAY))
        or action is Action.HAND_OVER
    )
    if action in {Action.CLAIM, Action.WRITE, Action.SAVE, Action.TAKE_OVER}:
        assert mine
    if action is Action.CLAIM:
        assert [record.epoch for record in mine] == [epoch + 1]
    if action in {Action.FOLLOW, Action.RELEASE, Action.HAND_OVER} and event is not Event.IDLE:
        assert world.record.owner == OTHER
    if action is Action.FORGET:
        assert ID not in world.store.records
    if action is Action.NOTHING:
        assert (world.written, world.store.records.get(ID)) == ([], before)
    if action is Action.END and before is not None:
        for then in world.wills:
            then()
        assert (SESSION, None) in world.written
    await world.close()


def possible(world: World) -> list[str]:
    """What can happen now, as the world is: not what the table allows."""
    found = ["claimed", "moved", "outdated", "deleted", "final", "dead", "alive", "11s", "61s"]
    found += ["give-up"] if world.task is not None else ["connect", "clean", "short"]
    found += ["kafka", "kafka-fails"] if world.writes else []
    found += ["leave", "qos2"] if world.state is State.CONNECTED and not world.tokens else []
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
            await world.happen(Event.IDLE)
        case "claimed" | "moved" | "outdated" | "deleted":
            await world.happen(Event[name.upper()])
        case "final":
            await world.foreign(INFLIGHT, InflightRecord("nonce", world.record.epoch, final=True))
        case "dead":
            await world.happen(Event.ORPHANED)
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
    """Whatever comes in whatever order: no event meets no cell, and the state is always what the table said."""

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
