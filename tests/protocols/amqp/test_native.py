"""Runs of deliveries in C give the same events as the engine in Python. `make sanitize` runs this, too."""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.amqp import _native, engine
from protocols.amqp.events import (
    CreditChanged,
    DeliveriesAccepted,
    DispositionReceived,
    LinkDetached,
    TransactionalTransfer,
    TransfersReceived,
    TransferUnfit,
)
from protocols.amqp.outcomes import STATE_RELEASED
from tests.protocols.amqp.conftest import Server
from tests.reference import amqp_deliveries
from tests.support.amqp_frames import Frames

LIMIT, CREDIT = 60, 4
IN_TRANSACTION = b"\x00\x53\x34" + Frames.listed(Frames.binary(b"txn"))
STATES = [
    Frames.NULL,
    b"\x00\x53\x24\x45",
    b"\x00\x53\x26\x45",
    b"\x00\x53\x25\xc0\x01\x00",
    b"\x00\x53\x34" + Frames.listed(Frames.binary(b"txn"), b"\x00\x53\x24\x45"),
]

FORMS = (_native, amqp_deliveries)

handles = st.sampled_from((0, 0, 0, 1))
sizes = st.sampled_from((0, 1, 30, 30, 30, LIMIT, LIMIT + 1, 4 * LIMIT + 1))
flags = st.sampled_from((False, False, False, True))
steps = st.one_of(
    st.tuples(st.just("transfer"), handles, sizes, flags, flags, flags, st.booleans()),
    *[st.tuples(st.just("transfer"), st.just(0), st.just(30), *[st.just(False)] * 3, st.booleans())] * 3,
    st.tuples(st.just("send"), st.sampled_from((2, 2, 3)), st.integers(0, 40), flags, st.integers(1, 4)),
    st.tuples(st.just("outcome"), st.integers(0, 12), st.integers(0, 5), st.sampled_from(STATES), st.booleans()),
    st.tuples(st.just("accept"), st.integers(1, 6)),
    st.tuples(st.just("refuse")),
    st.tuples(st.just("grant"), handles, st.integers(0, 5)),
    st.tuples(st.just("detach"), st.integers(0, 3)),
)


class Played(Server):
    """A server that a client's random steps are sent to, and its events."""

    def __init__(self, transactional: bool) -> None:
        super().__init__(credit=CREDIT, limit=LIMIT)
        self.told: list[Any] = []
        self.held: list[tuple[Any, Any, bytes | None]] = []  # link, delivery, txn-id
        self._number = self._token = 0
        self._open: dict[int, int] = {}  # incomplete deliveries, by handle
        self._detached: set[int] = set()
        self._waiting = b""
        names = [("a", True), ("b", True), ("r", False), ("s", False)]
        attaches = [Frames.attach(name, handle, sending=into) for handle, (name, into) in enumerate(names)]
        self.feed(Frames.begin() + b"".join(attaches))
        if transactional:
            self.feed(Frames.attach("c", 4, coordinator=True))
        flows = [Frames.uint(0), Frames.uint(1000), b"\x43", Frames.uint(1000)]
        for handle in (2, 3):
            self.feed(Frames.frame(Frames.performative(0x13, *flows, Frames.uint(handle), b"\x43", Frames.uint(10))))
        self.output = [self.connection.data_to_send()]

    def take(self, events: list[Any]) -> None:
        super().take(events)
        for event in events:
            match event:
                case TransfersReceived(link=link):
                    self.told += [(link.name, delivery is None, data) for delivery, data in zip(
                        event.deliveries, event.messages, strict=True)]  # fmt: skip
                    self.held += [(link, delivery, None) for delivery in event.deliveries]
                case TransactionalTransfer(link=link, delivery=delivery, txn_id=txn_id):
                    self.told.append((link.name, delivery is None, event.data, txn_id))
                    self.held.append((link, delivery, txn_id))
                case TransferUnfit(link=link, delivery=delivery):
                    self.told.append((link.name, delivery is None, event.size, event.txn_id))
                    self.held.append((link, delivery, None))
                case DeliveriesAccepted(link=link):
                    self.told += [(link.name, token) for token in event.deliveries]
                case DispositionReceived(link=link):
                    self.told.append((link.name, event.delivery, event.state))
                case CreditChanged(link=link):
                    self.told.append((link.name, self.engine.credit_of(link), event.drain))
                case LinkDetached(link=link):
                    self.told.append((link.name, event.error, event.by_us))
                case _:
                    self.told.append(type(event))

    def play(self, step: tuple[Any, ...], size: int) -> None:
        """Do one step; the client's frames are sent when they are `size` bytes."""
        match step:
            case ("transfer" | "detach", handle, *_) if handle in self._detached:
                pass
            case ("transfer", handle, length, settled, more, aborted, transacted):
                first = handle not in self._open
                number = self._open.setdefault(handle, self._number)
                self._number += first
                if not more:
                    del self._open[handle]
                state = IN_TRANSACTION if transacted else Frames.NULL
                self._waiting += Frames.transfer(
                    number, bytes(length), more=more, settled=settled, aborted=aborted, handle=handle, first=first,
                    state=state,
                )  # fmt: skip
            case ("outcome", first, count, state, settled):
                ended = Frames.TRUE if settled else Frames.FALSE
                fields = (Frames.TRUE, Frames.uint(first), Frames.uint(first + count), ended, state)
                self._waiting += Frames.frame(Frames.performative(0x15, *fields))
            case ("detach", handle):
                self._detached.add(handle)
                self._waiting += Frames.frame(Frames.performative(0x16, Frames.uint(handle), Frames.TRUE))
            case _:
                self._act(step)
        while len(self._waiting) >= size:
            part, self._waiting = self._waiting[:size], self._waiting[size:]
            self.feed(part)

    def _act(self, step: tuple[Any, ...]) -> None:
        """Do one action of the server."""
        if self.engine.over:
            return
        match step:
            case ("send", handle, length, settled, count):
                link = self.links["abrs"[handle]]
                count = min(count, self.engine.credit_of(link))
                tokens = [self._token + place for place in range(count)]
                self._token += count
                if count:
                    self.engine.send(
                        link, [bytes(length + place) for place in range(count)], None if settled else tokens
                    )
            case ("accept", count):
                taken, self.held = self.held[:count], self.held[count:]
                for link, delivery, txn_id in taken:
                    if txn_id is None:
                        self.engine.accept_deliveries(link, [delivery])
                    elif delivery is not None:
                        self.engine.settle_posted(link, delivery, txn_id, STATE_RELEASED)
            case ("refuse",) if self.held:
                link, delivery, _ = self.held.pop()
                if delivery is not None:
                    self.engine.settle_delivery(link, delivery, STATE_RELEASED)
            case ("grant", handle, credit):
                self.engine.grant(self.links["abrs"[handle]], credit)

    def end(self) -> tuple[Any, ...]:
        """The result of all steps: events, the links' counters, and every byte of the output."""
        self.feed(self._waiting)
        self.output.append(self.connection.data_to_send())
        accounts = [(link.credit, link.held, link.held_bytes, link.attached) for link in self.links.values()]
        accounts += [engine.lib.pn_link_unsettled(link.handle) for link in self.links.values() if link.attached]
        sent = [(link.name, token, size) for link, token, size in self.engine._sent.values()]
        return self.told, accounts, sent, self.output


class Addressed(NamedTuple):
    """A stand-in for a link."""

    address: Any


def use(form: Any, patch: pytest.MonkeyPatch) -> None:
    """Make engines use C, or the reference."""
    for name in ("take_usual", "accept", "send"):
        patch.setattr(engine, name, getattr(form, name))


@given(st.lists(steps, min_size=8, max_size=40), st.sampled_from((1, 7, 300, 100_000)), st.booleans())
def test_any_conversation_is_the_same(said: list[Any], size: int, transactional: bool) -> None:
    found = []
    for form in FORMS:
        with pytest.MonkeyPatch.context() as patch:
            use(form, patch)
            server = Played(transactional)
            for number, step in enumerate(said):
                server.play(step, size)
                if number % 5 == 4:
                    server.output.append(server.connection.data_to_send())
            found.append(server.end())
    assert found[0] == found[1]


@pytest.mark.parametrize("form", FORMS)
def test_proton_keeps_nothing_that_is_settled(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that is settled on one side only is kept for the life of its link."""
    use(form, monkeypatch)
    server = Played(transactional=False)
    for settled in (True, False, True):
        server.play(("transfer", 0, 30, settled, False, False, False), 1)
        server.play(("send", 2, 30, settled, 1), 1)
    unsettled = [engine.lib.pn_link_unsettled(server.links[name].handle) for name in "ar"]
    assert unsettled == [1, 1]
    server.play(("accept", 3), 1)
    server.connection.data_to_send()
    server.play(("outcome", 0, 2, STATES[1], True), 1)
    assert [engine.lib.pn_link_unsettled(server.links[name].handle) for name in "ar"] == [0, 0]


@pytest.mark.parametrize("form", FORMS)
def test_what_was_sent_on_a_link_that_is_gone_is_not_found_on_another(
    form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine forgets it later; until then another link's delivery may have the same address."""
    use(form, monkeypatch)
    server = Played(transactional=False)
    server.play(("send", 3, 30, False, 1), 1)
    server.connection.data_to_send()
    gone = server.links["r"]
    server.play(("detach", 2), 1)
    (address,) = server.engine._sent
    server.engine._sent[address] = (gone, "of the other link", 30)
    server.play(("outcome", 0, 0, STATES[1], True), 1)
    assert not server.of(DeliveriesAccepted)
    assert not server.of(DispositionReceived)
    assert (gone.held, gone.held_bytes) == (0, 0)


def test_usual_transfers_are_processed_in_c() -> None:
    """One read of them is one call and one event; so are the outcomes of sent deliveries."""
    server = Played(transactional=False)
    left: list[int] = []

    def take_usual(*given: Any) -> int:
        left.append(_native.take_usual(*given))
        return left[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "take_usual", take_usual)
        for handle in (0, 0, 1):
            server.play(("transfer", handle, 30, False, False, False, False), 100_000)
        server.play(("send", 2, 30, False, 3), 100_000)
        server.connection.data_to_send()
        server.play(("outcome", 0, 2, STATES[1], True), 100_000)
        server.end()
    assert [len(event.messages) for event in server.of(TransfersReceived)] == [2, 1]
    assert [event.deliveries for event in server.of(DeliveriesAccepted)] == [[0, 1, 2]]
    assert int(engine.lib.PN_DELIVERY) not in left


def test_nothing_is_leaked() -> None:
    """References and memory are released."""
    server = Played(transactional=False)
    link, out = server.links["a"], server.links["r"]
    token, number = object(), 0

    def turn() -> None:
        nonlocal number
        server.engine.grant(link, 10)
        data = b"".join(Frames.transfer(number + place, bytes(30), settled=place == 4) for place in range(10))
        for event in server.connection.receive_data(data):
            server.engine.accept_deliveries(link, event.deliveries)
        server.engine.send(out, [bytes(30)], [token])
        server.connection.data_to_send()
        number += 10
        turns = number // 10 - 1
        accepted = (Frames.TRUE, Frames.uint(turns), Frames.uint(turns), Frames.TRUE, STATES[1])
        flow = (Frames.uint(turns), Frames.uint(1000), Frames.uint(number), Frames.uint(1000), Frames.uint(2),
                Frames.uint(turns), Frames.uint(10))  # fmt: skip
        server.connection.receive_data(
            Frames.frame(Frames.performative(0x15, *accepted)) + Frames.frame(Frames.performative(0x13, *flow))
        )

    for _ in range(5):
        turn()
    gc.collect()
    kept = (link, out, token, server.engine._links, server.engine._sent)
    references, blocks = [sys.getrefcount(one) for one in kept], sys.getallocatedblocks()
    for _ in range(200):
        turn()
    assert [sys.getrefcount(one) for one in kept] == references
    assert sys.getallocatedblocks() - blocks < 100
    assert (link.held, out.held, out.held_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        ("take_usual", ()),
        ("take_usual", ({}, {}, False, ())),
        ("take_usual", ([], {}, False, [])),
        ("accept", ([1],)),
        ("accept", (Addressed(1), 3)),
        ("accept", (Addressed(1), ["a"])),
        ("send", (Addressed(1), 2, [b"data"], None)),
        ("send", (Addressed("link"), 2, [b"data"], None, {})),
        ("send", (Addressed(1), "number", [b"data"], None, {})),
        ("send", (Addressed(1), 2, ["data"], None, {})),
        ("send", (Addressed(1), 2, 3, None, {})),
        ("send", (Addressed(1), 2, [b"data"], 3, {})),
        ("send", (Addressed(1), 2, [b"data"], None, [])),
    ],
)
def test_arguments_of_other_types_are_refused(function: str, given: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        getattr(_native, function)(*given)


@pytest.mark.parametrize(
    ("function", "given"), [("accept", (Addressed(1), [0])), ("send", (Addressed(0), 2, [b"data"], None, {}))]
)
def test_a_null_address_is_refused(function: str, given: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="null address"):
        getattr(_native, function)(*given)


def test_the_tests_run_with_the_extension() -> None:
    assert engine.take_usual is _native.take_usual


if hasattr(_native, "CHECKS_ADDRESSES"):  # `make sanitize`: else it would be a use after free

    def test_an_address_that_is_kept_too_long_is_found() -> None:
        server = Played(transactional=False)
        server.play(("transfer", 0, 30, False, False, False, False), 1)
        ((link, delivery, _),) = server.held
        server.play(("accept", 1), 1)
        server.connection.data_to_send()
        with pytest.raises(AssertionError, match="not a live delivery"):
            _native.accept(link, [delivery])


def test_a_message_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="token"):
        _native.send(Addressed(1), 2, [b"data"], [], {})
