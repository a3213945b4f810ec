"""Links and deliveries: the checks that proton leaves to its user, and that all memory is released."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from proton import Data, Delivery, Described, int32, symbol, ulong

from protocols.amqp import outcomes, primitives
from protocols.amqp.endpoints import EndpointLimits
from protocols.amqp.events import (
    CreditChanged,
    DeliveriesAccepted,
    DispositionReceived,
    LinkDetached,
    LinkRequested,
    SessionEnded,
    TransferAborted,
    TransfersReceived,
    TransferUnfit,
)
from protocols.amqp.links import TerminusKind
from protocols.amqp.outcomes import Error
from protocols.connection import ConnectionFailed
from tests.support.amqp_frames import DATA
from tests.support.steps import steps


def scripted(make_server: Any, frames: Any, **options: Any) -> Any:
    server = make_server(**options)
    server.feed(frames.begin() + frames.attach())
    server.connection.data_to_send()
    return server


def conditions(server: Any, frames: Any) -> list[tuple[int, bytes]]:
    """The server's frames since the last call, without flow."""
    return [(code, body) for code, body in frames.parse(server.connection.data_to_send()) if code != 0x13]


def test_transfers_with_binary_tags(make_server: Any, frames: Any) -> None:
    server = scripted(make_server, frames)
    tags = [b"\xff\xfe\x00", bytes(32), b"\x80"]
    for number, tag in enumerate(tags):
        server.feed(frames.transfer(number, DATA, tag=tag))
    received = server.received
    assert [event.data for event in received] == [DATA] * 3
    for event in received:
        server.engine.accept_deliveries(event.link, (event.delivery,))
    ((code, body),) = conditions(server, frames)  # one disposition for the range
    assert code == 0x15
    assert b"\x00\x53\x24" in body
    assert received[0].link.held == 0


@pytest.mark.clause("AMQP-2.6.7")
def test_credit_is_enforced(make_server: Any, frames: Any) -> None:
    server = scripted(make_server, frames, credit=3)
    for number in range(5):
        server.feed(frames.transfer(number, DATA))
    assert len(server.received) == 3
    (detached,) = server.of(LinkDetached)
    assert detached.by_us
    assert detached.error.condition == outcomes.TRANSFER_LIMIT_EXCEEDED
    ((code, body),) = conditions(server, frames)
    assert code == 0x16
    assert outcomes.TRANSFER_LIMIT_EXCEEDED.encode() in body
    # The connection stays open, and a new link works.
    server.feed(frames.attach("again", 1))
    server.feed(frames.transfer(5, DATA, handle=1))
    assert len(server.received) == 4


def test_transfers_before_any_credit(make_server: Any, frames: Any) -> None:
    server = make_server()
    server.feed(frames.begin())
    server.connection.data_to_send()
    server.answers = False
    server.feed(frames.attach() + frames.transfer(0, DATA))
    assert not server.received
    assert server.of(LinkDetached)[0].error.condition == outcomes.TRANSFER_LIMIT_EXCEEDED


@pytest.mark.clause("AMQP-2.6.14")
def test_a_message_in_many_transfers(make_server: Any, frames: Any) -> None:
    server = scripted(make_server, frames)
    server.feed(frames.transfer(0, DATA[:3], more=True))
    server.feed(frames.transfer(0, b"", more=True, first=False))
    server.feed(frames.transfer(0, DATA[3:5], more=True, first=False))
    assert not server.received
    server.feed(frames.transfer(0, DATA[5:], first=False) + frames.transfer(1, DATA))
    assert [event.data for event in server.received] == [DATA, DATA]
    assert server.links["s"].credit == 8


@pytest.mark.clause("AMQP-2.6.14")
def test_aborted_deliveries(make_server: Any, frames: Any) -> None:
    server = scripted(make_server, frames)
    server.feed(frames.transfer(0, DATA, more=True))
    server.feed(frames.transfer(0, b"", aborted=True, first=False))
    server.feed(frames.transfer(1, DATA))
    assert [type(event) for event in server.events[-2:]] == [TransferAborted, TransfersReceived]
    server.feed(frames.transfer(2, b"", aborted=True))  # aborted in its first transfer
    assert len(server.of(TransferAborted)) == 2
    assert server.links["s"].credit == 7
    assert server.links["s"].held == 1


def test_settled_transfers_need_no_outcome(make_server: Any, frames: Any) -> None:
    server = scripted(make_server, frames)
    server.feed(frames.transfer(0, DATA, settled=True))
    (event,) = server.received
    assert event.delivery is None
    assert event.link.held == 0
    assert conditions(server, frames) == []


@pytest.mark.parametrize("parts", [1, 3])
def test_a_message_above_the_limit_is_refused_alone(make_server: Any, frames: Any, parts: int) -> None:
    server = scripted(make_server, frames, limit=100)
    size = 150
    for part in range(parts):
        server.feed(frames.transfer(0, bytes(size // parts), more=part < parts - 1, first=part == 0))
    server.feed(frames.transfer(1, DATA))
    (oversized,) = server.of(TransferUnfit)
    assert oversized.size == size
    assert [event.data for event in server.received] == [DATA]
    state = outcomes.rejected(outcomes.MESSAGE_SIZE_EXCEEDED, "too large")
    server.engine.settle_delivery(oversized.link, oversized.delivery, state)
    ((code, body),) = conditions(server, frames)
    assert code == 0x15
    assert outcomes.MESSAGE_SIZE_EXCEEDED.encode() in body


def test_a_message_larger_than_the_scratch_buffer(make_server: Any, frames: Any) -> None:
    server = scripted(make_server, frames, limit=4 << 20)
    body = bytes(range(256)) * 12_000  # 3 MB
    parts = [body[at : at + 60_000] for at in range(0, len(body), 60_000)]
    for number, part in enumerate(parts):
        server.feed(frames.transfer(0, part, more=number < len(parts) - 1, first=number == 0))
    (event,) = server.received
    assert event.data == body


@pytest.mark.clause("AMQP-2.7.4")
def test_the_window_opens_again_with_no_flow_for_a_detached_link(make_server: Any, frames: Any) -> None:
    limits = EndpointLimits(max_frame_bytes=1024, session_window_bytes=20 * 1024)
    server = scripted(make_server, frames, limit=1000, limits=limits)
    flows: list[bytes] = []
    for number in range(200):
        server.feed(frames.transfer(0, bytes(900), more=True, first=number == 0))
        flows += [body for code, body in frames.parse(server.connection.data_to_send()) if code == 0x13]
    assert server.of(LinkDetached)[0].error.condition == outcomes.MESSAGE_SIZE_EXCEEDED
    assert len(flows) >= 200 // 20 - 1
    decoded = [primitives.decode(body, 0, len(body))[0].value for body in flows]
    assert {len(fields) for fields in decoded} == {4}, "flows of the session alone"
    assert [fields[1] for fields in decoded] == [20] * len(flows)


def test_an_endless_message_is_cut_off_without_being_kept(make_server: Any, frames: Any) -> None:
    server = scripted(make_server, frames, limit=1000)
    kept = 0
    sent = 0
    while not server.of(LinkDetached):
        server.feed(frames.transfer(0, bytes(500), more=True, first=sent == 0))
        sent += 500
        kept = max(kept, len(server.links["s"].partial or b""))
        assert sent < 10_000
    assert kept <= 1000
    assert server.of(LinkDetached)[0].error.condition == outcomes.MESSAGE_SIZE_EXCEEDED
    server.feed(frames.transfer(0, bytes(500), more=True, first=False))  # transfers that were already sent do no harm
    assert not server.of(ConnectionFailed)


@pytest.mark.clause("AMQP-2.5.6")
def test_the_session_window_is_enforced(make_server: Any, frames: Any) -> None:
    limits = EndpointLimits(max_frame_bytes=1024, session_window_bytes=4096)
    server = make_server(limits=limits, credit=1000)
    server.feed(frames.begin() + frames.attach())
    parsed = frames.parse(server.connection.data_to_send())
    assert [code for code, _ in parsed if code == 0x11]
    server.feed(b"".join(frames.transfer(number, DATA) for number in range(4)))
    assert not server.of(ConnectionFailed)
    # The window is only as wide as in our last flow, however fast we read: four frames of 1024 bytes.
    server.feed(frames.transfer(4, DATA))
    assert server.of(ConnectionFailed)[0].code == outcomes.WINDOW_VIOLATION


def test_links_per_session(make_server: Any, frames: Any) -> None:
    server = make_server(limits=EndpointLimits(links_per_session=2))
    server.feed(frames.begin())
    for number in range(3):
        server.feed(frames.attach(f"l{number}", number))
    assert len(server.of(LinkRequested)) == 2
    codes = conditions(server, frames)
    assert outcomes.RESOURCE_LIMIT_EXCEEDED.encode() in codes[-1][1]


def test_channel_max(make_server: Any, frames: Any) -> None:
    server = make_server(limits=EndpointLimits(channel_max=1))
    server.feed(frames.begin())
    begin = frames.performative(0x11, frames.NULL, b"\x43", frames.uint(100), frames.uint(100))
    server.feed(frames.frame(begin, channel=1))
    assert not server.of(ConnectionFailed)
    server.feed(frames.frame(begin, channel=2))
    assert server.of(ConnectionFailed)


def test_a_frame_above_max_frame_size(make_server: Any, frames: Any) -> None:
    server = make_server(limits=EndpointLimits(max_frame_bytes=1024))
    server.feed(frames.begin() + frames.attach())
    server.feed(frames.transfer(0, bytes(2000)))
    assert isinstance(server.events[-1], ConnectionFailed)
    assert server.connection.closing
    assert outcomes.FRAMING_ERROR.encode() in server.connection.data_to_send()


@pytest.mark.clause("AMQP-2.6.3")
@pytest.mark.parametrize("sending", [True, False])
def test_refusal_is_a_null_terminus_and_a_detach(make_server: Any, make_peer: Any, sending: bool) -> None:
    server = make_server()
    server.answers = False
    peer = make_peer(server, sasl=None)
    peer.connection.open()
    session = peer.connection.session()
    session.open()
    link = session.sender("l") if sending else session.receiver("l")
    (link.target if sending else link.source).address = "nowhere"
    link.open()
    peer.run()
    server.connection.open((), ())
    (requested,) = server.of(LinkRequested)
    server.engine.refuse_link(requested.link, Error(outcomes.NOT_FOUND, "no such topic"))
    peer.run()
    assert link.state & link.REMOTE_CLOSED
    assert link.remote_condition.name == outcomes.NOT_FOUND
    assert link.remote_condition.description == "no such topic"
    terminus = link.remote_target if sending else link.remote_source
    assert terminus.type == terminus.UNSPECIFIED
    link.close()
    peer.run()
    assert server.is_empty_of_links


def test_a_refusal_ahead_of_our_open(make_server: Any, frames: Any) -> None:
    """The peer pipelines (part 2.4.1): its attach is refused early, and the answer is kept unchanged until our open."""
    server = make_server(limits=EndpointLimits(links_per_session=0))
    server.answers = False
    server.feed(frames.begin() + frames.attach(address="pipelined"))
    server.connection.open((), ())
    answers = conditions(server, frames)
    assert [code for code, _ in answers] == [0x10, 0x11, 0x12, 0x16]
    assert b"pipelined" in answers[2][1]


@pytest.mark.parametrize("lost", [False, True])
def test_each_connection_gets_only_its_own_events(make_server: Any, make_peer: Any, lost: bool) -> None:
    """All connections share proton's collector, but each gets only its own events."""
    peers = []
    for _ in range(3):
        peer = make_peer(make_server(credit=50))
        session = peer.open()
        sender, receiver = session.sender("s"), session.receiver("r")
        sender.open()
        receiver.open()
        receiver.flow(50)
        peer.answer = Delivery.ACCEPTED
        peer.run()
        peers.append((peer, sender))
    for number in range(20):
        for peer, sender in peers:  # each makes output and does not send it yet; then they exchange bytes by turns
            server = peer.server
            server.engine.send(server.links["r"], [DATA], [number])
            for transfer in server.received[number - 1 :]:
                server.engine.accept_deliveries(server.links["s"], [transfer.delivery])
            peer.transfer(sender, str(number))
        if lost and number == 10:
            del peers[1], peer, sender, server  # with output that was not read
            gc.collect()
        for peer, _ in reversed(peers):
            peer.run()
    for peer, _ in peers:
        server = peer.server
        assert peer.received == [DATA] * 20
        assert [event.data for event in server.received] == [DATA] * 20
        accepted = [token for event in server.of(DeliveriesAccepted) for token in event.deliveries]
        assert accepted == list(range(20))
        assert len(peer.outcomes) == 19
        assert not server.of(ConnectionFailed)


def test_what_attach_says(make_server: Any, make_peer: Any) -> None:
    server = make_server(limit=12345)
    peer = make_peer(server)
    session = peer.open()
    receiver = session.receiver("r")
    receiver.source.address = "topic/group.id/g"
    receiver.source.filter.put_object({symbol("f"): "x"})
    receiver.source.capabilities.put_object(symbol("queue"))
    receiver.source.durability = 2
    receiver.source.expiry_policy = receiver.source.EXPIRE_NEVER
    receiver.open()
    sender = session.sender("s")
    sender.open()
    peer.run()
    incoming, outgoing = server.links["s"], server.links["r"]
    assert outgoing.source.address == "topic/group.id/g"
    assert [(one.name, one.descriptor, one.value) for one in outgoing.source.filters] == [("f", None, "x")]
    assert outgoing.source.capabilities == ("queue",)
    assert (outgoing.source.durable, outgoing.source.expiry) == (2, "never")
    assert incoming.incoming
    assert incoming.target.kind is TerminusKind.TARGET
    assert incoming.target.address is None
    assert sender.remote_max_message_size == 12345
    assert receiver.remote_source.address == "topic/group.id/g"
    remote_filter = receiver.remote_source.filter
    assert not remote_filter.next()  # a filter that is not applied is not echoed


FILTERS = {
    symbol("selector"): Described(ulong(0x0000468C00000004), "a = 1"),
    symbol("offset"): Described(symbol("rabbitmq:stream-offset-spec"), ulong(7)),
    symbol("nested"): Described(symbol("x"), [1, Described(symbol("y"), {"deep": int32(3)})]),
    symbol("plain"): int32(2),
}


@pytest.mark.clause("AMQP-3.5.3")
@pytest.mark.parametrize("applied", [(), ("selector",), ("plain", "offset"), tuple(FILTERS)])
def test_filters_that_are_applied_are_echoed_to_the_byte(
    make_server: Any, make_peer: Any, applied: tuple[str, ...]
) -> None:
    server = make_server()
    peer = make_peer(server)
    receiver = peer.open().receiver("r")
    receiver.source.address = "t"
    receiver.source.filter.put_object(FILTERS)
    server.answers = False
    receiver.open()
    peer.run()
    (link,) = [event.link for event in server.of(LinkRequested)]
    filters = {one.name: one for one in link.source.filters}
    assert [(name, one.descriptor) for name, one in filters.items()] == [
        ("selector", 0x0000468C00000004),
        ("offset", "rabbitmq:stream-offset-spec"),
        ("nested", "x"),
        ("plain", None),
    ]
    assert (filters["selector"].value, filters["offset"].value, filters["plain"].value) == ("a = 1", 7, 2)
    server.engine.accept_link(link, filters=[filters[name] for name in applied])
    peer.run()
    expected = Data()
    expected.put_object({symbol(name): FILTERS[symbol(name)] for name in applied})
    assert receiver.remote_source.filter.encode() == (expected.encode() if applied else b"")


@pytest.mark.parametrize(
    "filters",
    [[symbol("f"), 1], {5: "x"}, {symbol("f"): Described([1], "x")}, {None: None}],
    ids=["list", "number", "descriptor", "null"],
)
@pytest.mark.clause("AMQP-3.5.3")
def test_invalid_filter_sets(make_server: Any, make_peer: Any, filters: Any) -> None:
    server = make_server()
    peer = make_peer(server)
    receiver = peer.open().receiver("r")
    receiver.source.address = "t"
    receiver.source.filter.put_object(filters)
    receiver.open()
    peer.run()
    assert receiver.remote_condition.name == outcomes.INVALID_FIELD
    assert receiver.remote_source.type == receiver.remote_source.UNSPECIFIED


def open_receiver(make_server: Any, make_peer: Any, credit: int) -> tuple[Any, Any, Any]:
    server = make_server()
    peer = make_peer(server)
    session = peer.open()
    receiver = session.receiver("r")
    receiver.source.address = "t"
    receiver.open()
    receiver.flow(credit)
    peer.run()
    return server, peer, receiver


def test_sending_and_outcomes(make_server: Any, make_peer: Any) -> None:
    server, peer, _ = open_receiver(make_server, make_peer, 5)
    link = server.links["r"]
    assert server.engine.credit_of(server.of(CreditChanged)[-1].link) == 5
    for number, answer in enumerate((Delivery.ACCEPTED, Delivery.RELEASED, Delivery.REJECTED, Delivery.MODIFIED)):
        peer.answer = answer
        server.engine.send(link, [DATA], [f"token {number}"])
        peer.run()
    found = [(event.delivery, event.state.code) for event in server.of(DispositionReceived)]
    (accepted,) = server.of(DeliveriesAccepted)
    assert (accepted.link, accepted.deliveries) == (link, ["token 0"])
    assert found == [
        ("token 1", outcomes.RELEASED),
        ("token 2", outcomes.REJECTED),
        ("token 3", outcomes.MODIFIED),
    ]
    assert peer.received == [DATA] * 4
    assert link.held == 0
    assert server.engine.credit_of(link) == 1
    server.engine.send(link, [DATA], None)  # settled: no outcome comes
    peer.run()
    assert len(server.of(DeliveriesAccepted) + server.of(DispositionReceived)) == 4
    assert server.engine.credit_of(link) == 0


def test_what_is_accepted_in_a_row_is_one_event_for_each_link(make_server: Any, make_peer: Any) -> None:
    server, peer, first = open_receiver(make_server, make_peer, 10)
    second = first.session.receiver("s")
    second.source.address = "t"
    second.open()
    second.flow(10)
    peer.run()
    for number, name in enumerate("rrrsrrsr"):
        server.engine.send(server.links[name], [DATA], [number])
    peer.run()
    for number, delivery in enumerate(peer.deliveries):
        delivery.update(Delivery.RELEASED if number == 5 else Delivery.ACCEPTED)
        delivery.settle()
    peer.run()
    told = [
        (event.link.name, event.deliveries if isinstance(event, DeliveriesAccepted) else event.delivery)
        for event in server.events
        if isinstance(event, DeliveriesAccepted | DispositionReceived)
    ]
    first_run = [("r", [0, 1, 2])]
    assert told == [*first_run, ("s", [3]), ("r", [4]), ("r", 5), ("s", [6]), ("r", [7])]
    assert [link.held for link in server.links.values()] == [0, 0]
    assert not server.engine._sent


def test_a_range_of_deliveries_is_accepted_by_one_disposition(make_server: Any, make_peer: Any, frames: Any) -> None:
    server, _, _ = open_receiver(make_server, make_peer, 10)
    for number in range(6):
        server.engine.send(server.links["r"], [DATA], [number])
    server.connection.data_to_send()
    for first, last in ((1, 3), (0, 4), (4, 5), (5, 9)):  # repeated or unknown: ignored
        accepted = (frames.TRUE, frames.uint(first), frames.uint(last), frames.TRUE, b"\x00\x53\x24\x45")
        server.feed(frames.frame(frames.performative(0x15, *accepted)))
    runs = [event.deliveries for event in server.of(DeliveriesAccepted)]
    assert runs[0] == [1, 2, 3]
    assert [number for run in runs for number in run] == [1, 2, 3, 0, 4, 5]


def test_a_state_then_a_settlement_is_one_outcome(make_server: Any, make_peer: Any) -> None:
    server, peer, _ = open_receiver(make_server, make_peer, 5)
    server.engine.send(server.links["r"], [DATA], ["token"])
    data = server.connection.data_to_send()
    peer.transport.push(data)
    event = peer.collector.peek()
    while event is not None:
        if event.delivery is not None:
            current = event.delivery
        peer.collector.pop()
        event = peer.collector.peek()
    current.update(Delivery.ACCEPTED)
    peer.run()
    current.settle()
    peer.run()
    (accepted,) = server.of(DeliveriesAccepted)
    assert accepted.deliveries == ["token"]
    assert not server.of(DispositionReceived)


@pytest.mark.clause("AMQP-2.6.7")
def test_drain(make_server: Any, make_peer: Any) -> None:
    server, peer, receiver = open_receiver(make_server, make_peer, 0)
    receiver.drain(10)
    peer.run()
    event = server.of(CreditChanged)[-1]
    assert event.drain
    assert server.engine.credit_of(event.link) == 10
    server.engine.send(event.link, [DATA], None)
    server.engine.drained(event.link)
    peer.run()
    assert receiver.credit == 0
    assert not receiver.draining()
    assert peer.received == [DATA]


def test_detach_with_deliveries_held(make_server: Any, make_peer: Any) -> None:
    server = make_server()
    peer = make_peer(server)
    session = peer.open()
    sender = peer.sender(session)
    peer.run()
    for number in range(3):
        peer.transfer(sender, f"d{number}")
    peer.run()
    received = server.received
    sender.close()
    peer.run()
    assert [type(event) for event in server.events[-1:]] == [LinkDetached]
    assert not server.is_empty_of_links  # the handles are still in use
    for event in received[:2]:
        server.engine.accept_deliveries(event.link, (event.delivery,))
    server.engine.settle_delivery(received[2].link, received[2].delivery, outcomes.STATE_FAILED)
    peer.run()
    assert server.is_empty_of_links


def test_a_late_outcome_for_settled_messages_leaves_other_links_alone(make_server: Any, make_peer: Any) -> None:
    """The links of these messages are gone, and proton has given the address of one to another link."""
    server = make_server()
    peer = make_peer(server)
    session = peer.open()
    gone = [peer.sender(session, f"gone-{number}") for number in range(20)]
    peer.run()
    for link in gone:
        peer.transfer(link, "1").settle()
    for link in gone:
        link.close()
    peer.run()
    late = server.of(TransfersReceived)
    assert len(server.received) == len(gone)
    for link in gone:
        link.free()
    freed = {event.link.address for event in late}
    others = []
    # The allocator gives an address back sooner or later, and not always to this side.
    while freed.isdisjoint(link.address for link in server.engine._links.values()):
        assert len(others) < 200
        others.append(peer.sender(session, f"other-{len(others)}"))
        peer.run()
    for event in late:
        server.engine.accept_deliveries(event.link, event.deliveries)
    peer.run()
    for link in others:
        peer.transfer(link, "2")
    peer.run()
    assert [found.link.name for found in server.received[len(gone) :]] == [link.name for link in others]


def test_many_links_leave_nothing_behind(make_server: Any, make_peer: Any) -> None:
    server = make_server()
    peer = make_peer(server)
    session = peer.open()
    for number in range(50):
        sender = peer.sender(session, f"s{number}")
        peer.run()
        peer.transfer(sender, "d")
        peer.run()
        event = server.received[-1]
        server.engine.accept_deliveries(event.link, (event.delivery,))
        sender.close()
        peer.run()
        sender.free()
    assert server.is_empty_of_links
    assert len(server.of(LinkDetached)) == 50
    session.close()
    peer.run()
    assert server.is_empty_of_links
    assert not server.engine._sessions
    assert len(server.of(SessionEnded)) == 1


def test_detach_is_answered_by_detach_and_close_by_close(make_server: Any, make_peer: Any) -> None:
    server = make_server()
    peer = make_peer(server)
    session = peer.open()
    for name in ("kept", "closed"):
        link = session.receiver(name)
        link.source.address = "t"
        link.open()
        peer.run()
        (link.detach if name == "kept" else link.close)()
        peer.run()
    assert [event.closed for event in server.of(LinkDetached)] == [False, True]
    details = [body for code, body in frames_of(peer) if code == 0x16]
    assert len(details) == 2


def frames_of(peer: Any) -> list[tuple[int, bytes]]:
    data = bytes(peer.from_server)
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        if data[at : at + 4] == b"AMQP":
            at += 8
            continue
        size = int.from_bytes(data[at : at + 4], "big")
        if size > 8:
            found.append((data[at + 10], data[at + 8 : at + size]))
        at += size
    return found


def test_a_peers_window_that_is_shut(make_server: Any, frames: Any) -> None:
    """With credit but a shut session window we stop sending, and continue when the window opens."""
    server = make_server()
    server.feed(
        frames.HEADER
        + frames.frame(frames.performative(0x10, frames.string("c"), frames.string("h"), frames.uint(65536)))
        + frames.frame(frames.performative(0x11, frames.NULL, b"\x43", frames.uint(2), frames.uint(2)))
        + frames.attach("r", 0, sending=False)
    )
    link = server.links["r"]

    def flow(next_incoming: int, window: int) -> bytes:
        return frames.frame(
            frames.performative(
                0x13, frames.uint(next_incoming), frames.uint(window), b"\x43", frames.uint(100),
                frames.uint(0), frames.uint(0), frames.uint(100_000),
            )
        )  # fmt: skip

    server.feed(flow(0, 2))
    assert server.engine.credit_of(link) == 100_000
    sent = 0
    while server.engine.credit_of(link):
        server.engine.send(link, [b"\x00\x53\x75\xb0\x00\x00\x27\x10" + bytes(10_000)], None)
        sent += 1
        assert sent < 1000
    assert sent < 40  # at most 256 KiB inside the engine
    transfers = [code for code, _ in frames.parse(server.connection.data_to_send()) if code == 0x14]
    assert len(transfers) == 2
    before = len(server.of(CreditChanged))
    server.feed(flow(2, 1000))
    server.connection.data_to_send()
    server.feed(flow(2 + sent - 2, 1000))
    assert len(server.of(CreditChanged)) > before
    assert server.engine.credit_of(link) > 0


def test_protons_wrappers_and_our_calls_see_the_same(make_server: Any, make_peer: Any) -> None:
    """proton's public wrappers as the receiver, and our calls into its C functions, for the same bytes."""
    bodies = [bytes([number]) * (number * 37 + 1) for number in range(30)]
    wrapped_server = make_server(limit=10_000)
    left = make_peer(wrapped_server)
    session = left.open()
    sender = left.sender(session)
    wrapped_server.credit = 100
    left.run()
    wrapped_server.engine.grant(wrapped_server.links["s"], 90)
    left.run()
    for number, body in enumerate(bodies):
        left.transfer(sender, f"tag{number}", b"\x00\x53\x75\xb0" + len(body).to_bytes(4, "big") + body)
    left.run()
    ours = [event.data for event in wrapped_server.received]
    # The other way: our sender, proton's wrappers as the receiver.
    server, peer, _ = open_receiver(make_server, make_peer, 100)
    for data in ours:
        server.engine.send(server.links["r"], [data], [object()])
    peer.run()
    assert peer.received == ours
    for event in wrapped_server.received:
        wrapped_server.engine.accept_deliveries(event.link, (event.delivery,))
    left.run()
    assert left.outcomes == [(f"tag{number}", outcomes.ACCEPTED) for number in range(len(bodies))]


def test_links_that_are_detached_one_by_one_cost_the_same_each(make_server, make_peer) -> None:
    def detach(count: int) -> int:
        server = make_server(limits=EndpointLimits(links_per_session=count))
        peer = make_peer(server)
        session = peer.open()
        receivers = [session.receiver(f"r-{number}") for number in range(count)]
        for receiver in receivers:
            receiver.open()
            receiver.flow(5)
        peer.run()
        for link in server.links.values():
            for number in range(5):
                server.engine.send(link, [b"x"], [number])
        peer.run()
        data = []
        for receiver in receivers:
            receiver.close()
            data.append(peer.transport.peek(peer.transport.pending()))
            peer.transport.pop(len(data[-1]))

        def feed() -> None:
            for part in data:
                server.feed(bytes(part))
                server.connection.data_to_send()

        taken = steps(feed)
        assert len(server.of(LinkDetached)) == count
        assert server.is_empty_of_links
        return taken

    assert detach(200) < 2.5 * detach(100)
