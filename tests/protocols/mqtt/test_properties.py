"""The 27 properties: bytes, packets, repetitions; the table here is typed from table 2-4, independent of the code's."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.errors import PeerError, UsageError
from protocols.mqtt.codec import Reader
from protocols.mqtt.properties import (
    TABLE,
    WILL,
    Properties,
    decode_properties,
    encode_properties,
)
from protocols.mqtt.reasons import REASON_CODES, PacketType, ReasonCode
from tests.protocols.mqtt.wire import varint, wire

CONNECT, CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK = range(1, 12)
DISCONNECT, AUTH = 14, 15
CARRIERS = (*range(1, 12), DISCONNECT, AUTH, WILL)
NAMES = {**{int(kind): kind.name for kind in PacketType}, WILL: "WILL"}
ACKS = {CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH}

ROWS: list[tuple[str, str, Any, set[int]]] = [
    ("01 01", "payload_format_indicator", 1, {PUBLISH, WILL}),
    ("02 00000102", "message_expiry_interval", 258, {PUBLISH, WILL}),
    ("03 s'a/b'", "content_type", "a/b", {PUBLISH, WILL}),
    ("08 s'r'", "response_topic", "r", {PUBLISH, WILL}),
    ("09 0002 00ff", "correlation_data", b"\x00\xff", {PUBLISH, WILL}),
    ("0b ff01", "subscription_identifiers", (255,), {PUBLISH, SUBSCRIBE}),
    ("11 ffffffff", "session_expiry_interval", 0xFFFFFFFF, {CONNECT, CONNACK, DISCONNECT}),
    ("12 s'id'", "assigned_client_identifier", "id", {CONNACK}),
    ("13 0100", "server_keep_alive", 256, {CONNACK}),
    ("15 s'M'", "authentication_method", "M", {CONNECT, CONNACK, AUTH}),
    ("16 0001 00", "authentication_data", b"\0", {CONNECT, CONNACK, AUTH}),
    ("17 00", "request_problem_information", 0, {CONNECT}),
    ("18 00000001", "will_delay_interval", 1, {WILL}),
    ("19 01", "request_response_information", 1, {CONNECT}),
    ("1a s'i'", "response_information", "i", {CONNACK}),
    ("1c s's'", "server_reference", "s", {CONNACK, DISCONNECT}),
    ("1f s'why'", "reason_string", "why", ACKS),
    ("21 0001", "receive_maximum", 1, {CONNECT, CONNACK}),
    ("22 0000", "topic_alias_maximum", 0, {CONNECT, CONNACK}),
    ("23 ffff", "topic_alias", 65535, {PUBLISH}),
    ("24 01", "maximum_qos", 1, {CONNACK}),
    ("25 00", "retain_available", 0, {CONNACK}),
    ("26 s'k' s'v'", "user_properties", (("k", "v"),), ACKS | {CONNECT, PUBLISH, WILL, SUBSCRIBE, UNSUBSCRIBE}),
    ("27 00000001", "maximum_packet_size", 1, {CONNECT, CONNACK}),
    ("28 01", "wildcard_subscription_available", 1, {CONNACK}),
    ("29 01", "subscription_identifier_available", 1, {CONNACK}),
    ("2a 00", "shared_subscription_available", 0, {CONNACK}),
]
IDS = [row[1] for row in ROWS]


def decode(body: bytes, packet: int) -> Properties | None:
    data = varint(len(body)) + body
    reader = Reader(data)
    properties = decode_properties(reader, packet)
    reader.finish()
    return properties


def test_there_are_27() -> None:
    assert len(ROWS) == len(TABLE) == len(Properties.__struct_fields__) == 27
    assert {row.name for row in TABLE} == set(IDS)


@pytest.mark.parametrize(("text", "name", "value", "places"), ROWS, ids=IDS)
@pytest.mark.parametrize("packet", CARRIERS, ids=NAMES.get)
def test_each_in_each_place(text: str, name: str, value: Any, places: set[int], packet: int) -> None:
    body = wire(text)
    properties = Properties(**{name: value})
    if packet in places:
        assert decode(body, packet) == properties
        assert encode_properties(properties, packet) == varint(len(body)) + body
        return
    with pytest.raises(PeerError) as caught:
        decode(body, packet)
    # Section 2.2.2.2 says malformed, no numbered clause fixes the code; these are the ones that Mosquitto sends.
    assert caught.value.code == (0x81 if packet in (SUBSCRIBE, UNSUBSCRIBE) else 0x82)
    with pytest.raises(UsageError):
        encode_properties(properties, packet)


@pytest.mark.parametrize(("text", "name", "value", "places"), ROWS, ids=IDS)
def test_each_cut_short_is_malformed(text: str, name: str, value: Any, places: set[int]) -> None:
    body = wire(text)
    for packet in places:
        for size in range(1, len(body)):
            with pytest.raises(PeerError) as caught:
                decode(body[:size], packet)
            assert caught.value.code == 0x81


@pytest.mark.parametrize(("text", "name", "value", "places"), ROWS, ids=IDS)
def test_each_twice(text: str, name: str, value: Any, places: set[int]) -> None:
    body = wire(text) * 2
    for packet in places:
        if name == "user_properties" or (name == "subscription_identifiers" and packet == PUBLISH):
            assert decode(body, packet) == Properties(**{name: value * 2})
            continue
        with pytest.raises(PeerError) as caught:
            decode(body, packet)
        assert caught.value.code == 0x82


@pytest.mark.clause("MQTT-3.3.2-18")
def test_user_properties_keep_order_and_duplicates() -> None:
    pairs = (("b", "1"), ("a", "2"), ("b", "1"), ("", ""))
    encoded = encode_properties(Properties(user_properties=pairs), PUBLISH)
    decoded = decode_properties(Reader(encoded), PUBLISH)
    assert decoded is not None
    assert decoded.user_properties == pairs


@pytest.mark.parametrize(
    ("text", "packet", "code"),
    [
        ("01 02", PUBLISH, 0x82),
        ("0b 00", SUBSCRIBE, 0x82),
        ("17 02", CONNECT, 0x82),
        ("19 ff", CONNECT, 0x82),
        ("21 0000", CONNECT, 0x82),
        ("23 0000", PUBLISH, 0x94),
        ("24 02", CONNACK, 0x82),
        ("25 02", CONNACK, 0x82),
        ("27 00000000", CONNECT, 0x82),
        ("28 02", CONNACK, 0x82),
        ("29 02", CONNACK, 0x82),
        ("2a 02", CONNACK, 0x82),
        ("0b 8000", SUBSCRIBE, 0x81),
        ("03 0001 ff", PUBLISH, 0x81),
        ("26 0001 00 s'v'", PUBLISH, 0x81),
    ],
)
def test_values_that_are_not_allowed(text: str, packet: int, code: int) -> None:
    with pytest.raises(PeerError) as caught:
        decode(wire(text), packet)
    assert caught.value.code == code


@pytest.mark.parametrize("identifier", sorted(set(range(256)) - {row.identifier for row in TABLE}))
def test_unknown_properties_are_malformed(identifier: int) -> None:
    with pytest.raises(PeerError) as caught:
        decode(bytes((identifier, 0)), PUBLISH)
    assert caught.value.code == 0x81


@pytest.mark.clause("MQTT-2.2.2-1")
def test_none_at_all_is_a_length_of_zero() -> None:
    assert encode_properties(None, PUBLISH) == b"\0"
    assert encode_properties(Properties(), PUBLISH) == b"\0"
    assert decode(b"", PUBLISH) is None


@pytest.mark.parametrize(
    "properties",
    [
        Properties(receive_maximum=0),
        Properties(receive_maximum=65_536),
        Properties(maximum_qos=2),
        Properties(server_keep_alive=-1),
    ],
)
def test_values_that_we_may_not_send(properties: Properties) -> None:
    with pytest.raises(UsageError):
        encode_properties(properties, CONNACK)


# The tables of the sections that list each packet's reason codes, typed apart from the code's.
REASONS = {
    CONNACK: "00 80 81 82 83 84 85 86 87 88 89 8a 8c 90 95 97 99 9a 9b 9c 9d 9f",
    PUBACK: "00 10 80 83 87 90 91 97 99",
    PUBREC: "00 10 80 83 87 90 91 97 99",
    PUBREL: "00 92",
    PUBCOMP: "00 92",
    SUBACK: "00 01 02 80 83 87 8f 91 97 9e a1 a2",
    UNSUBACK: "00 11 80 83 87 8f 91",
    DISCONNECT: "00 04 80 81 82 83 87 89 8b 8d 8e 8f 90 93 94 95 96 97 98 99 9a 9b 9c 9d 9e 9f a0 a1 a2",
    AUTH: "00 18 19",
}


def test_reason_codes_per_packet() -> None:
    assert {int(kind): codes for kind, codes in REASON_CODES.items()} == {
        kind: frozenset(bytes.fromhex(codes)) for kind, codes in REASONS.items()
    }
    used = set().union(*REASON_CODES.values())
    assert {int(code) for code in ReasonCode} == used
