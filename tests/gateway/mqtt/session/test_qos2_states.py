"""Inbound QoS 2 as a table: a real session's messages go through every cell, and never leave the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.contracts import Result
from gateway.mqtt.session.acks import Slot
from gateway.mqtt.session.qos2 import InboundMessage, InboundQos2, Qos2Parts
from gateway.mqtt.session.qos2_states import TABLE, Qos2Action, Qos2Event, Qos2State
from gateway.mqtt.session.self_delivery import OwnCopies
from mapping.outcomes import Outcome
from mapping.record import Record

CLIENTS = (Qos2Event.PUBLISH, Qos2Event.PUBREL)
ID = 1


class World:
    """One packet identifier of a session; the test triggers the answers for Kafka, in-flight record and own copies."""

    def __init__(self) -> None:
        self.tokens: list[InboundMessage] = []  # records on their way to Kafka
        self.copies: list[tuple[Callable[[Any], None], Any]] = []
        self.saves: list[tuple[Callable[[Any], None], Any]] = []
        self.slots: list[Slot] = []
        self.stored = 0
        self.completed = 0
        self.reports_failures = True
        self.inbound_qos2 = InboundQos2(
            "n",
            "somebody",
            Qos2Parts(self, self, self, lambda work: work.close(), self),  # type: ignore[arg-type]
            budget=ConnectionBudget(1 << 30, 1 << 30),
            journal=self,  # type: ignore[arg-type]
            connection=lambda: self,  # type: ignore[arg-type, return-value]
            copies=OwnCopies("me"),
        )
        self.inbound_qos2._persisted_topics.add("t")

    # what a session's messages use

    def submit(self, record: Record, owner: Any, token: InboundMessage) -> None:
        self.tokens.append(token)

    def advance(self, topic: str, partition: int, offset: int) -> None:
        """The topic's start offsets are of no interest here."""

    def after(self, topic: str, partition: int, offset: int, then: tuple[Callable[[Any], None], Any]) -> None:
        self.copies.append(then)

    def save(self, then: tuple[Callable[[Any], None], Any] | None = None) -> None:
        if then is not None:
            self.saves.append(then)

    def answered(self) -> None:
        """Ignore that PUBRECs are due."""

    def release_messages(self) -> None:
        """Copies are not held here."""

    def complete(self, packet_id: int) -> None:
        self.completed += 1

    # events

    @property
    def state(self) -> Qos2State:
        found = self.inbound_qos2._known.get(ID) or self.inbound_qos2._completing.get(ID)
        return Qos2State.ENDED if found is None else found.state

    @property
    def possible(self) -> list[Qos2Event]:
        """The events that can happen now in this world, independent of the table."""
        found = list(CLIENTS)
        found += [Qos2Event.STORED, Qos2Event.REFUSED] if self.tokens else []
        found += [Qos2Event.COPIED] if self.copies else []
        found += [Qos2Event.PERSISTED] if self.saves else []
        return found

    def happen(self, event: Qos2Event) -> None:
        match event:
            case Qos2Event.PUBLISH:
                self.slots.append(Slot(ID, None, 2))
                self.inbound_qos2.publish(Record("t", None, b""), ID, self.slots[-1], self_delivered=True)
            case Qos2Event.PUBREL:
                if not self.inbound_qos2.release(ID):
                    self.completed += 1  # as `Incoming.release` does
            case Qos2Event.STORED:
                self.inbound_qos2.settle([self.tokens.pop(0)], [self.stored], Result(Outcome.STORED, 0))
                self.stored += 1
            case Qos2Event.REFUSED:
                self.inbound_qos2.settle([self.tokens.pop(0)], [], Result(Outcome.DENIED))
            case Qos2Event.COPIED:
                then, argument = self.copies.pop(0)
                then(argument)
            case Qos2Event.PERSISTED:
                then, argument = self.saves.pop(0)
                then(argument)


PATHS = {
    Qos2State.ENDED: (),
    Qos2State.STORING: (Qos2Event.PUBLISH,),
    Qos2State.STORING_RELEASED: (Qos2Event.PUBLISH, Qos2Event.PUBREL),
    Qos2State.STORED: (Qos2Event.PUBLISH, Qos2Event.STORED),
    Qos2State.COPYING: (Qos2Event.PUBLISH, Qos2Event.STORED, Qos2Event.PUBREL),
    Qos2State.COMPLETING: (Qos2Event.PUBLISH, Qos2Event.STORED, Qos2Event.PUBREL, Qos2Event.COPIED),
}
CELLS = [(state, event) for state, row in TABLE.items() for event in row]


def test_what_a_client_sends_has_an_answer_in_every_state() -> None:
    assert set(TABLE) == set(Qos2State) == set(PATHS)
    assert all(event in row for row in TABLE.values() for event in CLIENTS)
    assert {action for row in TABLE.values() for action, _ in row.values()} == set(Qos2Action)
    assert {after for row in TABLE.values() for _, after in row.values()} == set(Qos2State)


@pytest.mark.clause("MQTT-4.3.3-10")
@pytest.mark.clause("MQTT-4.3.3-11")
@pytest.mark.parametrize(("state", "event"), CELLS, ids=[f"{state.name}-{event.name}" for state, event in CELLS])
def test_every_cell(state: Qos2State, event: Qos2Event) -> None:
    world = World()
    for before in PATHS[state]:
        world.happen(before)
    if (state, event) == (Qos2State.ENDED, Qos2Event.PERSISTED):  # PUBREL came twice
        for before in (*PATHS[Qos2State.COMPLETING], Qos2Event.PUBREL, Qos2Event.PERSISTED):
            world.happen(before)
    assert world.state is state
    tokens, copies, saves = len(world.tokens), len(world.copies), len(world.saves)
    answered = sum(slot.result is not None for slot in world.slots)
    completed = world.completed
    action, after = TABLE[state][event]
    world.happen(event)
    assert world.state is after
    answers = {Qos2Action.PUBREC: 1, Qos2Action.REFUSE: 1, Qos2Action.PUBREC_AWAIT_COPY: 1}
    assert sum(slot.result is not None for slot in world.slots) - answered == answers.get(action, 0)
    assert world.completed - completed == (action is Qos2Action.PUBCOMP)
    assert len(world.tokens) - tokens == (action is Qos2Action.STORE) - (event in {Qos2Event.STORED, Qos2Event.REFUSED})
    waits = {Qos2Action.AWAIT_COPY, Qos2Action.PUBREC_AWAIT_COPY}
    assert len(world.copies) - copies == (action in waits) - (event is Qos2Event.COPIED)
    assert len(world.saves) - saves == (action is Qos2Action.PERSIST) - (event is Qos2Event.PERSISTED)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_nothing_leaves_the_table(data: st.DataObject) -> None:
    """For events in any order, also an identifier that is reused too early: every event has a cell."""
    world = World()
    published = 0
    for _ in range(data.draw(st.integers(1, 30))):
        event = data.draw(st.sampled_from(world.possible))
        before, tokens = world.state, len(world.tokens)
        world.happen(event)
        published += len(world.tokens) > tokens
        if event in CLIENTS:
            action, after = TABLE[before][event]
            assert world.state is after
            assert (len(world.tokens) > tokens) == (action is Qos2Action.STORE)
    while world.tokens or world.copies or world.saves:
        world.happen(next(event for event in world.possible if event not in CLIENTS))
    assert world.stored <= published
    assert world.state in {Qos2State.ENDED, Qos2State.STORED}
    assert not world.inbound_qos2.busy


def test_an_event_that_cannot_happen_is_our_bug() -> None:
    with pytest.raises(KeyError):
        InboundMessage(ID, 0).on(Qos2Event.STORED)


def test_a_session_that_ends_with_its_connection_writes_nothing() -> None:
    world = World()
    world.inbound_qos2._journal = None
    for event in (Qos2Event.PUBLISH, Qos2Event.STORED, Qos2Event.PUBREL, Qos2Event.COPIED):
        world.happen(event)
    assert (world.state, world.completed, world.saves) == (Qos2State.ENDED, 1, [])
