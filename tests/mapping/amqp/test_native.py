"""The mapping in C gives the same results as the one in Python, for every message. `make sanitize` runs this, too."""

from __future__ import annotations

import gc
import itertools
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.clients.amqp_messages import CAPTURED, FORMS, encodings, jms_text, many_keys, minimal, shapes, typical
from mapping.amqp import incoming
from mapping.amqp._native import from_records, to_record, to_records
from mapping.amqp.incoming import AmqpDestination, gateway_headers
from mapping.record import Received, Record
from protocols.amqp import primitives
from tests.reference import amqp_mapping
from tests.support.amqp_messages import messages_of, section
from tests.support.amqp_mutated import DESTINATIONS, compare, fate, mapped_in_python

HERE = DESTINATIONS[0]
MESSAGES = shapes() | {kind.__name__: [kind(1, b"value")] for kind in (minimal, many_keys, typical, jms_text)}
MESSAGES["encodings"] = [
    message
    for message in (encodings(form, bytes(size)) for form in range(FORMS) for size in (6, 250))
    if message.count(b"\x00\x53\x75") < 2  # several Data sections are left to Python: no known client sends them
]


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_of_common_clients_are_mapped_in_c(name: str) -> None:
    for data in MESSAGES[name]:
        with mapped_in_python() as left:
            record = to_record(data, HERE, CAPTURED)
        assert not left
        assert record == incoming.to_record(data, HERE, CAPTURED)


def assert_same(data: bytes, destination: AmqpDestination) -> None:
    """C and Python give the same record or the same error."""
    wanted = fate(incoming.to_record, data, destination, CAPTURED)
    assert fate(to_record, data, destination, CAPTURED) == wanted


@given(messages_of(CAPTURED).map(b"".join), st.sampled_from(DESTINATIONS), st.data())
def test_any_message_gives_the_same_result(data: bytes, destination: AmqpDestination, drawn: Any) -> None:
    if data and drawn.draw(st.booleans()):
        at = drawn.draw(st.integers(0, len(data) - 1))
        data = data[:at] + drawn.draw(st.binary(max_size=2)) + data[at + 1 :]
    assert_same(data, destination)


def mapped_run(map_run: Any, *arguments: Any) -> Any:
    """Return the records that were appended, and the error after them."""
    records: list[Record] = []
    return records, fate(map_run, *arguments, records)


BROKEN = b"\x00\x53\x75\xa0\x09short"
RUNS = st.lists(st.sampled_from([*MESSAGES["typical"], *MESSAGES["minimal"], BROKEN]), max_size=6)


@given(RUNS, st.integers(0, 7), st.sampled_from(DESTINATIONS), st.sampled_from([CAPTURED, -1, 1 << 64]))
def test_a_run_ends_before_the_message_that_cannot_be_mapped(
    run: list[bytes], first: int, destination: AmqpDestination, now_ms: int
) -> None:
    found = mapped_run(to_records, run, first, destination, now_ms)
    assert found == mapped_run(amqp_mapping.to_records, run, first, destination, now_ms)
    assert found[0] == [to_record(data, destination, now_ms) for data in run[first : first + len(found[0])]]
    assert (found[1] is None) == (BROKEN not in run[first:])


def test_thousands_of_mutations_give_the_same_result() -> None:
    """`python -m tests.support.amqp_mutated` checks a million."""
    records, taken = compare(8_000, seed=2)
    assert records > taken > 1_000


NAMED = [primitives.symbol(name) for name in ("x-opt-bridge.key", "x-opt-partition-key", "x-opt-bridge.partition")]
GIVEN = [primitives.string("one"), primitives.binary(b"two"), primitives.NULL, primitives.integer(2)]
NEAR = [base + step for base in (0, 60_000, -60_000, -CAPTURED, 2**63 - 2 - CAPTURED) for step in (-1, 0, 1)]


@pytest.mark.parametrize("count", [1, 2, 33])
def test_many_data_sections_give_the_same_result(count: int) -> None:
    sizes = (0, 255, 256, 65_536)
    data = [section(0x75, primitives.binary(bytes(sizes[place % 4]))) for place in range(count)]
    data[-1] = b"\x00\x80" + bytes(7) + b"\x75\xb0\x00\x00\x00\x01x"
    for behind in (b"", section(0x76, b"\x45"), section(0x78, b"\xc1\x01\x00"), b"\x00\x53"):
        assert_same(b"".join(data) + behind, HERE)


def test_keys_and_times_at_their_limits_give_the_same_result() -> None:
    """Several key annotations in any order, and times near the present and at the limits of the type."""
    data = section(0x75, primitives.binary(b"value"))
    messages = [
        section(0x72, primitives.map_of([first, one, second, other])) + data
        for first, second in itertools.product(NAMED, NAMED)
        for one, other in itertools.product(GIVEN, GIVEN)
    ]
    times = [primitives.timestamp(primitives.Timestamp(CAPTURED + near)) for near in NEAR]
    messages += [
        section(0x73, primitives.list_of([primitives.NULL] * 8 + [expiry, time])) + data
        for expiry, time in itertools.product([primitives.NULL, *times], times)
    ]
    for destination, message in itertools.product(DESTINATIONS, messages):
        assert_same(message, destination)


@pytest.mark.parametrize("bits", [31, 32, 63, 64])
def test_a_ttl_of_any_size_gives_the_same_result(bits: int) -> None:
    """The encoding of a ttl is not checked, so it may be a ulong; the sum with the time must not overflow in C."""
    for ttl in (primitives.ulong((1 << bits) - 1), primitives.long(-1 << bits - 1)):
        header = section(0x70, primitives.list_of([primitives.TRUE, primitives.NULL, ttl]))
        assert_same(header + section(0x75, primitives.binary(b"value")), HERE)


def test_text_is_checked_as_python_checks_it() -> None:
    """All leading bytes, with second bytes at the edges of the rules, and possible following bytes."""
    for lead, second in itertools.product(range(0x80, 0x100), b"\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xff"):
        for rest in (b"", b"\xbf") if second < 0x80 else (b"", b"\x80", b"\xbf\x80", b"\xbf\xc0x"):
            raw = bytes((lead, second)) + rest
            try:
                raw.decode()
            except UnicodeDecodeError:
                is_text = False
            else:
                is_text = True
            with mapped_in_python() as left:
                found = fate(to_record, b"\x00\x53\x77\xa1" + bytes((len(raw),)) + raw, HERE, CAPTURED)
            assert (type(found) is Record, not left) == (is_text, is_text)


def test_what_is_no_message_is_a_type_error() -> None:
    calls: list[tuple[Any, ...]] = [
        (), (b"", HERE), ("text", HERE, 1), (bytearray(b"\x00"), HERE, 1), (b"\x00", "no destination", 1),
        (b"\x00", HERE, "now"), (b"\x00", HERE, 1, 2),
    ]  # fmt: skip
    calls += [
        (b"\x00", msgspec.structs.replace(HERE, **wrong), 1) for wrong in ({"headers": []}, {"address_bytes": ""})
    ]
    for arguments in calls:
        with pytest.raises(TypeError):
            to_record(*arguments)
    runs: list[tuple[Any, ...]] = [
        (), ([b""], 0, HERE, 1), ((b"",), 0, HERE, 1, []), ([b""], 0, HERE, 1, ()), ([b""], -1, HERE, 1, []),
        ([b""], "0", HERE, 1, []), (["text"], 0, HERE, 1, []), ([b""], 0, "no destination", 1, []),
    ]  # fmt: skip
    for arguments in runs:
        with pytest.raises(TypeError):
            to_records(*arguments)
    for now_ms in (1 << 64, -1):  # an unrealistic time gives the same result, too
        data = MESSAGES["typical"][0]
        assert to_record(data, HERE, now_ms) == incoming.to_record(data, HERE, now_ms)


def test_nothing_is_leaked() -> None:
    """Memory and references are released, whether C mapped the message, left it to Python or refused it."""
    own = AmqpDestination("t", b"t", None, b"own key", "ann", gateway_headers("own"))
    names = [name for name, _ in to_record(MESSAGES["typical"][0], own, CAPTURED).headers if name in ("seq", "temp")]
    kept = [own, own.headers, own.headers[0], own.key, *names]
    messages = [one for found in MESSAGES.values() for one in found]
    messages += [one[:-1] for one in messages] + [one + b"\x00" for one in messages]
    for data in messages:
        fate(to_record, data, own, CAPTURED)  # fill the caches
    runs = [[messages[0], data] for data in messages]
    gc.collect()
    references, blocks = [sys.getrefcount(one) for one in kept], sys.getallocatedblocks()
    for _ in range(20):
        for data, run in zip(messages, runs, strict=True):
            fate(to_record, data, own, CAPTURED)
            mapped_run(to_records, run, 0, own, CAPTURED)
    assert [sys.getrefcount(one) for one in kept] == references
    assert sys.getallocatedblocks() - blocks < len(messages), "less than a twentieth of a block for each"


NAMES = ["unit", "a", "gw.protocol", "ce_id", "correlation-id", "message-id", "expiry", "amqp.body", "amqp.sections",
         "amqp.types", "dead-letter.topic", "user.to", "n" * 300]  # fmt: skip
CONTENTS = [None, b"", b"text", b"\xff", b"v:str", b"1795000000001", b"s", b"c" * 200, "ü".encode()]
SIZES = (0, 1, 255, 256, 70_000)
headers = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(CONTENTS)), max_size=6).map(tuple)
keys = st.one_of(st.none(), st.binary(max_size=4), st.sampled_from(SIZES).map(bytes), st.just("ü".encode() * 200))
values = st.one_of(st.none(), st.binary(max_size=4), st.sampled_from(SIZES).map(bytes))
records = st.builds(
    Received,
    st.sampled_from(["t", "other", "t" * 249]),
    keys,
    values,
    headers,
    st.sampled_from([0, CAPTURED, -1, (1 << 63) - 1]),
    st.sampled_from([0, 1, 255, 70_000]),
    st.sampled_from([0, 9, 10, CAPTURED, (1 << 63) - 1]),
)


@given(st.lists(records, max_size=6), st.sampled_from((0, 0, 2)), st.sampled_from((0, 300, 1 << 20)))
def test_any_records_have_the_same_messages(found: list[Received], attempts: int, most_bytes: int) -> None:
    for given_as in (list, tuple):
        given = (given_as(found), CAPTURED, attempts, most_bytes)
        assert from_records(*given) == amqp_mapping.from_records(*given)


@pytest.mark.parametrize("fields", [{"offset": -1}, {"offset": 1 << 63}, {"timestamp": 1 << 63}, {"value": "text"}])
def test_an_unusual_record_gives_the_same_result(fields: dict[str, Any]) -> None:
    record = Received(**{"topic": "t", "key": None, "value": b"", "headers": (), "timestamp": 0, "partition": 0,
                         "offset": 0, **fields})  # fmt: skip
    fates: list[Any] = []
    for form in (from_records, amqp_mapping.from_records):
        try:
            fates.append(form([record], CAPTURED, 0, 1))
        except Exception as error:
            fates.append(type(error))
    assert fates[0] == fates[1]


def test_usual_records_are_mapped_in_c() -> None:
    own = (("gw.protocol", b"mqtt5"), ("gw.client", b"c"), ("unit", b"C"))
    usual = [Received("t", key, b"value", own[:count], CAPTURED, 1, 7) for key in (None, b"k") for count in range(4)]
    from_records(usual, CAPTURED, 0, 1 << 20)  # fill the caches
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        from_records(usual, CAPTURED, 0, 1 << 20)
    finally:
        sys.setprofile(None)
    assert calls == []


def test_mapping_records_leaks_nothing() -> None:
    """Also of headers that are too many or too long to be cached."""
    made = [Received("t", b"key", b"value", (("unit", b"C" * size),) * count, CAPTURED, 1, 7)
            for size, count in ((1, 1), (200, 1), (1, 6))]  # fmt: skip
    for _ in range(3):
        from_records(made, CAPTURED, 0, 1 << 20)
    gc.collect()
    kept = [made[0], made[0].headers, made[0].topic, made[0].key]
    references, blocks = [sys.getrefcount(one) for one in kept], sys.getallocatedblocks()
    for _ in range(200):
        from_records(made, CAPTURED, 0, 1 << 20)
    assert [sys.getrefcount(one) for one in kept] == references
    assert sys.getallocatedblocks() - blocks < 100


def test_what_is_no_run_of_records_is_a_type_error() -> None:
    calls: list[tuple[Any, ...]] = [(), ([], 0, 0), (3, 0, 0, 0), ([], 0, "none", 0), ([], 0, 0, "all")]
    for arguments in calls:
        with pytest.raises(TypeError):
            from_records(*arguments)
