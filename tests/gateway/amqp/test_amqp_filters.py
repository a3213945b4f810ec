"""Parsing a source's filters, in the forms of several brokers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.amqp.filters import Filters, read_filters
from gateway.kafka.read.start_positions import AtOffset, AtTime, StartPosition
from mapping.amqp.addresses import AddressError
from mapping.record import Received
from protocols.amqp.links import Filter
from protocols.amqp.outcomes import INVALID_FIELD
from protocols.amqp.primitives import Symbol, Timestamp

NOW = 1_700_000_000_000
SELECTOR = "apache.org:selector-filter:string"
OFFSET_SPEC = "rabbitmq:stream-offset-spec"


def given_filter(descriptor: Any, value: Any, name: str = "name") -> Filter:
    return Filter(Symbol(name), descriptor, value, (b"", b""))


def read(*filters: Filter) -> Filters:
    return read_filters(filters, "me", NOW)


@pytest.mark.parametrize(
    ("descriptor", "value", "start"),
    [
        (OFFSET_SPEC, "first", StartPosition.BEGINNING),
        (OFFSET_SPEC, Symbol("last"), StartPosition.LAST),
        (OFFSET_SPEC, "next", StartPosition.END),
        (OFFSET_SPEC, 0, AtOffset(0)),
        (OFFSET_SPEC, 2**63 - 1, AtOffset(2**63 - 1)),
        (OFFSET_SPEC, Timestamp(5), AtTime(5)),
        (OFFSET_SPEC, "10m", AtTime(NOW - 600_000)),
        (OFFSET_SPEC, "2D", AtTime(NOW - 2 * 86_400_000)),
        ("io.strimzi:offset-filter:long", 7, AtOffset(7)),
        ("enmasse:offset-filter:long", 7, AtOffset(7)),
        (SELECTOR, "amqp.annotation.x-opt-offset > '-1'", StartPosition.BEGINNING),
        (SELECTOR, "amqp.annotation.x-opt-offset > '41'", AtOffset(42)),
        (SELECTOR, "amqp.annotation.x-opt-offset >= '41'", AtOffset(41)),
        (SELECTOR, " amqp.annotation.x-opt-offset>=41 ", AtOffset(41)),
        (SELECTOR, b"amqp.annotation.x-opt-offset > '@latest'", StartPosition.END),
        (SELECTOR, "amqp.annotation.x-opt-sequence-number > '0'", AtOffset(1)),
        (SELECTOR, "amqp.annotation.x-opt-enqueued-time > '1700000000000'", AtTime(NOW + 1)),
        (SELECTOR, f"amqp.annotation.x-opt-offset >= '{2**63}'", StartPosition.END),
        (0x0000468C00000004, "amqp.annotation.x-opt-enqueued-time >= 5", AtTime(5)),
        (0x000001370000000A, "amqp.annotation.x-opt-offset > '41'", AtOffset(42)),
    ],
)
def test_positions(descriptor: Any, value: Any, start: Any) -> None:
    one = given_filter(descriptor, value)
    found = read(one)
    assert (found.start, found.partition, found.condition, found.applied) == (start, None, None, (one,))


@pytest.mark.parametrize("name", ["io.strimzi:partition-filter:int", "rhiot.io:partition-filter:int"])
def test_the_old_bridge_sent_plain_values(name: str) -> None:
    partition = given_filter(None, 3, name)
    offset = given_filter(None, 9, "io.strimzi:offset-filter:long")
    found = read(partition, offset)
    assert (found.partition, found.start, found.applied) == (3, AtOffset(9), (partition, offset))
    assert read(given_filter(name, 3)).partition == 3


def record(*headers: tuple[str, bytes | None]) -> Received:
    return Received("t", None, b"x", headers, NOW, 2, 77)


def test_a_selector_is_a_condition() -> None:
    for descriptor in (SELECTOR, 0x0000468C00000004):
        found = read(given_filter(descriptor, "colour = 'red'", "jms-selector"))
        assert found.condition is not None
        assert found.condition(record(("colour", b"red")))
        assert not found.condition(record(("colour", b"blue")))


@pytest.mark.parametrize("descriptor", ["apache.org:no-local-filter:list", 0x0000468C00000003])
def test_no_local_leaves_out_the_clients_own(descriptor: Any) -> None:
    own = record(("gw.protocol", b"amqp10"), ("gw.client", b"me"), ("colour", b"red"))
    other = record(("gw.protocol", b"amqp10"), ("gw.client", b"you"), ("colour", b"red"))
    namesake = record(("gw.protocol", b"mqtt5"), ("gw.client", b"me"), ("colour", b"red"))
    no_local = given_filter(descriptor, [], "no-local")
    found = read(no_local)
    assert found.condition is not None
    assert [found.condition(one) for one in (own, other, namesake, record())] == [False, True, True, True]
    both = read(no_local, given_filter(SELECTOR, "colour = 'red'")).condition
    assert both is not None
    assert [both(one) for one in (own, other, record())] == [False, True, False]


def test_unknown_filters_are_not_applied() -> None:
    unknown = [
        given_filter("rabbitmq:stream-filter", "x"),
        given_filter("amqp:sql-filter", "a = 1"),
        given_filter(0x173, {}),
        given_filter(None, "a = 1", "jms-selector"),
        given_filter("other", 3, "io.strimzi:partition-filter:int"),
    ]
    assert read(*unknown) == Filters()
    assert read().applied == ()


def test_an_empty_selector_selects_everything() -> None:
    one = given_filter(SELECTOR, "  ")
    assert read(one) == Filters(applied=(one,))


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        ([given_filter(SELECTOR, "colour = ")], "expected a value, found the end, at character 10"),
        ([given_filter(SELECTOR, 5)], "a selector is a string"),
        ([given_filter(SELECTOR, "amqp.annotation.x-opt-sequence-number > '@latest'")], "expected a number"),
        ([given_filter(OFFSET_SPEC, "later")], "interval"),
        ([given_filter(OFFSET_SPEC, -1)], "number"),
        ([given_filter(OFFSET_SPEC, True)], "number"),
        ([given_filter(OFFSET_SPEC, None)], "number"),
        ([given_filter(OFFSET_SPEC, 2**63)], "number"),
        ([given_filter("io.strimzi:partition-filter:int", "0")], "number"),
        ([given_filter("io.strimzi:partition-filter:int", 2**31)], "number"),
        ([given_filter("io.strimzi:offset-filter:long", -5)], "number"),
        ([given_filter("io.strimzi:offset-filter:long", 5), given_filter(OFFSET_SPEC, 5)], "another filter"),
        ([given_filter(SELECTOR, "a = 1"), given_filter(0x0000468C00000004, "a = 1")], "another filter"),
    ],
)
def test_invalid_filter_values(filters: list[Filter], reason: str) -> None:
    with pytest.raises(AddressError, match=reason) as caught:
        read(*filters)
    assert caught.value.error.condition == INVALID_FIELD


positions = st.from_regex(r"amqp\.annotation\.x-opt-(offset|enqueued-time) >=? '?-?[0-9]{1,25}'?")
values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.integers()),
    st.integers().map(Timestamp), positions,
)  # fmt: skip


@given(st.sampled_from([SELECTOR, OFFSET_SPEC, "io.strimzi:partition-filter:int", 0x0000468C00000003]), values)
def test_any_value_is_a_filter_or_an_invalid_field(descriptor: Any, value: Any) -> None:
    condition = INVALID_FIELD
    try:
        read(given_filter(descriptor, value))
    except AddressError as error:
        condition = error.error.condition
    assert condition == INVALID_FIELD
