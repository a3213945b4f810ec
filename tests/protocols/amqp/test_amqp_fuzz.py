"""Any bytes give events: an exception raised by the connection is our bug, and so is growing memory."""

from __future__ import annotations

import contextlib
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proton import Described, Message, Terminus, symbol, ulong

from protocols.amqp.endpoints import EndpointLimits
from protocols.amqp.events import Retired, TransactionalTransfer, TransfersReceived
from protocols.amqp.outcomes import ACCEPTED, STATE_RELEASED
from protocols.amqp.primitives import DecodeError
from protocols.amqp.transactions import TRANSACTIONAL_STATE, read_command
from protocols.connection import ConnectionClosed, ConnectionFailed

# The fixtures are plain classes: no state is kept between examples.
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
HEADERS = (b"AMQP\x00\x01\x00\x00", b"AMQP\x03\x01\x00\x00", b"")


@relaxed
@given(st.sampled_from(HEADERS), st.binary(max_size=400), st.integers(1, 50))
def test_random_bytes(make_server: Any, header: bytes, data: bytes, step: int) -> None:
    server = make_server()
    stream = header + data
    for at in range(0, len(stream), step):
        server.feed(stream[at : at + step])
        server.connection.data_to_send()
    server.take(server.connection.receive_eof())
    last = [event for event in server.events if isinstance(event, ConnectionFailed | ConnectionClosed)]
    assert len(last) == 1
    assert server.events[-1] is last[0]


def seed(make_server: Any, make_peer: Any) -> bytes:
    server = make_server()
    peer = make_peer(server, sasl=None)
    peer.answer = 0x24
    session = peer.open()
    sender = peer.sender(session)
    receiver = session.receiver("r")
    receiver.source.address = "t/group.id/g"
    receiver.open()
    receiver.flow(10)
    peer.run()
    server.engine.send(server.links["r"], [b"\x00\x53\x75\xa0\x01x"], ["token"])
    for number in range(3):
        peer.transfer(sender, f"d{number}")
    peer.run()
    transact(server, peer, session, sender)
    sender.close()
    receiver.detach()
    peer.run()
    session.close()
    peer.connection.close()
    peer.run()
    return bytes(peer.to_server)


def transact(server: Any, peer: Any, session: Any, sender: Any) -> None:
    """A coordinator, a command, a post and a retirement."""
    coordinator = session.sender("c")
    coordinator.target.type = Terminus.COORDINATOR
    coordinator.open()
    peer.answer = None
    peer.run()
    command = Message(body=Described(symbol("amqp:discharge:list"), [b"txn", False]))
    peer.transfer(coordinator, "command", bytes(command.encode()))
    posted = sender.delivery("posted")
    posted.local.data = [b"txn"]
    posted.update(TRANSACTIONAL_STATE)
    sender.stream(b"\x00\x53\x75\xa0\x03abc")
    sender.advance()
    server.engine.send(server.links["r"], [b"\x00\x53\x75\xa0\x01x"], ["token"])
    peer.run()
    peer.deliveries[-1].local.data = [b"txn", Described(ulong(ACCEPTED), [])]
    peer.deliveries[-1].update(TRANSACTIONAL_STATE)
    peer.run()


def mutate(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(8, len(changed))
        match rng.randrange(5):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at : at + rng.randint(1, 4)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randint(1, 4))
            case 4:
                end = min(len(changed), at + rng.randint(1, 60))
                changed[at:at] = changed[at:end]
    return bytes(changed)


def play(make_server: Any, data: bytes, rng: random.Random) -> Any:
    server = make_server(limits=EndpointLimits(links_per_session=8, channel_max=7))

    def react(event: Any) -> None:
        match event:
            case TransfersReceived(link=link):
                for delivery, message in zip(event.deliveries, event.messages, strict=True):
                    with contextlib.suppress(DecodeError):
                        read_command(message)
                    if delivery is not None:
                        server.engine.settle_delivery(link, delivery, STATE_RELEASED)
            case TransactionalTransfer(delivery=delivery) if delivery is not None:
                server.engine.settle_posted(event.link, delivery, event.txn_id, STATE_RELEASED)
            case Retired(delivery=delivery) if delivery is not None:
                server.engine.settle_retired(event.link, delivery, event.token, STATE_RELEASED)

    server.on_event = react
    at = 0
    while at < len(data):
        step = rng.randint(1, 200)
        server.feed(data[at : at + step])
        for link in server.links.values():
            if not link.incoming and link.accepted and server.engine.credit_of(link):
                server.engine.send(link, [b"\x00\x53\x75\xa0\x01y"], ["token"])
        server.connection.data_to_send()
        at += step
    server.take(server.connection.receive_eof())
    return server


def test_mutated_conversations(make_server: Any, make_peer: Any) -> None:
    original = seed(make_server, make_peer)
    for number in range(1500):
        rng = random.Random(number)
        server = play(make_server, mutate(original, rng), rng)
        last = server.events[-1]
        assert isinstance(last, ConnectionFailed | ConnectionClosed), (number, last)


@relaxed
@given(st.lists(st.tuples(st.integers(0x10, 0x18), st.binary(max_size=60), st.integers(0, 2)), max_size=10))
def test_frames_with_random_bodies(make_server: Any, frames: Any, bodies: list[tuple[int, bytes, int]]) -> None:
    server = make_server()
    server.feed(frames.begin() + frames.attach())
    for code, body, channel in bodies:
        server.feed(frames.frame(b"\x00\x53" + bytes([code]) + b"\xc0" + bytes([len(body) + 1, 3]) + body, channel))
        server.connection.data_to_send()
    server.take(server.connection.receive_eof())
    assert isinstance(server.events[-1], ConnectionFailed | ConnectionClosed)
