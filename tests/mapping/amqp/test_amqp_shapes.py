"""Mapping messages as real AMQP clients send them, also damaged ones."""

from __future__ import annotations

import base64
import math
import uuid
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.clients.amqp_messages import CAPTURED, shapes
from mapping.amqp import body as amqp_body
from mapping.amqp.incoming import AmqpDestination, Unmappable, gateway_headers, to_record
from mapping.amqp.outgoing import from_record
from mapping.record import AMQP_SECTIONS, Received, Record
from protocols.amqp import primitives
from protocols.amqp.primitives import DecodeError, Described, Pairs, Raw, decode
from protocols.amqp.sections import HEADER, MESSAGE_ANNOTATIONS, SEQUENCE, VALUE, scan
from tests.support.amqp_messages import simple

HERE = AmqpDestination("t", b"t", None, None, "anonymous", gateway_headers("client-1"), partitions=4)
SHAPES = shapes()
MESSAGES = [message for found in SHAPES.values() for message in found]
# Each section of each message, to be combined into new messages.
SECTIONS = sorted({data[start:end] for data in MESSAGES for _, start, _, end in scan(data)})
TELLING = bytes.fromhex(
    "00 40 41 42 43 44 45 50 53 70 71 72 73 74 75 76 77 78 83 a0 a1 a3 b0 b1 b3 c0 c1 d0 d1 e0 f0 ff"
)


def stored(record: Record) -> Received:
    return Received("t", record.key, record.value, record.headers, record.timestamp or CAPTURED, 1, 7)


@pytest.mark.parametrize("name", SHAPES)
def test_what_clients_send_comes_back_whole(name: str) -> None:
    for data in SHAPES[name]:
        record = to_record(data, HERE, CAPTURED)
        back = from_record(stored(record), CAPTURED)
        assert back is not None
        ours = (HEADER, MESSAGE_ANNOTATIONS)
        bare = [data[start:end] for code, start, _, end in scan(data) if code not in ours]
        assert [back[start:end] for code, start, _, end in scan(back) if code not in ours] == bare


@st.composite
def altered(draw: st.DrawFn) -> bytes:
    """A real message, or sections of several, with some bytes changed, removed, doubled or inserted."""
    if draw(st.booleans()):
        data = bytearray(draw(st.sampled_from(MESSAGES)))
    else:
        data = bytearray(b"".join(draw(st.lists(st.sampled_from(SECTIONS), min_size=1, max_size=6))))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data) - 1)) if data else 0
        telling = draw(st.sampled_from(TELLING))
        match draw(st.sampled_from(["change", "near", "drop", "insert", "cut"])):
            case "change":
                data[at : at + 1] = bytes((telling,))
            case "near":
                data[at : at + 1] = bytes((((data[at] if data else 0) + draw(st.sampled_from([-1, 1]))) % 256,))
            case "drop":
                del data[at : at + draw(st.integers(1, 4))]
            case "insert":
                data[at:at] = bytes((telling,)) * draw(st.integers(1, 3))
            case _:
                del data[at:]
    return bytes(data)


@given(altered())
def test_what_is_made_of_them_is_a_message_again(data: bytes) -> None:
    try:
        record = to_record(data, HERE, CAPTURED)
    except Unmappable:
        return
    back = from_record(stored(record), CAPTURED)
    assert back is None or scan(back)


@given(st.sampled_from(MESSAGES), altered())
def test_a_damaged_sections_header_makes_no_broken_message(data: bytes, sections_header: bytes) -> None:
    record = to_record(data, HERE, CAPTURED)
    headers = tuple((name, sections_header if name == AMQP_SECTIONS else content) for name, content in record.headers)
    back = from_record(stored(msgspec.structs.replace(record, headers=headers)), CAPTURED, 1)
    assert back is not None
    for code, _, at, end in scan(back):
        if code == MESSAGE_ANNOTATIONS:
            assert decode(back, at, end)[1] == end


# A value in JSON, by the general decoder.


class NoJsonError(Exception):
    """JSON cannot represent the value."""


def plain(value: Any) -> Any:
    match value:
        case Raw():
            raise NoJsonError
        case Described():
            return plain(value.value)
        case float() if not math.isfinite(value):
            raise NoJsonError
        case bytes():
            return base64.b64encode(value).decode()
        case uuid.UUID():
            return str(value)
        case Pairs():
            named = [(plain(key), plain(item)) for key, item in value]
            names = [key if isinstance(key, str) else msgspec.json.encode(key).decode() for key, _ in named]
            if len(set(names)) < len(names):
                raise NoJsonError
            return dict(zip(names, (item for _, item in named), strict=True))
        case list() | tuple():
            return [plain(item) for item in value]
        case bool() | None:
            return value
    return int(value) if isinstance(value, int) else value if isinstance(value, float) else str(value)


maps = st.deferred(
    lambda: st.lists(st.tuples(simple, values), max_size=4).map(
        lambda found: primitives.map_of([item for pair in found for item in pair])
    )
)
values: st.SearchStrategy[bytes] = st.deferred(
    lambda: simple | st.lists(values, max_size=4).map(primitives.list_of) | maps
)


@given(st.booleans(), values, st.one_of(st.none(), st.tuples(st.integers(0, 200), st.sampled_from(TELLING))))
def test_json_is_read_as_the_general_decoder_reads(
    sequence: bool, value: bytes, damage: tuple[int, int] | None
) -> None:
    head = b"\x00\x53\x76" if sequence else b"\x00\x53\x77"
    body = primitives.list_of([value]) if sequence else value
    if damage is not None:
        body = bytes((*body[: damage[0] % len(body)], damage[1], *body[damage[0] % len(body) + 1 :]))
    data = head + body
    try:
        ((code, _, at, end),) = scan(data)
        wanted: Any = decode(data, at, end)[0]
    except (DecodeError, ValueError):
        return  # no valid message any more; the tests above check the result
    found = amqp_body.to_value(data, [(code, 0, at, end)])
    assert code in (VALUE, SEQUENCE)
    if (found.form or b"").startswith(b"v:"):
        assert wanted is None or isinstance(wanted, str | bytes)
        return
    try:
        shown = msgspec.json.encode(plain(wanted))
    except NoJsonError:
        assert (found.value, found.form, found.is_json) == (data, b"raw", False)
    else:
        assert (found.value, found.exact, found.is_json) == (shown, data, True)
