"""Transactions on the wire (part 4): commands and states in any form, and the engine with proton at the other end."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proton import Described, Message, Terminus, symbol, ulong

from protocols.amqp import outcomes, primitives
from protocols.amqp.events import (
    DispositionReceived,
    LinkDetached,
    LinkRequested,
    Retired,
    TransactionalTransfer,
    TransferUnfit,
)
from protocols.amqp.links import TerminusKind
from protocols.amqp.outcomes import STATE_ACCEPTED, DeliveryState, Error, rejected
from protocols.amqp.primitives import DecodeError
from protocols.amqp.transactions import (
    DECLARED,
    ROLLED_BACK,
    TRANSACTIONAL_STATE,
    Declare,
    Discharge,
    declared,
    read_command,
    read_state,
    transactional_state,
)
from tests.support.amqp_frames import DATA

TXN = bytes(range(16))
conditions = st.from_regex(r"[a-z:-]{1,40}", fullmatch=True)
errors = st.builds(Error, conditions, st.text(max_size=100))
states = st.one_of(
    st.just(STATE_ACCEPTED),
    st.just(DeliveryState(outcomes.RELEASED)),
    st.builds(lambda error: DeliveryState(outcomes.REJECTED, error=error), st.none() | errors),
    st.builds(
        lambda a, b: DeliveryState(outcomes.MODIFIED, delivery_failed=a, undeliverable_here=b),
        st.booleans(),
        st.booleans(),
    ),
)


def by_proton(body: Any) -> bytes:
    return bytes(Message(body=body).encode())


@pytest.mark.clause("AMQP-4.5.2")
@pytest.mark.clause("AMQP-4.5.3")
@pytest.mark.parametrize("described", [symbol, None])
def test_commands_as_proton_writes_them(described: Any) -> None:
    declare, discharge = (symbol("amqp:declare:list"), symbol("amqp:discharge:list")) if described else (
        ulong(0x31), ulong(0x32)
    )  # fmt: skip
    assert read_command(by_proton(Described(declare, [None]))) == Declare(is_global=False)
    assert read_command(by_proton(Described(declare, []))) == Declare(is_global=False)
    assert read_command(by_proton(Described(declare, [b"global"]))) == Declare(is_global=True)
    assert read_command(by_proton(Described(discharge, [TXN, True]))) == Discharge(TXN, fail=True)
    assert read_command(by_proton(Described(discharge, [TXN, False]))) == Discharge(TXN, fail=False)
    assert read_command(by_proton(Described(discharge, [TXN]))) == Discharge(TXN, fail=False)


@pytest.mark.parametrize(
    "body",
    [
        "begin",
        None,
        Described(symbol("amqp:discharge:list"), []),
        Described(symbol("amqp:discharge:list"), ["text", False]),
        Described(symbol("amqp:discharge:list"), [b"x", 1]),
        Described(symbol("amqp:begin:list"), []),
        Described(ulong(0x31), {}),
        Described(None, [None]),
    ],
)
def test_invalid_commands(body: Any) -> None:
    with pytest.raises(DecodeError):
        read_command(by_proton(body))


@given(st.binary(max_size=80))
def test_any_bytes_are_a_command_or_refused(data: bytes) -> None:
    for stream in (data, b"\x00\x53\x77" + data, b"\x00\x53\x77\x00\x53\x32" + data):
        with contextlib.suppress(DecodeError):
            assert isinstance(read_command(stream), Declare | Discharge)


@given(st.binary(min_size=1, max_size=32), st.none() | states)
def test_states_come_back(txn_id: bytes, state: DeliveryState | None) -> None:
    encoded = transactional_state(txn_id, state)
    fields, end = primitives.decode(encoded, 0, len(encoded))
    assert end == len(encoded)
    assert read_state(fields) == (txn_id, state)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.binary() | st.text(), st.lists, max_leaves=8))
def test_any_fields_are_a_state_or_refused(fields: Any) -> None:
    try:
        txn_id, _ = read_state(fields)
    except DecodeError:
        return
    assert isinstance(txn_id, bytes)


def test_declared_is_a_list_of_the_id() -> None:
    assert primitives.decode(declared(TXN), 0, 99)[0] == [TXN]


# On proton's engine.


def coordinated(make_server: Any, make_peer: Any, split: Any = None) -> tuple[Any, Any, Any]:
    """A peer with a coordinator, an ordinary sender and a receiver attached."""
    server = make_server()
    peer = make_peer(server, split, sasl=None)
    session = peer.open()
    controller = session.sender("coordinator")
    controller.target.type = Terminus.COORDINATOR
    controller.target.capabilities.put_object(symbol("amqp:local-transactions"))
    controller.open()
    peer.sender(session)
    receiver = session.receiver("r")
    receiver.source.address = "t"
    receiver.open()
    receiver.flow(10)
    peer.run()
    return server, peer, session


def split_by(size: int) -> Any:
    return lambda data: [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.clause("AMQP-4.2")
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_transaction_from_declare_to_discharge(make_server: Any, make_peer: Any, size: int) -> None:
    server, peer, _ = coordinated(make_server, make_peer, split_by(size))
    controller = peer.connection.link_head(0)
    sender = controller.next(0)
    (requested,) = [one.link for one in server.of(LinkRequested) if one.link.name == "coordinator"]
    assert requested.target.kind is TerminusKind.COORDINATOR
    assert requested.target.capabilities == ("amqp:local-transactions",)

    declare = peer.transfer(controller, "declare", by_proton(Described(symbol("amqp:declare:list"), [None])))
    peer.run()
    (command,) = server.received
    assert read_command(command.data) == Declare(is_global=False)
    server.engine.settle_declared(command.link, command.delivery, TXN)
    peer.run()
    assert int(declare.remote_state) == DECLARED
    assert bytes(declare.remote.data[0]) == TXN

    posted = sender.delivery("posted")
    posted.local.data = [TXN]
    posted.update(TRANSACTIONAL_STATE)
    sender.stream(DATA)
    sender.advance()
    plain = peer.transfer(sender, "plain")
    peer.run()
    (transfer,) = server.of(TransactionalTransfer)
    assert (transfer.data, transfer.txn_id) == (DATA, TXN)
    assert server.received[-1].data == DATA  # the message without a transaction, as usual
    server.engine.settle_posted(transfer.link, transfer.delivery, TXN, STATE_ACCEPTED)
    peer.run()
    assert int(posted.remote_state) == TRANSACTIONAL_STATE
    txn_id, outcome = posted.remote.data
    assert (bytes(txn_id), outcome.descriptor) == (TXN, outcomes.ACCEPTED)
    assert not plain.settled

    server.engine.send(server.links["r"], [DATA], ["first"])
    server.engine.send(server.links["r"], [DATA], ["second"])
    peer.run()
    for delivery, settle in zip(peer.deliveries, (False, True), strict=True):
        delivery.local.data = [TXN, Described(ulong(outcomes.ACCEPTED), [])]
        delivery.update(TRANSACTIONAL_STATE)
        if settle:
            delivery.settle()
    peer.run()
    first, second = server.of(Retired)
    assert (first.token, first.txn_id, first.state) == ("first", TXN, STATE_ACCEPTED)
    assert (second.token, second.delivery) == ("second", None)
    assert server.links["r"].held == 1
    server.engine.settle_retired(first.link, first.delivery, first.token, STATE_ACCEPTED)
    server.engine.settle_retired(
        first.link, first.delivery, first.token, STATE_ACCEPTED
    )  # the second call has no effect
    peer.run()
    assert server.links["r"].held == 0
    assert peer.deliveries[0].settled


@pytest.mark.clause("AMQP-4.4.2")
def test_what_was_retired_and_rolled_back_can_be_settled_later(make_server: Any, make_peer: Any) -> None:
    server, peer, _ = coordinated(make_server, make_peer)
    server.engine.send(server.links["r"], [DATA], ["token"])
    peer.run()
    (delivery,) = peer.deliveries
    delivery.local.data = [TXN, Described(ulong(outcomes.ACCEPTED), [])]
    delivery.update(TRANSACTIONAL_STATE)
    peer.run()
    assert len(server.of(Retired)) == 1
    delivery.local.data = None
    delivery.update(outcomes.RELEASED)
    delivery.settle()
    peer.run()
    (settled,) = server.of(DispositionReceived)
    assert (settled.delivery, settled.state.code) == ("token", outcomes.RELEASED)


def test_a_handle_that_is_used_again_is_not_settled_for_its_former_delivery(make_server: Any, make_peer: Any) -> None:
    """The peer settles a delivery that it has retired; proton gives the handle to the next one."""
    server, peer, _ = coordinated(make_server, make_peer)
    link = server.links["r"]
    server.engine.send(link, [DATA], ["first"])
    peer.run()
    (delivery,) = peer.deliveries
    delivery.local.data = [TXN, Described(ulong(outcomes.ACCEPTED), [])]
    delivery.update(TRANSACTIONAL_STATE)
    peer.run()
    (retired,) = server.of(Retired)
    delivery.local.data = None
    delivery.update(outcomes.RELEASED)
    delivery.settle()
    peer.run()
    server.engine.send(link, [DATA], ["second"])
    assert list(server.engine._sent) == [retired.delivery]
    assert not server.engine.settle_retired(link, retired.delivery, retired.token, STATE_ACCEPTED)
    assert link.held == 1
    peer.run()
    assert not peer.deliveries[1].settled


def with_posted(make_server: Any, make_peer: Any) -> tuple[Any, Any, Any, TransactionalTransfer]:
    """Server, peer, and a message posted in a transaction, as the peer's delivery and as the server's event."""
    server, peer, _ = coordinated(make_server, make_peer)
    sender = peer.connection.link_head(0).next(0)
    posted = sender.delivery("posted")
    posted.local.data = [TXN]
    posted.update(TRANSACTIONAL_STATE)
    sender.stream(DATA)
    sender.advance()
    peer.run()
    (transfer,) = server.of(TransactionalTransfer)
    return server, peer, posted, transfer


def test_the_error_of_a_refused_post_fits_a_small_frame(make_server: Any, make_peer: Any) -> None:
    """A relay's error names the address, which may be as long as a message."""
    server, _, _, transfer = with_posted(make_server, make_peer)
    server.engine.settle_posted(transfer.link, transfer.delivery, TXN, rejected(ROLLED_BACK, "\u20ac\0" * 100_000))
    assert len(server.connection.data_to_send()) < 512


def test_a_refused_post_carries_its_error(make_server: Any, make_peer: Any) -> None:
    server, peer, posted, transfer = with_posted(make_server, make_peer)
    server.engine.settle_posted(transfer.link, transfer.delivery, TXN, rejected(ROLLED_BACK, "no"))
    peer.run()
    _, outcome = posted.remote.data
    assert outcome.descriptor == outcomes.REJECTED
    assert outcome.value[0].value[:2] == [ROLLED_BACK, "no"]


def state_of(frames: Any, *items: bytes) -> bytes:
    return b"\x00\x53\x34" + bytes(frames.listed(*items))


def scripted(make_server: Any, frames: Any, *, limit: int = 1000) -> Any:
    server = make_server(limit=limit)
    server.feed(frames.begin() + frames.attach() + frames.attach("c", 1, coordinator=True))
    server.connection.data_to_send()
    return server


@pytest.mark.clause("AMQP-4.4.1")
def test_a_post_of_several_transfers(make_server: Any, frames: Any) -> None:
    """The first transfer has the state, and the others may omit it (part 2.7.5)."""
    server = scripted(make_server, frames)
    state = state_of(frames, frames.binary(TXN))
    server.feed(frames.transfer(0, DATA[:4], more=True, state=state))
    server.feed(frames.transfer(0, DATA[4:], first=False))
    server.feed(frames.transfer(1, DATA))
    (transfer,) = server.of(TransactionalTransfer)
    assert (transfer.data, transfer.txn_id) == (DATA, TXN)
    assert len(server.received) == 1


def test_a_settled_post(make_server: Any, frames: Any) -> None:
    server = scripted(make_server, frames)
    server.feed(frames.transfer(0, DATA, settled=True, state=state_of(frames, frames.binary(TXN))))
    (transfer,) = server.of(TransactionalTransfer)
    assert (transfer.delivery, transfer.data, transfer.txn_id) == (None, DATA, TXN)
    assert transfer.link.held == 0


def test_an_oversized_post_names_its_transaction(make_server: Any, frames: Any) -> None:
    server = scripted(make_server, frames, limit=8)
    server.feed(frames.transfer(0, DATA + DATA, state=state_of(frames, frames.binary(TXN))))
    (oversized,) = server.of(TransferUnfit)
    assert oversized.txn_id == TXN


@pytest.mark.parametrize("items", [(), (b"\x40",), (b"\xa1\x01x",)])
def test_a_state_that_cannot_be_read_ends_the_link(make_server: Any, frames: Any, items: tuple[bytes, ...]) -> None:
    server = scripted(make_server, frames)
    server.feed(frames.transfer(0, DATA, state=state_of(frames, *items)))
    (detached,) = server.of(LinkDetached)
    assert detached.by_us
    assert detached.error.condition == outcomes.DECODE_ERROR
    assert not server.of(TransactionalTransfer)
