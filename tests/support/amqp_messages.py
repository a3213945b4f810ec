"""Hypothesis strategies for AMQP messages of every shape, packed by hand to include unusual encodings.

Values are encoded here where the gateway's encoder knows only one of their encodings.
"""

from __future__ import annotations

from hypothesis import strategies as st

from protocols.amqp import primitives

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
null = st.just(primitives.NULL)


def wide_binary(value: bytes) -> bytes:
    """Encode a binary with a size of four bytes, even if it is short."""
    return b"\xb0" + len(value).to_bytes(4, "big") + value


def wide_string(value: str) -> bytes:
    """A string with a size of four bytes."""
    raw = value.encode()
    return b"\xb1" + len(raw).to_bytes(4, "big") + raw


def wide_symbol(value: str) -> bytes:
    """A symbol with a size of four bytes."""
    return b"\xb3" + len(value).to_bytes(4, "big") + value.encode()


def _wide_compound(code: int, items: list[bytes]) -> bytes:
    body = b"".join(items)
    return bytes((code,)) + (len(body) + 4).to_bytes(4, "big") + len(items).to_bytes(4, "big") + body


def wide_list(items: list[bytes]) -> bytes:
    """A list with sizes of four bytes."""
    return _wide_compound(0xD0, items)


def flat(pairs: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return keys and values alternately."""
    return [item for pair in pairs for item in pair]


def wide_map(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """A map with sizes of four bytes."""
    return _wide_compound(0xD1, flat(pairs))


def array(constructor: bytes, values: list[bytes], *, wide: bool) -> bytes:
    """An array of values without their constructors (part 1.6.22)."""
    body = constructor + b"".join(values)
    if wide or len(body) > 250 or len(values) > 255:
        return b"\xf0" + (len(body) + 4).to_bytes(4, "big") + len(values).to_bytes(4, "big") + body
    return bytes((0xE0, len(body) + 1, len(values))) + body


simple = st.one_of(
    null,
    st.booleans().map(primitives.boolean),
    st.booleans().map(lambda value: b"\x56" + bytes([value])),
    st.integers(0, 255).map(primitives.ubyte),
    st.integers(0, 65535).map(primitives.ushort),
    st.integers(0, 2**32 - 1).map(primitives.uint),
    st.integers(0, 100).map(lambda value: b"\x70" + value.to_bytes(4, "big")),
    st.integers(0, 2**64 - 1).map(primitives.ulong),
    st.integers(0, 100).map(lambda value: b"\x80" + value.to_bytes(8, "big")),
    st.integers(-128, 127).map(primitives.byte),
    st.integers(-(2**15), 2**15 - 1).map(primitives.short),
    st.integers(-(2**31), 2**31 - 1).map(primitives.integer),
    st.integers(-100, 100).map(lambda value: b"\x71" + value.to_bytes(4, "big", signed=True)),
    st.integers(-(2**63), 2**63 - 1).map(primitives.long),
    st.floats(width=32).map(primitives.float_value),
    st.floats().map(primitives.double),
    st.binary(min_size=4, max_size=4).map(lambda value: b"\x74" + value),  # decimals
    st.binary(min_size=8, max_size=8).map(lambda value: b"\x84" + value),
    st.binary(min_size=16, max_size=16).map(lambda value: b"\x94" + value),
    st.characters(exclude_categories=("Cs",)).map(primitives.char),
    st.sampled_from([0xD800, 0x110000, 0xFFFFFFFF]).map(lambda code: b"\x73" + code.to_bytes(4, "big")),
    st.integers(-(2**63), 2**63 - 1).map(primitives.timestamp),
    st.uuids().map(primitives.uuid_value),
    st.binary(max_size=20).map(primitives.binary),
    st.binary(max_size=20).map(wide_binary),
    texts.map(primitives.string),
    texts.map(wide_string),
    st.text("abc", max_size=5).map(primitives.symbol),
    st.text("abc", max_size=5).map(wide_symbol),
)
arrays = st.one_of(
    st.tuples(
        st.just(b"\xa3"), st.lists(st.text("xyz", max_size=4).map(lambda one: bytes((len(one),)) + one.encode()))
    ),
    st.tuples(st.just(b"\x71"), st.lists(st.binary(min_size=4, max_size=4), max_size=4)),
    st.tuples(st.just(b"\x84"), st.lists(st.binary(min_size=8, max_size=8), max_size=4)),
    st.tuples(st.just(b"\x98"), st.lists(st.binary(min_size=16, max_size=16), max_size=2)),
    st.tuples(st.just(b"\x56"), st.lists(st.sampled_from([b"\0", b"\1"]), max_size=4)),
    st.tuples(st.sampled_from([b"\x40", b"\x41", b"\x43", b"\x45"]), st.lists(st.just(b""), max_size=4)),
    st.tuples(st.just(b"\xb1"), st.lists(texts.map(lambda one: wide_string(one)[1:]), max_size=3)),
    st.tuples(st.just(b"\xc0"), st.lists(st.sampled_from([b"\x01\x00", b"\x02\x01\x41"]), max_size=3)),
    st.tuples(st.just(b"\xe0"), st.lists(st.sampled_from([b"\x02\x00\x41", b"\x03\x02\x41\x42"][:1]), max_size=2)),
    st.tuples(st.just(b"\x00\xa3\x03a:b\x52"), st.lists(st.binary(min_size=1, max_size=1), max_size=3)),
)
arrays_encoded = st.builds(lambda found, wide: array(*found, wide=wide), arrays, st.booleans())
descriptors = st.one_of(
    st.integers(0, 1000).map(primitives.ulong),
    st.just(b"\x80" + (2**63).to_bytes(8, "big")),
    st.text("abc:*", min_size=1, max_size=9).map(primitives.symbol),
)
compound = st.recursive(
    simple | arrays_encoded,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(primitives.list_of),
        st.lists(inner, max_size=3).map(wide_list),
        st.lists(st.tuples(texts.map(primitives.string), inner), max_size=3).map(
            lambda pairs: primitives.map_of(flat(pairs))
        ),
        st.lists(st.tuples(inner, inner), max_size=3).map(wide_map),  # keys of any type
        st.tuples(descriptors, inner).map(lambda pair: b"\x00" + pair[0] + pair[1]),
    ),
    max_leaves=6,
)
ids = st.one_of(
    st.integers(0, 2**64 - 1).map(primitives.ulong),
    st.uuids().map(primitives.uuid_value),
    st.binary(max_size=20).map(primitives.binary),
    texts.map(primitives.string),
    texts.map(wide_string),
    st.sampled_from(["AMQP_BINARY:zz", "AMQP_UUID:1", "AMQP_STRING:x", "AMQP_ULONG:-1"]).map(primitives.string),
)


def section(code: int, value: bytes) -> bytes:
    """A section with the usual short descriptor."""
    return b"\x00\x53" + bytes([code]) + value


def wide_section(code: int, value: bytes) -> bytes:
    """A section with a descriptor of eight bytes."""
    return b"\x00\x80" + code.to_bytes(8, "big") + value


_SYMBOLIC = {
    0x70: "amqp:header:list", 0x71: "amqp:delivery-annotations:map", 0x72: "amqp:message-annotations:map",
    0x73: "amqp:properties:list", 0x74: "amqp:application-properties:map", 0x75: "amqp:data:binary",
    0x76: "amqp:amqp-sequence:list", 0x77: "amqp:amqp-value:*", 0x78: "amqp:footer:map",
}  # fmt: skip


def symbolic_section(code: int, value: bytes) -> bytes:
    """A section whose descriptor is a symbol."""
    return b"\x00" + primitives.symbol(_SYMBOLIC[code]) + value


def sections(code: int, values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """A section with any descriptor that means `code`."""
    forms = st.sampled_from([section, section, section, wide_section, symbolic_section])
    return st.builds(lambda form, value: form(code, value), forms, values)


string_field = null | texts.map(primitives.string) | texts.map(wide_string)
symbol_field = null | st.sampled_from(["text/plain", "application/json"]).map(primitives.symbol)


def property_fields(now_ms: int, user: str) -> st.SearchStrategy[tuple[bytes, ...]]:
    """The 13 fields of properties (part 3.2.4) of a message from `user` that is not expired at `now_ms`."""
    return st.tuples(
        null | ids, null | st.just(primitives.binary(user.encode())), string_field, string_field, string_field,
        null | ids, symbol_field, symbol_field, null | st.just(primitives.timestamp(now_ms + 10**9)),
        null | st.integers(now_ms - 10**6, now_ms).map(primitives.timestamp), string_field,
        null | st.integers(0, 2**32 - 1).map(primitives.uint), string_field,
    )  # fmt: skip


def properties_of(now_ms: int, user: str) -> st.SearchStrategy[bytes]:
    """A properties section with none, some or all fields."""
    some = st.builds(lambda items, count: list(items[:count]), property_fields(now_ms, user), st.integers(0, 13))
    return sections(0x73, some.map(primitives.list_of) | some.map(wide_list))


pairs = st.lists(st.tuples(texts.map(primitives.string), compound), max_size=4)
annotation_names = st.one_of(
    st.text("xyz-", min_size=1, max_size=8).map(primitives.symbol),
    st.text("xyz-", min_size=1, max_size=8).map(wide_symbol),
    st.sampled_from(["x-opt-jms-msg-type", "x-opt-jms-dest", "x-opt-jms-reply-to", "x-opt-custom"]).map(
        primitives.symbol
    ),
    st.integers(0, 2**40).map(primitives.ulong),
)
annotation_pairs = st.lists(st.tuples(annotation_names, compound), max_size=3)
jms = st.tuples(st.integers(0, 5), st.integers(0, 3)).map(
    lambda pair: [
        (primitives.symbol("x-opt-jms-msg-type"), primitives.byte(pair[0])),
        (primitives.symbol("x-opt-jms-dest"), primitives.byte(pair[1])),
    ]
)


def maps(found: st.SearchStrategy[list[tuple[bytes, bytes]]]) -> st.SearchStrategy[bytes]:
    """Maps, with short sizes and with long ones."""
    return found.map(lambda some: primitives.map_of(flat(some))) | found.map(wide_map)


data_sections = st.lists(
    st.one_of(
        st.binary(max_size=300).map(lambda value: section(0x75, primitives.binary(value))),
        st.binary(max_size=20).map(lambda value: section(0x75, wide_binary(value))),
        st.binary(max_size=20).map(lambda value: wide_section(0x75, primitives.binary(value))),
        st.binary(max_size=20).map(lambda value: symbolic_section(0x75, primitives.binary(value))),
    ),
    max_size=3,
).map(b"".join)
bodies = st.one_of(
    data_sections,
    st.lists(
        sections(0x76, st.lists(compound, max_size=3).map(primitives.list_of) | st.just(b"\xc0\x01\x00")),
        min_size=1,
        max_size=3,
    ).map(b"".join),
    sections(0x77, compound),
    sections(0x77, simple),
    sections(0x77, texts.map(primitives.string) | st.binary(max_size=20).map(primitives.binary)),
)
header_lists = st.sampled_from(
    [
        b"\x45", b"\xc0\x02\x01\x41", b"\xc0\x02\x01\x42", b"\xc0\x04\x02\x41\x50\x07", b"\xc0\x01\x00",
        b"\xd0\x00\x00\x00\x05\x00\x00\x00\x01\x41", b"\xc0\x03\x01\x56\x01",
    ]
)  # fmt: skip


def messages_of(now_ms: int, user: str = "ann") -> st.SearchStrategy[tuple[bytes, ...]]:
    """(header, message annotations, properties, application properties, body, footer); each may be empty."""
    nothing = st.just(b"")
    return st.tuples(
        nothing | sections(0x70, header_lists),
        nothing | sections(0x72, maps(annotation_pairs | jms)),
        nothing | properties_of(now_ms, user),
        nothing | sections(0x74, maps(pairs)),
        bodies,
        nothing | sections(0x78, maps(annotation_pairs)),
    )


delivery_annotations = sections(0x71, maps(annotation_pairs))
