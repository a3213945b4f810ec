"""MQTT and Kafka records: a round trip loses nothing, and foreign records have a sensible MQTT form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapping.mqtt.incoming import Inbound
from mapping.mqtt.outgoing import BASE64, for_subscriber, from_record
from mapping.record import Headers, Received, Record
from mapping.rules import Rules
from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Version
from protocols.mqtt.properties import NONE, Properties
from tests.support.counted_list import CountedList

RULES = Rules()
NOW = 1_700_000_000_000

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
topics = st.text(
    st.characters(codec="utf-8", exclude_characters="\0+#", exclude_categories=["Cs"]), min_size=1, max_size=30
)
properties = st.builds(
    Properties,
    payload_format_indicator=st.none() | st.integers(0, 1),
    message_expiry_interval=st.none() | st.integers(1, 0xFFFFFFFF),
    content_type=st.none() | texts,
    response_topic=st.none() | topics,
    correlation_data=st.none() | st.binary(max_size=20),
    user_properties=st.lists(st.tuples(texts, texts), max_size=5).map(tuple),
)


def stored(record: Record) -> Received:
    return Received(record.topic, record.key, record.value, record.headers, record.timestamp or NOW, 0, 42)


def received(headers: Headers = (), key: bytes | None = b"a", value: bytes | None = b"v") -> Received:
    return Received("sensors", key, value, headers, NOW, 0, 7)


@pytest.mark.clause("MQTT-3.3.2-4", "MQTT-3.3.2-15", "MQTT-3.3.2-16", "MQTT-3.3.2-17", "MQTT-3.3.2-18", "MQTT-3.3.2-20")
@given(topics, st.binary(max_size=50), st.integers(0, 1), st.booleans(), properties)
def test_a_publish_comes_back_as_it_went(topic: str, payload: bytes, qos: int, retain: bool, asked: Properties) -> None:
    inbound = Inbound(RULES, Version.V5, "client-1")
    record = inbound.to_record(topic, payload, qos, retain, asked, NOW)
    assert inbound.to_record(topic, payload, qos, retain, asked, NOW) == record  # what is remembered is the same
    delivery = from_record(stored(record), RULES)
    assert delivery is not None
    assert (delivery.topic, delivery.payload, delivery.qos, delivery.retain) == (topic, payload, qos, retain)
    assert delivery.client == "client-1"
    back = for_subscriber(delivery, (), NOW)
    assert (back if back is not None else Properties()) == asked


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


@given(st.lists(events, max_size=6), st.integers(0, 3))
def test_a_run_is_what_its_publishes_are_one_by_one(found: list[Any], start: int) -> None:
    inbound = Inbound(RULES, Version.V5, "client-1")
    for topic in ("a/b", "a/c", "é"):
        inbound.to_record(topic, b"", 0, False, None, NOW)
        inbound.admit(topic)
    run = []
    for event in found[start:]:
        usual = type(event) is packets.Publish and event.topic != "unknown" and event.qos < 2 and not event.retain
        if not usual or event.qos != found[start].qos or (event.properties or NONE).payload_format_indicator:
            break
        run.append(event)
    records = [
        inbound.to_record(event.topic, event.payload, event.qos, event.retain, event.properties, NOW) for event in run
    ]
    assert inbound.to_records(found, start, NOW) == (records, [event.packet_id for event in run])


@given(st.lists(st.tuples(texts, st.none() | st.binary(max_size=10)), max_size=6).map(tuple), st.binary(max_size=8))
def test_any_record_of_any_kafka_client_has_an_mqtt_form_or_none(headers: Headers, key: bytes) -> None:
    delivery = from_record(received(headers, key), RULES)
    if delivery is not None:
        assert delivery.topic
        assert not set("+#\0") & set(delivery.topic)


LONGEST = 65_535


@pytest.mark.parametrize(
    "asked",
    [
        Properties(user_properties=(("n" * LONGEST, "v" * LONGEST), ("", ""), ("é" * 32_767, "\N{SNOWMAN}" * 21_845))),
        Properties(content_type="c" * LONGEST),
        Properties(response_topic="r" * LONGEST),
        Properties(correlation_data=bytes(LONGEST)),
        Properties(user_properties=(("gw." + "n" * (LONGEST - 3), "v"),)),
        Properties(user_properties=tuple((f"{number}", "v" * 1000) for number in range(500))),
    ],
    ids=["user", "content-type", "response-topic", "correlation-data", "reserved", "many"],
)
def test_the_longest_properties_come_back(asked: Properties) -> None:
    record = Inbound(RULES, Version.V5, "c").to_record("t/a", b"", 1, False, asked, NOW)
    delivery = from_record(stored(record), RULES)
    assert delivery is not None
    assert delivery.properties == asked


def test_a_tombstone_is_an_empty_payload_and_an_unkeyed_record_has_its_topics_name() -> None:
    delivery = from_record(received(key=None, value=None), RULES)
    assert delivery is not None
    assert (delivery.topic, delivery.payload, delivery.client) == ("sensors", b"", None)


def test_headers_of_other_clients_are_user_properties_in_order() -> None:
    headers: Headers = (("b", b"1"), ("a", b"2"), ("b", b"3"), ("raw", b"\xff\x00"), ("null", None))
    delivery = from_record(received((*headers, ("message-id", b"id-1"), ("gw.protocol", b"amqp10"))), RULES)
    assert delivery is not None
    assert delivery.properties is not None
    assert delivery.properties.user_properties == (
        ("b", "1"), ("a", "2"), ("b", "3"), ("raw", BASE64 + "/wA="), ("null", ""), ("message-id", "id-1"),
    )  # fmt: skip


def test_a_users_header_with_a_reserved_name_keeps_its_meaning() -> None:
    inbound = Inbound(RULES, Version.V5, "c")
    own = Properties(content_type="text/plain", user_properties=(("content-type", "mine"), ("user.x", "y")))
    record = inbound.to_record("t/a", b"", 0, False, own, NOW)
    assert dict(record.headers)["content-type"] == b"text/plain"
    delivery = from_record(stored(record), RULES)
    assert delivery is not None
    assert delivery.properties == own


def test_a_reply_address_with_wildcards_is_no_response_topic() -> None:
    delivery = from_record(received((("reply-to", b"a/#"),)), RULES)
    assert delivery is not None
    assert delivery.properties is not None
    assert delivery.properties.response_topic is None
    assert delivery.properties.user_properties == (("reply-to", "a/#"),)


@pytest.mark.clause("MQTT-3.3.2-6")
def test_the_expiry_counts_down_and_each_subscriber_has_its_own_identifiers() -> None:
    delivery = from_record(received((("expiry", b"%d" % (NOW + 10_000)),)), RULES)
    assert delivery is not None
    assert delivery.expires == NOW + 10_000
    mine = for_subscriber(delivery, (3, 5), NOW + 4_500)
    assert mine is not None
    assert (mine.message_expiry_interval, mine.subscription_identifiers) == (6, (3, 5))


def test_what_mqtt_cannot_carry_is_left_out_and_the_rest_is_delivered() -> None:
    long = b"x" * 70_000
    delivery = from_record(received((("long", long), ("content-type", long), ("ok", b"1"))), RULES)
    assert delivery is not None
    assert delivery.properties is not None
    assert delivery.properties.user_properties == (("ok", "1"),)
    assert delivery.properties.content_type is None
    assert from_record(received(key=long), RULES) is None


def test_the_topics_of_a_connection_are_remembered_up_to_so_many_bytes() -> None:
    inbound = Inbound(Rules(), Version.V5, "c")
    for number in range(100):
        topic = f"t{number}/" + "x" * 60_000
        assert inbound.to_record(topic, b"", 0, False, None, 0).topic == f"t{number}"
        inbound.admit(topic)
        assert sum(map(len, inbound._admitted)) <= 1024 * 1024
    assert topic in inbound._admitted


def test_a_run_takes_only_the_events_from_its_start_on() -> None:
    inbound = Inbound(Rules(), Version.V5, "c")
    inbound.to_record("a", b"", 0, False, None, 0)
    inbound.admit("a")
    events = CountedList(Publish("a", b"", retain=bool(number % 2)) for number in range(1000))
    for start in range(0, 1000, 2):  # each run ends before a retained message
        assert len(inbound.to_records(events, start, 0)[0]) == 1
    assert events.taken == 1000
