"""Types of AMQP 1.0 part 1: against proton's own encoder, and against any bytes."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proton import Data, symbol, timestamp, ulong

from protocols.amqp import primitives
from protocols.amqp.primitives import EMPTY_LIMIT, DecodeError, Described, Pairs, decode, skip

simple = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**64 - 1).map(ulong),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=300),
    st.binary(max_size=300),
    st.uuids(),
    st.integers(0, 2**40).map(timestamp),
    st.text("abc:-", min_size=1, max_size=20).map(symbol),
)
values = st.recursive(
    simple, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=4)
)


def plain(value: Any) -> Any:
    """Convert proton's Python value to ours."""
    if isinstance(value, dict):
        return Pairs((key, plain(item)) for key, item in value.items())
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


@given(values)
def test_reads_what_proton_writes(value: Any) -> None:
    data = Data()
    data.put_object(value)
    encoded = bytes(data.encode())
    assert decode(encoded, 0, len(encoded)) == (plain(value), len(encoded))
    assert skip(encoded, 0, len(encoded)) == len(encoded)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_decode_error(data: bytes) -> None:
    try:
        _, end = decode(data, 0, len(data))
    except DecodeError:
        pass
    else:
        assert 0 < end <= len(data)
        assert skip(data, 0, len(data)) == end


@given(values, st.data())
def test_a_damaged_encoding_raises_nothing_else(value: Any, data: Any) -> None:
    source = Data()
    source.put_object(value)
    encoded = bytearray(source.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(encoded[: data.draw(st.integers(0, len(encoded)))])
    for candidate in (bytes(encoded), cut):
        with contextlib.suppress(DecodeError):
            decode(candidate, 0, len(candidate))


@pytest.mark.parametrize(
    "opening", [b"\x00", b"\xc0\xff\x01", b"\xd0\x7f\xff\xff\xff\x00\x00\x00\x01", b"\xe0\xff\xff\x00"]
)
def test_deep_nesting_is_refused(opening: bytes) -> None:
    data = opening * 5000
    with pytest.raises(DecodeError):
        decode(data, 0, len(data))


@pytest.mark.parametrize("constructor", sorted(primitives.TYPES.keys() - {0x00, 0x40, 0x41, 0x42, 0x43, 0x44, 0x45}))
def test_an_array_whose_last_item_is_cut_is_no_value(constructor: int) -> None:
    for size in range(17):
        body = bytes((1, constructor)) + b"\x08" * size
        with contextlib.suppress(DecodeError):
            _, after = primitives.decode(b"\xe0" + bytes((len(body),)) + body, 0, len(body) + 2)
            assert after == len(body) + 2


@pytest.mark.parametrize("count", [EMPTY_LIMIT + 1, 1 << 15, (1 << 32) - 1])
def test_an_array_of_nothing_is_bounded(count: int) -> None:
    """A SASL frame may have a thousand of them before anybody has logged in."""
    data = b"\xf0\x00\x00\x00\x05" + count.to_bytes(4) + b"\x40"
    with pytest.raises(DecodeError, match="count"):
        decode(data, 0, len(data))


def test_a_small_array_of_nothing() -> None:
    data = b"\xe0\x02" + bytes((EMPTY_LIMIT,)) + b"\x41"
    assert decode(data, 0, len(data)) == ((True,) * EMPTY_LIMIT, len(data))


@pytest.mark.parametrize(("descriptors", "is_value"), [(1, True), (2, False), (30, False)])
def test_the_descriptors_of_an_array_are_bounded_by_its_items(descriptors: int, is_value: bool) -> None:
    """Each item of one byte is an object with each of them."""
    body = b"\x00\x53\x01" * descriptors + b"\x50" + bytes(1000)
    data = b"\xf0" + (len(body) + 4).to_bytes(4) + (1000).to_bytes(4) + body
    if is_value:
        assert decode(data, 0, len(data)) == ((Described(1, 0),) * 1000, len(data))
    else:
        with pytest.raises(DecodeError, match="count"):
            decode(data, 0, len(data))


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        (primitives.uint(0), 0),
        (primitives.uint(255), 255),
        (primitives.uint(2**32 - 1), 2**32 - 1),
        (primitives.ulong(2**64 - 1), 2**64 - 1),
        (primitives.integer(-128), -128),
        (primitives.integer(-129), -129),
        (primitives.long(-(2**63)), -(2**63)),
        (primitives.ubyte(7), 7),
        (primitives.ushort(65535), 65535),
        (primitives.byte(-1), -1),
        (primitives.short(-300), -300),
        (primitives.boolean(True), True),
        (primitives.double(0.5), 0.5),
        (primitives.float_value(0.5), 0.5),
        (primitives.string("ö" * 200), "ö" * 200),
        (primitives.binary(b""), b""),
        (primitives.symbol("amqp:x"), "amqp:x"),
        (primitives.uuid_value(uuid.UUID(int=5)), uuid.UUID(int=5)),
        (primitives.timestamp(-1), -1),
        (primitives.char("ö"), Described("char", "ö")),
        (primitives.list_of([]), []),
        (primitives.list_of([primitives.NULL] * 300), [None] * 300),
        (primitives.map_of([primitives.string("k"), primitives.TRUE]), Pairs((("k", True),))),
        (primitives.symbols(["a", "bc"]), ("a", "bc")),
        (primitives.symbols([]), ()),
        (primitives.described(0x24, b"\x45"), Described(0x24, [])),
    ],
)
def test_our_encoding_is_read_by_our_decoder_and_by_proton(encoded: bytes, value: Any) -> None:
    assert decode(encoded, 0, len(encoded)) == (value, len(encoded))
    data = Data()
    assert data.decode(encoded) == len(encoded)
