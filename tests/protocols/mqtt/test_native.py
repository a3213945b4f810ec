"""C parses runs of packets as Python parses each packet. `make sanitize` runs this, too."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocols.mqtt import _native as native
from protocols.mqtt import receiving
from protocols.mqtt.connection import Connection
from protocols.mqtt.properties import TABLE, Properties
from protocols.mqtt.states import Awaits, publish_flags
from tests.protocols.mqtt.client import opened, send_publish
from tests.protocols.mqtt.test_runs import packets
from tests.protocols.mqtt.wire import varint, wire
from tests.reference import mqtt_usual
from tests.support.mqtt_mutated import compare

ANNOUNCED = (
    Properties(),
    Properties(topic_alias_maximum=2),
    Properties(receive_maximum=3, topic_alias_maximum=1, retain_available=0),
    Properties(maximum_packet_size=60, maximum_qos=1),
)
NAMES = ("a/b", "a/c", "", "ä/€/😀", "a+", "#", "a\0", "\x1f", "a\x80", "\ufdd0", "\U0001fffe", "\ufeff")
PIECES = (
    "01 00", "01 01", "01 02", "02 0000000a", "02 00", "03 s'text/plain'", "03 0001 00", "08 s'reply'", "08 0000",
    "08 s'a/#'", "08 0001 1f", "09 0003 00ff00", "0b 01", "23 0001", "23 0002", "23 0003", "23 0000", "26 s'a' s'b'",
    "26 s'a' s'b'", "26 s'a' 0002 00", "26 0001 ff 0000", "26 0001 00 0000", "11 00000001", "7f", "26 0000 0002 c3a4",
)  # fmt: skip
EVERY_PROPERTY = b"".join(wire(PIECES[number]) for number in (1, 3, 5, 7, 11, 13, 17, 18, 24))
topics = st.one_of(
    st.sampled_from([NAMES[0]] * 6 + list(NAMES)).map(str.encode),
    st.sampled_from([b"\xff", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xc0\x80"]),
    st.text(max_size=4).map(lambda text: text.encode("utf-8", "surrogatepass")),
)
blocks = st.one_of(
    st.just(b""), st.lists(st.sampled_from(PIECES).map(wire) | st.binary(max_size=3), max_size=5).map(b"".join)
)


@st.composite
def publishes(draw: Any) -> bytes:
    """PUBLISHes of MQTT 5.0 with any topic and any properties, good and bad, and other packets in between."""
    if draw(st.sampled_from((False,) * 5 + (True,))):
        return draw(
            st.sampled_from((0x40, 0x50, 0x62, 0x70, 0x42, 0xC0)).flatmap(
                lambda first: st.integers(0, 5).map(lambda number: bytes((first, 2, 0, number)))
            )
            | st.binary(max_size=5)
        )
    first = draw(st.sampled_from((0x30, 0x32, 0x32, 0x34, 0x34, 0x3C, 0x31, 0x33, 0x3A)))
    topic, block = draw(topics), draw(blocks)
    body = len(topic).to_bytes(2) + topic
    if first & 0x06:
        body += draw(st.sampled_from((1, 2, 3, 4, 300))).to_bytes(2)
    size = len(block) + draw(st.sampled_from((0,) * 20 + (1, -1, 200)))
    body += varint(max(0, size)) + block + draw(st.binary(max_size=4))
    return bytes((first,)) + varint(len(body)) + body


def played(take: Any, version: int, announced: Properties, pieces: list[bytes]) -> Any:
    """The observable state of a connection after it has received the pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receiving, "take_usual", take)
        connection = opened(version, announced)
        for qos in (1, 2, 1, 2):
            send_publish(connection, "t", b"x", qos)
        connection.data_to_send()
        events = [event for piece in pieces for event in connection.receive_data(piece)]
    state = [connection.state, connection.inbound.used, connection.outbound.used, connection._qos2, connection._awaited]
    return events, [type(one) for one in events], connection.data_to_send(), connection._aliases, state


def agree(version: int, announced: Properties, stream: bytes, cut: int) -> None:
    pieces = [stream[:cut], stream[cut:]]
    assert played(native.take_usual, version, announced, pieces) == played(
        mqtt_usual.take_usual, version, announced, pieces
    )


@given(stream=st.lists(publishes(), max_size=8).map(b"".join), announced=st.sampled_from(ANNOUNCED), data=st.data())
@example(wire(f"32 * s'a/b' 0001 v {EVERY_PROPERTY.hex()} ; 'x'"), ANNOUNCED[1], None)
def test_any_publishes(stream: bytes, announced: Properties, data: Any) -> None:
    agree(5, announced, stream, 0 if data is None else data.draw(st.integers(0, len(stream))))


@pytest.mark.parametrize("version", [5, 4, 3])
@given(data=st.data())
def test_runs_with_every_mistake_that_they_could_hide(version: int, data: Any) -> None:
    stream = b"".join(data.draw(st.lists(packets(version), max_size=12)))
    agree(version, data.draw(st.sampled_from(ANNOUNCED)), stream, data.draw(st.integers(0, len(stream))))


@given(
    good=st.lists(publishes(), min_size=1, max_size=5).map(b"".join).filter(bool),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=3),
)
def test_packets_that_were_damaged(good: bytes, changes: list[tuple[int, int]]) -> None:
    stream = bytearray(good)
    for place, value in changes:
        stream[place % len(stream)] = value
    agree(5, ANNOUNCED[1], bytes(stream), 0)


@given(st.binary(max_size=60))
def test_any_bytes(stream: bytes) -> None:
    agree(5, ANNOUNCED[0], stream, 0)


def test_thousands_of_mutations_mean_the_same() -> None:
    """A million do, by `python -m tests.support.mqtt_mutated`."""
    done, publishes = compare(4_000, seed=2)
    assert done >= 4_000
    assert publishes > 500


def test_every_property_of_a_publish_is_taken() -> None:
    """A property that C does not know would be left to Python, which is slow."""
    found: list[Any] = []
    packet = wire(f"32 * s'a/b' 0001 v {EVERY_PROPERTY.hex()} ; 'x'")
    arguments = (packet * 2, 0, found, True, 1000, 9, publish_flags(), 2, {}, {}, {})
    assert native.take_usual(*arguments) == (2 * len(packet), 2, 0)
    fields = {row.name for row in TABLE if 3 in row.packets} - {"subscription_identifiers"}  # not from a client
    assert all(getattr(found[1].properties, name) for name in fields)
    assert found[0].topic is found[1].topic


def test_more_user_properties_than_are_taken_in_c() -> None:
    for count in (64, 200, 1024, 1025):
        pairs = wire("26 s'a' s'b'").hex() * count
        agree(5, ANNOUNCED[0], wire(f"32 * s'a/b' 0001 v {pairs} ; 'x'") * 2, 0)


GIVEN: list[Any] = [b"", 0, [], True, 100, 9, publish_flags(), 2, {}, {}, {}]


@pytest.mark.parametrize("place", range(11))
def test_what_no_caller_may_hand_over(place: int) -> None:
    arguments = list(GIVEN)
    arguments[place] = None if place != 3 else arguments.pop()
    with pytest.raises(TypeError):
        native.take_usual(*arguments)


@pytest.mark.parametrize(("place", "value"), [(1, -1), (6, ())])
def test_what_no_caller_may_mean(place: int, value: Any) -> None:
    arguments = list(GIVEN)
    arguments[place] = value
    with pytest.raises(ValueError, match="position"):
        native.take_usual(*arguments)


def test_nothing_is_kept() -> None:
    """Memory and references are released, whether C handles a packet, leaves it or fails."""
    pieces = [wire(f"32 * s'a/b' 0001 v {wire(piece).hex()} ; 'x'") for piece in PIECES]
    pieces += [wire(f"34 * s'{name or 'x'}' 0001 00 'x'") for name in ("a", "b", "a+")]
    pieces += [wire(f"3c * s'a/b' 0001 v {EVERY_PROPERTY.hex()} ; 'x'"), b"\x40\2\0\1", b"\x62\2\0\1", b"\x30\2\0\1"]
    aliases: dict[int, str] = {}

    def everything() -> None:
        for piece in pieces:
            awaited = dict(AWAITED)
            with contextlib.suppress(TypeError):
                native.take_usual(piece * 2, 0, [], True, 1000, 9, publish_flags(), 2, aliases, {}, awaited)

    everything()
    gc.collect()
    kept = [publish_flags(), *publish_flags(), *AWAITED.values(), (), Properties]
    before, size = [sys.getrefcount(one) for one in kept], sys.getallocatedblocks()
    for _ in range(1000):
        everything()
    assert [sys.getrefcount(one) for one in kept] == before
    assert sys.getallocatedblocks() - size < 500


AWAITED = {1: Awaits.PUBACK, 2: Awaits.PUBREC}


def test_the_tests_run_with_the_extension() -> None:
    assert receiving.take_usual is native.take_usual
    assert isinstance(opened(5), Connection)
