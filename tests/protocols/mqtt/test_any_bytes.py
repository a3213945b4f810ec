"""Properties of the whole parser: round trips, splits that change nothing, and no exception for any bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.connection import ConnectionFailed
from protocols.mqtt import packets
from protocols.mqtt.connection import Connection, PacketLimits, State
from protocols.mqtt.decoding import decode_packet
from protocols.mqtt.packets import Packet, Version
from protocols.mqtt.properties import TABLE, WILL, Kind, Properties
from protocols.mqtt.reasons import REASON_CODES, PacketType
from tests.protocols.mqtt.client import CONNECTS, send_publish
from tests.protocols.mqtt.wire import wire
from tests.support.mqtt_packets import encode_packet

PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"]), max_size=12)
TOPICS = NAMES.filter(lambda text: text and "+" not in text and "#" not in text)
FILTERS = st.one_of(TOPICS, st.sampled_from(["#", "+", "a/+/#", "$share/g/a"]))
IDS = st.integers(1, 65_535)
VALUES: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.BYTE: st.integers(0, 1),
    Kind.TWO_BYTES: st.integers(1, 65_535),
    Kind.FOUR_BYTES: st.integers(1, 0xFFFFFFFF),
    Kind.TEXT: PLAIN,
    Kind.NAME: TOPICS,
    Kind.BINARY: st.binary(max_size=12),
    Kind.PAIR: st.lists(st.tuples(PLAIN, PLAIN), max_size=3).map(tuple),
}


def properties(packet: int) -> st.SearchStrategy[Properties | None]:
    fields = {row.name: VALUES[row.kind] for row in TABLE if packet in row.packets and row.kind is not Kind.VARINT}
    if packet in (PacketType.SUBSCRIBE, PacketType.PUBLISH):
        most = 1 if packet == PacketType.SUBSCRIBE else 3
        identifiers = st.lists(st.integers(1, 268_435_455), max_size=most).map(tuple)
        fields["subscription_identifiers"] = identifiers
    made = st.fixed_dictionaries({}, optional=fields).map(lambda found: Properties(**found))
    return made.map(lambda one: None if one == Properties() else one)


def code(kind: PacketType) -> st.SearchStrategy[int]:
    return st.sampled_from(sorted(REASON_CODES[kind]))


P = PacketType
WILLS = st.builds(packets.Will, TOPICS, st.binary(max_size=20), st.integers(0, 2), st.booleans(), properties(WILL))
CONNECT = st.builds(
    packets.Connect,
    st.just(Version.V5),
    TOPICS,
    st.booleans(),
    st.integers(0, 65_535),
    st.none() | NAMES,
    st.none() | st.binary(max_size=9),
    st.none() | WILLS,
    properties(P.CONNECT),
).filter(
    lambda one: (
        not one.properties
        or one.properties.authentication_data is None
        or one.properties.authentication_method is not None
    )
)
PUBLISH = st.one_of(
    st.builds(
        packets.Publish, TOPICS, st.binary(max_size=300), st.just(0), st.booleans(), properties=properties(P.PUBLISH)
    ),
    st.builds(
        packets.Publish,
        TOPICS,
        st.binary(max_size=300),
        st.integers(1, 2),
        st.booleans(),
        st.booleans(),
        IDS,
        properties(P.PUBLISH),
    ),
)
SUBSCRIPTION = st.builds(
    packets.Subscription, FILTERS, st.integers(0, 2), st.just(False), st.booleans(), st.integers(0, 2)
)
ANY_PACKET = st.one_of(
    CONNECT,
    PUBLISH,
    st.builds(packets.Connack, st.booleans(), code(P.CONNACK), properties(P.CONNACK)),
    st.builds(packets.Puback, IDS, code(P.PUBACK), properties(P.PUBACK)),
    st.builds(packets.Pubrec, IDS, code(P.PUBREC), properties(P.PUBREC)),
    st.builds(packets.Pubrel, IDS, code(P.PUBREL), properties(P.PUBREL)),
    st.builds(packets.Pubcomp, IDS, code(P.PUBCOMP), properties(P.PUBCOMP)),
    st.builds(
        packets.Subscribe,
        IDS,
        st.lists(SUBSCRIPTION, min_size=1, max_size=4).map(tuple),
        properties(P.SUBSCRIBE),
    ),
    st.builds(packets.Suback, IDS, st.lists(code(P.SUBACK), min_size=1).map(tuple), properties(P.SUBACK)),
    st.builds(
        packets.Unsubscribe,
        IDS,
        st.lists(FILTERS, min_size=1, max_size=4).map(tuple),
        properties(P.UNSUBSCRIBE),
    ),
    st.builds(packets.Unsuback, IDS, st.lists(code(P.UNSUBACK), min_size=1).map(tuple), properties(P.UNSUBACK)),
    st.builds(packets.Disconnect, code(P.DISCONNECT), properties(P.DISCONNECT)),
    st.builds(packets.Auth, code(P.AUTH), properties(P.AUTH)),
    st.sampled_from([packets.Pingreq(), packets.Pingresp()]),
)


def body(data: bytes) -> tuple[int, bytes]:
    at = 1
    while data[at] & 0x80:
        at += 1
    return data[0], data[at + 1 :]


@given(ANY_PACKET)
@settings(max_examples=250, deadline=None)
def test_round_trip(packet: Packet) -> None:
    first, rest = body(encode_packet(packet, Version.V5))
    assert decode_packet(first, rest, Version.V5) == packet


def older(packet: Packet) -> Packet | None:
    """Return a packet as 3.1.1 can express it, or None if it cannot."""
    match packet:
        case packets.Connect():
            will = packet.will and packets.Will(
                packet.will.topic, packet.will.payload, packet.will.qos, packet.will.retain
            )
            password = packet.password if packet.username is not None else None
            return packets.Connect(
                Version.V311, packet.client_id, packet.clean_start, packet.keep_alive, packet.username, password, will
            )
        case packets.Publish():
            return packets.Publish(
                packet.topic, packet.payload, packet.qos, packet.retain, packet.dup, packet.packet_id
            )
        case packets.Puback() | packets.Pubrec() | packets.Pubrel() | packets.Pubcomp():
            return type(packet)(packet.packet_id)
        case packets.Subscribe():
            plain = tuple(packets.Subscription(one.topic_filter, one.qos) for one in packet.subscriptions)
            return packets.Subscribe(packet.packet_id, plain)
        case packets.Suback():
            return packets.Suback(packet.packet_id, tuple(min(one, 0x80) for one in packet.reason_codes))
        case packets.Unsubscribe():
            return packets.Unsubscribe(packet.packet_id, packet.topic_filters)
        case packets.Unsuback():
            return packets.Unsuback(packet.packet_id)
        case packets.Disconnect():
            return packets.Disconnect()
        case packets.Connack() | packets.Auth():
            return None
    return packet


@given(ANY_PACKET)
@settings(max_examples=150, deadline=None)
def test_round_trip_in_311(packet: Packet) -> None:
    plain = older(packet)
    if plain is None:
        return
    first, rest = body(encode_packet(plain, Version.V311))
    assert decode_packet(first, rest, Version.V311) == plain


class Server:
    """A minimal session: accepts, optionally acknowledges, and records everything."""

    def __init__(self, acknowledges: bool = True) -> None:
        self.acknowledges = acknowledges
        self.connection = Connection(PacketLimits(max_packet_bytes=100_000))
        self.connection.tick(0.0)
        self.events: list[Any] = []
        self.sent = b""

    def feed(self, data: bytes) -> None:
        waiting = self.connection.receive_data(data)
        while waiting:
            event = waiting.pop(0)
            self.events.append(event)
            if type(event) is packets.Disconnect:
                self.connection.finish()
            if type(event) is packets.Connect and not self.connection.closing:
                announced = Properties(topic_alias_maximum=3)
                waiting += self.connection.accept(properties=announced, received=[2], reserved=[1, 5])
                if self.connection.is_open and self.acknowledges:
                    for qos in (1, 2, 2):
                        send_publish(self.connection, "plant/1", b"x", qos)
            elif not self.acknowledges:
                continue
            elif type(event) is packets.Publish and event.qos:
                (self.connection.send_puback if event.qos == 1 else self.connection.send_pubrec)(event.packet_id)
            elif type(event) is packets.Pubrel:
                self.connection.send_pubcomp(event.packet_id)
            elif type(event) is packets.Pubrec and event.reason_code < 0x80:
                self.connection.send_pubrel(event.packet_id)
        self.sent += self.connection.data_to_send()


EVENTS = (
    packets.Connect | packets.Publish | packets.Puback | packets.Pubrec | packets.Pubrel | packets.Pubcomp
    | packets.Subscribe | packets.Unsubscribe | packets.Disconnect | packets.Auth
)  # fmt: skip


def check_end(server: Server) -> None:
    """Check that all events are known, and that an end is the last event and closes the connection."""
    ends = [one for one in server.events if type(one) in (ConnectionFailed, packets.Disconnect)]
    assert all(isinstance(one, EVENTS | ConnectionFailed) for one in server.events)
    assert len(ends) <= 1
    assert not ends or server.events[-1] is ends[0]
    assert bool(ends) is server.connection.closing


# Single mutations of good packets reach further than noise.
SEEDS = [
    wire(text)
    for text in (
        "30 * s't/u' 00 'x'", "32 * s't' 0001 v 23 0001 26 s'k' s'v' ; 'x'", "34 * s't' 0002 00", "62 02 0002",
        "40 02 0001", "82 * 0001 v 0b 01 ; s'a/+' 01 s'$share/g/b' 02", "a2 * 0002 00 s'a/+'", "c0 00",
        "e0 * 04 v 1f s'bye' ;", "30 * s'' v 23 0001 ; 'y'", "50 * 0001 91 v 1f s'no' ;", "70 03 0001 92",
        "f0 * 18 v 15 s'M' ;", "40 02 0002", "50 02 0003", "70 02 0003", "50 02 0005", "70 02 0005", "62 02 0009",
    )
]  # fmt: skip
STREAMS = st.lists(st.one_of(st.sampled_from(SEEDS), st.binary(max_size=8)), max_size=12).map(b"".join)
ALIASES = "10 * s'MQTT' 05 00 000a v 22 0002 21 0003 ; s'me'"
OPENINGS = st.sampled_from([wire(text) for text in (*CONNECTS.values(), ALIASES)] + [b""])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(OPENINGS) + draw(STREAMS))
    if data:
        for _ in range(draw(st.integers(0, 2))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


@given(streams())
@settings(max_examples=300, deadline=None)
def test_any_bytes_never_raise(data: bytes) -> None:
    server = Server()
    server.feed(data)
    check_end(server)


@given(streams(), st.lists(st.integers(1, 40), max_size=60))
@settings(max_examples=250, deadline=None)
def test_splitting_changes_nothing(data: bytes, sizes: list[int]) -> None:
    # Without acknowledgements: a fault in the same read comes before the session could send them.
    whole, bytewise, pieces = (Server(acknowledges=False) for _ in range(3))
    whole.feed(data)
    for at in range(len(data)):
        bytewise.feed(data[at : at + 1])
    rest = data
    for size in sizes:
        pieces.feed(rest[:size])
        rest = rest[size:]
    pieces.feed(rest)
    assert whole.events == bytewise.events == pieces.events
    assert whole.sent == bytewise.sent == pieces.sent


@given(st.lists(PUBLISH, max_size=12), st.integers(1, 50))
@settings(max_examples=80, deadline=None)
def test_the_tight_loop_reads_what_the_decoder_reads(messages: list[packets.Publish], size: int) -> None:
    server = Server()
    server.feed(wire(CONNECTS[5]))
    expected: list[Any] = []
    data = b""
    for one in messages:
        plain = packets.Publish(one.topic, one.payload, one.qos, one.retain, one.dup, one.packet_id)
        if one.properties is not None:  # without what only a server may send, or needs leave for
            kept = Properties(content_type=one.properties.content_type, user_properties=one.properties.user_properties)
            plain = packets.Publish(
                one.topic,
                one.payload,
                one.qos,
                one.retain,
                one.dup,
                one.packet_id,
                None if kept == Properties() else kept,
            )
        raw = encode_packet(plain, Version.V5)
        expected.append(packets.Publish(*(getattr(plain, name) for name in plain.__struct_fields__)))
        assert decode_packet(*body(raw), Version.V5) == plain
        data += raw
    for at in range(0, len(data), size):
        server.feed(data[at : at + size])
    assert server.events[1:] == expected


@pytest.mark.parametrize("first", range(256))
def test_every_first_byte(first: int) -> None:
    for rest in (b"\x00", b"\x02\x00\x01", b"\x05\x00\x01a\x00b", b"\xff\xff\xff\xff\x01"):
        for opening in ("", CONNECTS[5], CONNECTS[4]):
            server = Server()
            server.feed(wire(opening) + bytes((first,)) + rest)
            check_end(server)
            assert server.connection.state in State
