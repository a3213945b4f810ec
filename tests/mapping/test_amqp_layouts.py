"""Messages that are laid out alike: a learnt layout makes of one what the general way makes of it, or nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mapping.amqp import Destination, Unmappable, gateway_headers, to_record
from mapping.amqp_layouts import Layout, Layouts
from mapping.record import Record
from protocols.amqp import primitives

NOW = 1_800_000_000_000
HERE = Destination("t", b"t", None, b"default", "ann", gateway_headers("client-1"), partitions=4)

DURABLE = b"\x00\x53\x70\xc0\x02\x01\x41"
TTL = b"\x00\x53\x70" + primitives.list_of([primitives.TRUE, primitives.NULL, primitives.uint(1000)])
DELIVERY = b"\x00\x53\x71" + primitives.map_of([primitives.symbol("x-opt-a"), primitives.TRUE])
PLACE = b"\x00\x53\x72" + primitives.map_of([primitives.symbol("x-opt-bridge.partition"), primitives.integer(2)])
FOOTER = b"\x00\x53\x78" + primitives.map_of([primitives.symbol("x"), primitives.TRUE])
BODY = b"\x00\x53\x75\xa0\x01v"


def key(text: str) -> bytes:
    return b"\x00\x53\x72" + primitives.map_of([primitives.symbol("x-opt-bridge.key"), primitives.string(text)])


def wide(small: bytes) -> bytes:
    """A list or map of the short form in the long one."""
    return bytes((small[0] + 0x10,)) + (small[1] + 3).to_bytes(4, "big") + small[2].to_bytes(4, "big") + small[3:]


texts = st.sampled_from(["", "a", "b", "ü", "t", "AMQP_BINARY:00", "x" * 100])
strings = texts.map(primitives.string)
values = st.one_of(
    strings,
    st.just(primitives.NULL),
    st.booleans().map(primitives.boolean),
    st.booleans().map(lambda value: b"\x56" + bytes((value,))),
    st.integers(-200, 200).map(primitives.long),
    st.integers(0, 300).map(primitives.uint),
    st.floats().map(primitives.double),
    st.integers(0, 2**40).map(primitives.timestamp),
    st.binary(max_size=3).map(primitives.binary),
    st.just(primitives.list_of([primitives.TRUE])),
    st.just(b"\xb1\x00\x00\x00\x01z"),
)
times = st.sampled_from([0, NOW - 1000, NOW, NOW + 10**12]).map(primitives.timestamp)
null = st.just(primitives.NULL)
PROPERTIES = (
    st.one_of(strings, st.just(primitives.ulong(7)), null), st.one_of(st.just(primitives.binary(b"ann")), null),
    st.one_of(strings, null), st.one_of(strings, null), st.one_of(strings, null), st.one_of(strings, null),
    st.one_of(st.just(primitives.symbol("text/plain")), null), null,
    st.one_of(st.just(primitives.timestamp(NOW + 5000)), null, null), st.one_of(times, null),
    st.one_of(strings, null), st.one_of(st.just(primitives.uint(3)), null), st.one_of(strings, null),
)  # fmt: skip


@st.composite
def kinds(draw: st.DrawFn) -> st.SearchStrategy[bytes]:
    """A kind of messages: some of its fields are drawn once, the others for each message."""

    def field(strategy: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
        return strategy if draw(st.booleans()) else st.just(draw(strategy))

    sections: list[st.SearchStrategy[bytes]] = []
    front = draw(st.sampled_from([b"", DURABLE, DURABLE, TTL, DELIVERY]))
    sections.append(st.just(front))
    sections.append(draw(st.sampled_from([st.just(b""), st.just(PLACE), texts.map(key)])))
    enlarge = draw(st.sampled_from([bytes, wide]))
    if draw(st.booleans()):
        fields = [field(strategy) for strategy in PROPERTIES[: draw(st.integers(1, len(PROPERTIES)))]]
        sections.append(st.tuples(*fields).map(lambda found: b"\x00\x53\x73" + _list(found, enlarge is wide)))
    if draw(st.booleans()):
        names = draw(st.lists(strings, min_size=1, max_size=3))
        entries = [item for name in names for item in (st.just(name), field(values))]
        sections.append(st.tuples(*entries).map(lambda found: b"\x00\x53\x74" + _map(found, enlarge is wide)))
    body = st.sampled_from([b"", b"v", b"x" * 200]).map(
        lambda value: b"\x00\x53\x75\xa0" + bytes((len(value),)) + value
    )
    long = st.sampled_from([b"v", b"x" * 256]).map(lambda value: b"\x00\x53\x75\xb0" + len(value).to_bytes(4) + value)
    sections.append(draw(st.sampled_from([body, body, long, st.just(BODY + FOOTER), st.just(BODY + BODY)])))
    return st.tuples(*sections).map(b"".join)


def _list(items: tuple[bytes, ...], large: bool) -> bytes:
    found = primitives.list_of(items)
    return wide(found) if large and found[0] == 0xC0 else found


def _map(items: tuple[bytes, ...], large: bool) -> bytes:
    found = primitives.map_of(items)
    return wide(found) if large and found[0] == 0xC1 else found


def mapped(data: bytes) -> Record | None:
    try:
        return to_record(data, HERE, NOW)
    except Unmappable:
        return None


def learnt(*messages: bytes) -> Layout | None:
    layouts = Layouts()
    for data in messages:
        if mapped(data) is not None:
            layouts.learn(data, HERE)
    return layouts.layout


@given(st.data())
def test_a_layout_says_what_the_general_way_says_or_nothing(data: st.DataObject) -> None:
    kind = data.draw(kinds())
    layout = learnt(*data.draw(st.lists(kind, min_size=2, max_size=5)))
    if layout is None:
        return
    other = data.draw(kinds())
    for message in data.draw(st.lists(st.one_of(kind, kind, other), max_size=8)):
        found = layout.record(message, NOW)
        assert found is None or found == mapped(message)
        for end in range(0, len(message), 23):
            cut = layout.record(message[:end], NOW)
            assert cut is None or cut == mapped(message[:end])
        at = data.draw(st.integers(0, len(message) - 1))
        bent = message[:at] + bytes((data.draw(st.integers(0, 255)),)) + message[at + 1 :]
        found = layout.record(bent, NOW)
        assert found is None or found == mapped(bent)


def message(number: int, *, subject: str = "subj", reading: bytes | None = None, front: bytes = DURABLE) -> bytes:
    properties = primitives.list_of(
        [primitives.string(f"id-{number}"), primitives.NULL, primitives.string("to"), primitives.string(subject),
         primitives.NULL, primitives.string(f"c-{number * 1000}"), primitives.symbol("text/plain"), primitives.NULL,
         primitives.NULL, primitives.timestamp(NOW + number)]
    )  # fmt: skip
    application = primitives.map_of(
        [primitives.string("device"), primitives.string("dev-1"), primitives.string("temp"),
         primitives.double(number / 10) if reading is None else reading]
    )  # fmt: skip
    return front + b"\x00\x53\x73" + properties + b"\x00\x53\x74" + application + BODY


def test_two_messages_tell_what_differs() -> None:
    layout = learnt(message(1), message(2))
    assert layout is not None
    for number in range(3, 3000, 700):
        assert layout.record(message(number), NOW) == mapped(message(number)) is not None


def test_what_turns_out_to_differ_is_learnt_later() -> None:
    layout = learnt(message(1), message(2))
    assert layout is not None
    assert layout.record(message(3, subject="other"), NOW) is None
    layout = learnt(message(1), message(2), message(3, subject="other"))
    assert layout is not None
    assert layout.record(message(4, subject="third"), NOW) == mapped(message(4, subject="third"))


def test_one_message_tells_nothing_and_other_kinds_begin_anew() -> None:
    assert learnt(message(1)) is None
    assert learnt(message(1), message(2), message(3, reading=primitives.TRUE)) is None
    assert learnt(BODY, BODY) is None, "there is nothing to learn"


def test_keys_are_each_messages_own() -> None:
    layout = learnt(message(1, front=key("a")), message(2, front=key("a")))
    assert layout is not None
    record = layout.record(message(3, front=key("other")), NOW)
    assert record == mapped(message(3, front=key("other")))
    assert record is not None
    assert record.key == b"other"


def test_what_depends_on_the_time_is_not_learnt() -> None:
    assert learnt(message(1, front=TTL), message(2, front=TTL)) is None
    past = NOW + 10**9
    layout = learnt(message(1), message(2))
    assert layout is not None
    assert layout.record(message(3), past) == to_record(message(3), HERE, past)
