"""A run of PUBLISHes is mapped in C as it is in Python. `make sanitize` runs this, too."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapping.mqtt import incoming, runs
from mapping.mqtt.incoming import Inbound
from mapping.record import RESERVED_HEADERS, RESERVED_PREFIXES
from mapping.rules import Rules
from protocols.mqtt import packets
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties

native = pytest.importorskip("mapping.mqtt._native", exc_type=ImportError)

NOW = 1_764_000_000_000
reserved = st.sampled_from(
    [*sorted(RESERVED_HEADERS), *(prefix + "x" for prefix in RESERVED_PREFIXES), *RESERVED_PREFIXES]
)
texts = st.text(max_size=6) | st.sampled_from(["", "ä", "\ud800", "mqtt", "gwx", "x" * 300])
properties = st.builds(
    Properties,
    payload_format_indicator=st.sampled_from([None, None, 0, 1]),
    message_expiry_interval=st.none() | st.sampled_from([0, 1, 2**32 - 1]),
    content_type=st.none() | texts,
    response_topic=st.none() | texts,
    correlation_data=st.none() | st.binary(max_size=4),
    user_properties=st.lists(st.tuples(texts | reserved, texts), max_size=4).map(tuple)
    | st.integers(70, 90).map(lambda count: (("n", "v"),) * count),
)
events = st.builds(
    packets.Publish,
    st.sampled_from(["a/b", "a/b", "a/c", "é", "unknown"]),
    st.binary(max_size=4),
    st.sampled_from([0, 1, 1, 1, 2]),
    st.sampled_from([False, False, False, True]),
    st.booleans(),
    st.integers(0, 65_535),
    st.none() | properties,
) | st.builds(packets.Puback, st.integers(1, 5))


def admitted() -> Inbound:
    inbound = Inbound(Rules(), Version.V5, "client")
    for topic in ("a/b", "a/c", "é"):
        inbound.to_record(topic, b"", 0, False, None, NOW)
        inbound.admit(topic)
    return inbound


ROUTES = admitted()._admitted


def outcome(take: Any, *arguments: Any) -> Any:
    try:
        return take(*arguments)
    except UnicodeEncodeError as error:
        return str(error)


@given(found=st.lists(events, max_size=6), start=st.integers(0, 3), now=st.sampled_from([NOW, 0, -5]))
def test_a_run_is_what_the_reference_makes_of_it(found: list[Any], start: int, now: int) -> None:
    arguments = (found, start, ROUTES, now)
    assert outcome(native.map_run, *arguments) == outcome(runs.map_run, *arguments)


@given(st.lists(events, max_size=6))
def test_a_run_is_what_its_publishes_are_one_by_one(found: list[Any]) -> None:
    inbound = admitted()
    made = outcome(inbound.to_records, found, 0, NOW)
    if isinstance(made, str):
        return
    for record, packet_id, event in zip(*made, found, strict=False):
        alone = inbound.to_record(event.topic, event.payload, event.qos, event.retain, event.properties, NOW)
        assert (record, packet_id) == (alone, event.packet_id)


@pytest.mark.parametrize("arguments", [(), ((), 0, {}, 1), ([], "0", {}, 1), ([], 0, [], 1), ([], 0, {}, 1.5)])
def test_what_no_caller_may_hand_over(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        native.map_run(*arguments)


@pytest.mark.parametrize("arguments", [([], -1, {}, 1), ([], 0, {}, 1 << 61), ([], 0, {}, -(1 << 61))])
def test_what_no_caller_may_mean(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="position"):
        native.map_run(*arguments)


def test_nothing_is_kept() -> None:
    pairs = tuple((f"name-{number}", "value") for number in range(5))
    full = Properties(0, 5, "text", "reply", b"c", user_properties=(*pairs, ("mqtt.topic", "x")))
    wrong = Properties(content_type="\ud800")
    payload = b"a payload"
    kinds = [None, full, Properties(user_properties=pairs * 20), wrong, Properties(1)]
    found = [packets.Publish("a/b", payload, 1, False, False, 700, one) for one in kinds]
    kept = [payload, full, pairs[0][0], ROUTES["a/b"], *ROUTES["a/b"].headers, Properties, packets.Publish]

    def everything() -> None:
        for start in range(len(found)):
            outcome(native.map_run, found, start, ROUTES, NOW)

    everything()
    gc.collect()
    before, size = [sys.getrefcount(one) for one in kept], sys.getallocatedblocks()
    for _ in range(1000):
        everything()
    assert [sys.getrefcount(one) for one in kept] == before
    assert sys.getallocatedblocks() - size < 500


def test_the_tests_run_with_the_extension() -> None:
    assert incoming.map_run is native.map_run
