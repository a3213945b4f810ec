"""Messages that differ in their value only: what is found without mapping each is what mapping each gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mapping.amqp.incoming import Destination, Unmappable, gateway_headers, to_record
from mapping.amqp.runs import template_of
from mapping.record import Record
from protocols.amqp import primitives

NOW = 1_800_000_000_000
HERE = Destination("t", b"t", None, b"default", "ann", gateway_headers("client-1"), partitions=4)

DURABLE = b"\x00\x53\x70\xc0\x02\x01\x41"
TTL = b"\x00\x53\x70" + primitives.list_of([primitives.TRUE, primitives.NULL, primitives.uint(1000)])
DELIVERY = b"\x00\x53\x71" + primitives.map_of([primitives.symbol("x-opt-a"), primitives.TRUE])
KEY = b"\x00\x53\x72" + primitives.map_of([primitives.symbol("x-opt-bridge.key"), primitives.string("k")])
PLACE = b"\x00\x53\x72" + primitives.map_of([primitives.symbol("x-opt-bridge.partition"), primitives.integer(2)])
OTHER = b"\x00\x53\x72" + primitives.map_of([primitives.symbol("x-opt-mine"), primitives.string("k")])
PROPERTIES = b"\x00\x53\x73" + primitives.list_of([primitives.string("id-1")])
APPLICATION = b"\x00\x53\x74" + primitives.map_of([primitives.string("site"), primitives.integer(7)])
FOOTER = b"\x00\x53\x78" + primitives.map_of([primitives.symbol("x"), primitives.binary(b"\x00\x53\x75\xa0\x01v")])


def short(value: bytes) -> bytes:
    return b"\x00\x53\x75\xa0" + bytes((len(value),)) + value


def long(value: bytes) -> bytes:
    return b"\x00\x53\x75\xb0" + len(value).to_bytes(4, "big") + value


def text(value: bytes) -> bytes:
    return b"\x00\x53\x77\xa1" + bytes((len(value),)) + value


fronts = st.lists(
    st.sampled_from([DURABLE, TTL, DELIVERY, KEY, PLACE, OTHER, PROPERTIES, APPLICATION, short(b"")]), max_size=3
).map(b"".join)
bodies = st.one_of(
    st.sampled_from([b"", b"v", b"x" * 255]).map(short),
    st.sampled_from([b"", b"v", b"x" * 255, b"x" * 256, b"x" * 300]).map(long),
    st.just(text(b"v")),
    st.just(short(b"v") + FOOTER),
    st.just(b"\x00\x53\x75\xa0"),
    st.just(b"\x00\x53\x75\xa0\x05v"),
)
messages = st.tuples(st.lists(fronts, min_size=1, max_size=2), st.lists(st.tuples(st.integers(0, 1), bodies))).map(
    lambda drawn: [drawn[0][which % len(drawn[0])] + body for which, body in drawn[1]]
)


def mapped(data: bytes, now_ms: int = NOW) -> Record | None:
    try:
        return to_record(data, HERE, now_ms)
    except Unmappable:
        return None


@given(messages)
def test_what_is_alike_becomes_the_same_record_but_for_its_value(run: list[bytes]) -> None:
    for at, data in enumerate(run):
        record = mapped(data)
        like = None if record is None else template_of(data, record)
        if like is None:
            continue
        values = like.values(run, at)
        assert values[0] == like.record.value, "it is like itself"
        for later, value in enumerate(values, at):
            other = mapped(run[later], NOW + 5000)
            assert other == Record(
                like.record.topic, like.record.key, value, like.record.headers, None, other.partition
            )
            assert other.partition == like.record.partition


def found(*run: bytes) -> int:
    record = mapped(run[0])
    assert record is not None
    like = template_of(run[0], record)
    return 0 if like is None else len(like.values(run, 0))


def test_runs() -> None:
    assert found(short(b"1"), short(b"22"), short(b""), KEY + short(b"3")) == 3
    assert found(KEY + short(b"1"), KEY + short(b"2"), short(b"3")) == 2
    assert found(DURABLE + OTHER + APPLICATION + short(b"1"), DURABLE + OTHER + APPLICATION + short(b"2")) == 2
    assert found(DELIVERY + PLACE + short(b"1"), DELIVERY + PLACE + short(b"2")) == 2
    assert found(long(b"x" * 256), long(b"y" * 300), long(b"z"), short(b"z")) == 2
    assert found(short(b"1"), short(b"1") + FOOTER) == 1


def test_what_depends_on_more_than_the_front_is_like_nothing() -> None:
    assert found(TTL + short(b"1"), TTL + short(b"2")) == 0, "its expiry depends on the time"
    assert found(PROPERTIES + short(b"1"), PROPERTIES + short(b"2")) == 0
    assert found(short(b"v") + FOOTER, short(b"v") + FOOTER) == 0
    assert found(short(b"") + short(b"v"), short(b"") + short(b"w")) == 0, "two sections"
    assert found(text(b"v"), text(b"w")) == 0
    assert found(long(b"v"), long(b"w")) == 0
