"""Mapping an AMQP message to a record and back: byte for byte, with readable headers in the record."""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
import uuid
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proton import Described, Message, int32, symbol, timestamp, ubyte, uint, ulong

from mapping.amqp._native import from_records
from mapping.amqp._native import to_record as to_record_in_c
from mapping.amqp.incoming import AmqpDestination, Unmappable, gateway_headers, to_record
from mapping.amqp.outgoing import COORDINATE_NAMES, from_record
from mapping.amqp.selection import selector
from mapping.outcomes import Outcome
from mapping.record import AMQP_SECTIONS, EXPIRY, Headers, Received, Record
from protocols.amqp import primitives
from protocols.amqp.primitives import compound, decode, skip
from protocols.amqp.sections import MESSAGE_ANNOTATIONS, scan
from tests.support.amqp_messages import delivery_annotations, messages_of, section, texts

NOW = 1_800_000_000_000
HERE = AmqpDestination("t", b"t", None, None, "ann", gateway_headers("client-1"))


def stored(record: Record, *, offset: int = 42, partition: int = 1) -> Received:
    timestamp_ms = record.timestamp if record.timestamp is not None else NOW
    return Received(record.topic, record.key, record.value, record.headers, timestamp_ms, partition, offset)


def through(data: bytes, now_ms: int = NOW) -> bytes:
    back = from_record(stored(to_record(data, HERE, now_ms)), now_ms)
    assert back is not None
    return back


def encoded(message: Message) -> bytes:
    return bytes(message.encode())


def header(record: Record, name: str) -> bytes | None:
    return dict(record.headers).get(name)


def annotations(data: bytes) -> dict[str, Any]:
    for code, _, at, end in scan(data):
        if code == MESSAGE_ANNOTATIONS:
            return dict(decode(data, at, end)[0])
    return {}


def without_annotations(data: bytes) -> bytes:
    return b"".join(data[start:end] for code, start, _, end in scan(data) if code != MESSAGE_ANNOTATIONS)


DURABLE = b"\x00\x53\x70\xc0\x02\x01\x41"
messages = messages_of(NOW)


@given(messages, st.just(b"") | delivery_annotations)
def test_round_trip_is_exact(parts: tuple[bytes, ...], hop: bytes) -> None:
    head, notes, *rest = parts
    record = to_record(head + hop + notes + b"".join(rest), HERE, NOW)
    assert record == to_record(head + notes + b"".join(rest), HERE, NOW)  # delivery annotations are hop by hop
    back = from_record(stored(record), NOW)
    assert back is not None
    assert without_annotations(back).endswith(b"".join(rest))
    if header(record, EXPIRY) is None:  # otherwise header.ttl is the remaining time
        assert without_annotations(back).removesuffix(b"".join(rest)) in (head, head or DURABLE)
    assert annotations(back).keys() >= COORDINATE_NAMES - {"x-opt-bridge.tombstone"}
    own = encoded_annotations(notes)
    assert encoded_annotations(back)[: len(own)] == own  # then the gateway's
    for _, value in record.headers[2:]:
        assert value is None or isinstance(value, bytes)


def encoded_annotations(data: bytes) -> list[bytes]:
    """The encoded keys and values of the message annotations, alternately."""
    found: list[bytes] = []
    for code, _, at, end in scan(data):
        if code == MESSAGE_ANNOTATIONS:
            count, place, _ = compound(data, at, end)
            for _ in range(count):
                after = skip(data, place, end)
                found.append(data[place:after])
                place = after
    return found


@given(messages)
def test_without_the_sections_header_it_still_is_a_message(parts: tuple[bytes, ...]) -> None:
    """A producer copied only the readable headers. (proton cannot read them all: its maps are dictionaries.)"""
    record = to_record(b"".join(parts), HERE, NOW)
    headers = tuple(pair for pair in record.headers if pair[0] != AMQP_SECTIONS)
    back = from_record(stored(msgspec.structs.replace(record, headers=headers)), NOW)
    assert back is not None
    for _, _, at, end in scan(back):
        assert decode(back, at, end)[1] == end


@given(
    st.sampled_from([b"", DURABLE]),
    texts.map(primitives.string) | st.binary(max_size=9).map(primitives.binary),
    st.binary(max_size=300),
)
def test_no_sections_header_where_nothing_is_lost_without_it(head: bytes, key: bytes, value: bytes) -> None:
    own = section(0x72, primitives.map_of([primitives.symbol("x-opt-bridge.key"), key]))
    body = section(0x75, primitives.binary(value))
    record = to_record(head + own + body, HERE, NOW)
    assert header(record, AMQP_SECTIONS) is None
    assert record.key == key[2:]
    back = from_record(stored(record), NOW)
    # With a sections header it would be the same: the key annotation is the record's own, and durable is what a log is.
    kept = msgspec.structs.replace(record, headers=(*record.headers, (AMQP_SECTIONS, (head or DURABLE) + own)))
    assert back == from_record(stored(kept), NOW)


@given(st.binary(max_size=120), st.booleans())
def test_any_bytes_are_a_record_or_unfit(data: bytes, as_section: bool) -> None:
    message = section(0x73, data) if as_section else data
    try:
        record = to_record(message, HERE, NOW)
    except Unmappable as unmappable:
        refused = unmappable.outcome
    else:
        refused = None
        assert from_record(stored(record), NOW) is not None
    assert refused in (None, Outcome.UNFIT, Outcome.DENIED, Outcome.EXPIRED)


@given(messages, st.data())
def test_damaged_messages(parts: tuple[bytes, ...], data: Any) -> None:
    message = bytearray(b"".join(parts) or b"\x00")
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        record = to_record(bytes(message), HERE, NOW)
    except Unmappable:
        return
    from_record(stored(record), NOW)


NAMES = (
    "content-type", "correlation-id", "reply-to", "message-id", "subject", "to", "user-id", "group-id", "expiry",
    "group-sequence", "creation-time", "amqp.sections", "amqp.types", "amqp.body", "amqp.priority", "amqp.durable",
    "mqtt.topic", "user.x", "ce_id",
)  # fmt: skip
TEMPTING = [b"data:1,2", b"v:str", b"json:00000000", b"raw", b"ss", b"AMQP_UUID:x"]
headers_of_anybody = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=10) | st.sampled_from(NAMES),
        st.none() | st.binary(max_size=20) | st.sampled_from(TEMPTING),
    ),
    max_size=6,
).map(tuple)


@given(headers_of_anybody, st.none() | st.binary(max_size=30), st.none() | st.binary(max_size=10))
def test_any_record_is_a_message(headers: Headers, value: bytes | None, key: bytes | None) -> None:
    back = from_record(Received("t", key, value, headers, NOW, 0, 7), NOW)
    if back is None:
        return  # expired
    Message().decode(back)
    assert annotations(back)["x-opt-bridge.offset"] == 7


def test_readable_headers() -> None:
    message = Message(
        id=ulong(7),
        correlation_id="corr-1",
        reply_to="replies/ann",
        subject="sub",
        content_type="application/json",
        content_encoding="gzip",
        group_id="group",
        group_sequence=3,
        user_id=b"ann",
        address="elsewhere",
        durable=True,
        priority=7,
        creation_time=NOW / 1000,
        properties={
            "text": "x", "int": int32(5), "long": 6, "flag": True, "real": 1.5, "nothing": None, "raw": b"\xff",
            "uuid": uuid.UUID(int=1), "time": timestamp(99), "symbol": symbol("sy"), "ubyte": ubyte(1), "uint": uint(2),
            "content-type": "mine", "traceparent": "00-1-2-3", "cloudEvents:id": "ce",
        },
        body=b"value",
        inferred=True,
    )  # fmt: skip
    record = to_record(encoded(message), HERE, NOW)
    assert record.value == b"value"
    assert record.key == b"group"
    assert record.timestamp is None
    expected: list[tuple[str, bytes | None]] = [
        ("gw.protocol", b"amqp10"),
        ("gw.client", b"client-1"),
        ("amqp.durable", b"1"),
        ("amqp.priority", b"7"),
        ("message-id", b"AMQP_ULONG:7"),
        ("user-id", b"ann"),
        ("to", b"elsewhere"),
        ("subject", b"sub"),
        ("reply-to", b"replies/ann"),
        ("correlation-id", b"corr-1"),
        ("content-type", b"application/json"),
        ("content-encoding", b"gzip"),
        ("group-id", b"group"),
        ("group-sequence", b"3"),
        ("creation-time", b"%d" % NOW),
        ("text", b"x"),
        ("int", b"5"),
        ("long", b"6"),
        ("flag", b"true"),
        ("real", b"1.5"),
        ("nothing", None),
        ("raw", b"\xff"),
        ("uuid", b"00000000-0000-0000-0000-000000000001"),
        ("time", b"99"),
        ("symbol", b"sy"),
        ("ubyte", b"1"),
        ("uint", b"2"),
        ("user.content-type", b"mine"),
        ("traceparent", b"00-1-2-3"),
        ("ce_id", b"ce"),
        ("amqp.types", b"silbdnxutyBIsss"),
    ]
    assert list(record.headers[:-1]) == expected
    # The types come back without the sections header too.
    plain = Message()
    plain.decode(from_record(stored(msgspec.structs.replace(record, headers=record.headers[:-1])), NOW))
    assert plain.properties == message.properties
    types = {name: type(value) for name, value in plain.properties.items()}
    assert types.pop("raw") is memoryview
    assert types == {name: type(value) for name, value in message.properties.items() if name != "raw"}
    assert plain.id == ulong(7)
    assert plain.user_id == b"ann"
    assert plain.group_sequence == 3
    assert plain.content_type == "application/json"


@pytest.mark.parametrize(
    "correlation", ["corr-1", "ünïcode", ulong(5), uuid.UUID(int=9), b"\xff\x00", b"corr-1", "AMQP_UUID:no"]
)
def test_ids_keep_their_type(correlation: Any) -> None:
    message = Message(id=correlation, correlation_id=correlation, body=b"x", inferred=True)
    record = to_record(encoded(message), HERE, NOW)
    headers = tuple(pair for pair in record.headers if pair[0] != AMQP_SECTIONS)
    back = Message()
    back.decode(from_record(stored(msgspec.structs.replace(record, headers=headers)), NOW))
    for found in (back.id, back.correlation_id):
        assert (bytes(found) if isinstance(found, memoryview) else found) == correlation


def test_a_correlation_id_of_mqtt() -> None:
    """The header's bytes become a string if they are text, else a binary."""
    for raw, expected in ((b"corr-1", "corr-1"), (b"\xff\x01", b"\xff\x01")):
        record = Received("t", b"k", b"v", (("correlation-id", raw), ("gw.protocol", b"mqtt5")), NOW, 0, 1)
        message = Message()
        message.decode(from_record(record, NOW))
        found = message.correlation_id
        assert (bytes(found) if isinstance(found, memoryview) else found) == expected
    # Mapped back it is the same header.
    back = to_record(encoded(Message(correlation_id="corr-1", body=b"v", inferred=True)), HERE, NOW)
    assert header(back, "correlation-id") == b"corr-1"


def test_a_record_of_any_client() -> None:
    record = Received(
        "sensors",
        b"kitchen/temp",
        b"21.5",
        (("unit", b"C"), ("unit", b"K"), ("bin", b"\xff"), ("nil", None)),
        NOW,
        2,
        9,
    )
    message = Message()
    message.decode(from_record(record, NOW))
    assert bytes(message.body) == b"21.5"
    assert message.durable
    assert message.properties == {"unit": "C", "unit.1": "K", "bin": b"\xff", "nil": None}
    assert message.annotations == {
        "x-opt-bridge.topic": "sensors",
        "x-opt-bridge.partition": 2,
        "x-opt-bridge.offset": 9,
        "x-opt-bridge.key": "kitchen/temp",
        "x-opt-sequence-number": 9,
        "x-opt-offset": "9",
        "x-opt-enqueued-time": NOW,
    }


def test_the_gateways_headers_are_not_delivered() -> None:
    headers = (
        ("gw.protocol", b"mqtt5"),
        ("gw.client", b"c"),
        ("mqtt.topic", b"a/b"),
        ("mqtt.qos", b"1"),
        ("user.mqtt.x", b"mine"),
    )
    message = Message()
    message.decode(from_record(Received("t", None, b"v", headers, NOW, 0, 0), NOW))
    assert message.properties == {"mqtt.x": "mine"}
    assert message.annotations["x-opt-bridge.key"] is None


def test_tombstones() -> None:
    message = Message()
    data = from_record(Received("t", b"k", None, (), NOW, 0, 0), NOW)
    assert data is not None
    assert data.endswith(b"\x00\x53\x75\xa0\x00")
    message.decode(data)
    assert message.annotations["x-opt-bridge.tombstone"] is True
    null_value = section(0x77, b"\x40")
    record = to_record(null_value, HERE, NOW)
    assert record.value is None
    assert through(null_value).endswith(null_value)
    assert "x-opt-bridge.tombstone" not in annotations(through(null_value))


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("text", b"text"),
        (b"bytes", b"bytes"),
        (7, b"7"),
        (True, b"true"),
        (1.5, b"1.5"),
        ({"a": [1, "x", None]}, b'{"a":[1,"x",null]}'),
        ([1, 2], b"[1,2]"),
        (uuid.UUID(int=2), b'"00000000-0000-0000-0000-000000000002"'),
        ({"b": b"\xff"}, b'{"b":"/w=="}'),
        ({None: 1, False: 2, 3: "x"}, b'{"null":1,"false":2,"3":"x"}'),
        (Described("x", "inner"), b'"inner"'),
    ],
)
def test_values_are_readable(body: Any, value: bytes) -> None:
    message = Message(body=body)
    record = to_record(encoded(message), HERE, NOW)
    assert record.value == value
    back = Message()
    back.decode(through(encoded(message)))
    assert back.body == body
    if value[:1] in b"{[" or not isinstance(body, str | bytes):
        assert header(record, "content-type") == b"application/json"
        json.loads(value)


def test_a_changed_value_beats_the_sections_header() -> None:
    """A job copied the headers and changed the value: the new value is delivered."""
    for body in ({"a": 1}, "text", [1]):
        record = to_record(encoded(Message(id="m", body=body)), HERE, NOW)
        changed = stored(msgspec.structs.replace(record, value=b"\xffnew"))
        message = Message()
        message.decode(from_record(changed, NOW))
        assert bytes(message.body) == b"\xffnew"
        assert message.id == "m"


def test_keys_and_partitions() -> None:
    def record(notes: dict[Any, Any], **fields: Any) -> Record:
        message = Message(body=b"v", inferred=True, **fields)
        message.annotations = {symbol(name): value for name, value in notes.items()}
        return to_record(encoded(message), msgspec.structs.replace(HERE, key=b"address", partitions=4), NOW)

    assert record({}).key == b"address"
    assert record({}, group_id="g").key == b"g"
    assert record({"x-opt-partition-key": "p"}, group_id="g").key == b"p"
    assert record({"x-opt-bridge.key": b"\xff", "x-opt-partition-key": "p"}).key == b"\xff"
    assert record({"x-opt-partition-key": "p", "x-opt-bridge.key": "b"}).key == b"b"
    assert record({"x-opt-bridge.key": None}).key == b"address"
    assert record({"x-opt-bridge.partition": int32(3)}).partition == 3
    for bad in (
        {"x-opt-bridge.partition": int32(4)},
        {"x-opt-bridge.partition": -1},
        {"x-opt-bridge.partition": "1"},
        {"x-opt-bridge.key": 5},
    ):
        with pytest.raises(Unmappable) as caught:
            record(bad)
        assert caught.value.outcome is Outcome.UNFIT
    with pytest.raises(Unmappable, match="delayed"):
        record({"x-opt-delivery-delay": 1000})


def test_a_header_that_is_a_map_is_unfit() -> None:
    with pytest.raises(Unmappable) as caught:
        to_record(b"\x00\x53\x70\xc1\x03\x02\x41\x40" + section(0x75, primitives.binary(b"v")), HERE, NOW)
    assert caught.value.outcome is Outcome.UNFIT


def test_a_data_section_with_an_unusual_descriptor_is_delivered_as_it_was_sent() -> None:
    """A descriptor has a ulong by the specification; the section's bytes come back with any integer."""
    data = b"\x00\x52\x75\xa0\x01v"
    assert without_annotations(through(data)) == DURABLE + data


def test_large_headers_of_messages_are_not_kept_in_memory() -> None:
    def deliver(number: int) -> None:
        head = primitives.list_of(
            [primitives.TRUE] + [primitives.NULL] * 4 + [primitives.binary(b"%d" % number * 100_000)]
        )
        through(section(0x70, head) + section(0x75, primitives.binary(b"v")))

    deliver(1)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(10, 40):
            deliver(number)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_expiry() -> None:
    message = Message(body=b"v", inferred=True, ttl=5)
    record = to_record(encoded(message), HERE, NOW)
    assert header(record, "expiry") == str(NOW + 5000).encode()
    later = Message()
    later.decode(from_record(stored(record), NOW + 2000))
    assert later.ttl == 3
    assert from_record(stored(record), NOW + 5000) is None
    both = Message(body=b"v", inferred=True, ttl=5, expiry_time=(NOW + 3000) / 1000)
    assert header(to_record(encoded(both), HERE, NOW), "expiry") == str(NOW + 3000).encode()
    with pytest.raises(Unmappable) as caught:
        to_record(encoded(Message(body=b"v", inferred=True, expiry_time=(NOW - 1) / 1000)), HERE, NOW)
    assert caught.value.outcome is Outcome.EXPIRED


def test_delivery_count() -> None:
    for headers in ((), to_record(encoded(Message(id="m", body=b"v", priority=7)), HERE, NOW).headers):
        message = Message()
        message.decode(from_record(Received("t", None, b"v", headers, NOW, 0, 0), NOW, 3))
        assert message.delivery_count == 3
        assert not message.first_acquirer


@pytest.mark.parametrize("created", [NOW, NOW - 1, NOW + 600_000, NOW - 7 * 86_400_000, 1_000])
def test_creation_time_is_a_header_and_never_the_arrival(created: int) -> None:
    message = Message(body=b"v", inferred=True, creation_time=created / 1000)
    record = to_record(encoded(message), HERE, NOW)
    assert record.timestamp is None
    assert header(record, "creation-time") == str(created).encode()
    back = Message()
    back.decode(from_record(stored(record), NOW))
    assert back.creation_time == created / 1000


def test_a_user_id_must_be_the_authenticated_one() -> None:
    assert header(to_record(encoded(Message(user_id=b"ann", body=b"v")), HERE, NOW), "user-id") == b"ann"
    with pytest.raises(Unmappable) as caught:
        to_record(encoded(Message(user_id=b"bob", body=b"v")), HERE, NOW)
    assert caught.value.outcome is Outcome.DENIED


def test_the_plain_message_has_no_sections_header() -> None:
    record = to_record(b"\x00\x53\x75\xa0\x02hi", HERE, NOW)
    assert record == Record("t", None, b"hi", HERE.headers, None, None)
    long = b"\x00\x53\x75\xb0\x00\x00\x01\x2c" + bytes(300)
    assert to_record(long, HERE, NOW) == Record("t", None, bytes(300), HERE.headers, None, None)
    assert through(long).endswith(long)


def test_names_that_a_record_repeats() -> None:
    """A map must not: a number follows, and the cost of one does not grow with those before it."""
    taken = [("a", b""), ("a.1", b""), ("a", b""), ("a.2", b""), ("a", b""), ("a.1", b"")]
    many = 30_000
    began = time.process_time()
    data = from_record(Received("t", None, b"", (*taken, *[("b", b"")] * many), NOW, 0, 0), NOW)
    assert time.process_time() - began < 10
    message = Message()
    message.decode(data)
    names = ["a", "a.1", "a.2", "a.2.1", "a.3", "a.1.1", "b", *(f"b.{number}" for number in range(1, many))]
    assert list(message.properties) == names


@pytest.mark.parametrize("kept", ["C", "Python", "selector"])
def test_what_is_cached_for_names_is_bounded(kept: str) -> None:
    """Clients choose the names of application properties, up to the size of a message."""
    mapped = to_record_in_c if kept == "C" else to_record
    selects = selector("other = 1") if kept == "selector" else lambda record: True

    def use(number: int) -> None:
        properties = {f"{number:05}" + "n" * 50_000: int32(number), "other": int32(1)}
        record = mapped(encoded(Message(body=b"x", inferred=True, properties=properties)), HERE, NOW)
        assert selects(stored(record))
        from_records([stored(record)], NOW, 0, 1)
        from_record(msgspec.structs.replace(stored(record), headers=record.headers[2:3]), NOW)

    use(0)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1, 300):
            use(number)
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 1_000_000
