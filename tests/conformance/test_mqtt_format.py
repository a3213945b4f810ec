"""Chapters 1 and 2 of both standards: violations of the rules for strings, flags and packet identifiers."""

from __future__ import annotations

import pytest

from protocols.connection import ConnectionFailed
from protocols.mqtt import packets
from protocols.mqtt.connection import Connection
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties
from tests.protocols.mqtt.client import failed, new, opened, say, send_publish
from tests.protocols.mqtt.wire import wire

BOTH = pytest.mark.parametrize("version", [5, 4], ids=["5.0", "3.1.1"])
BAD_STRINGS = {
    "a byte that begins nothing": "0001 ff",
    "a surrogate": "0003 eda080",
    "the other end of the surrogates": "0003 edbfbf",
    "U+0000": "0003 610062",
}


def none(version: int) -> str:
    """Return the empty properties of a packet."""
    return "00" if version == 5 else ""


FIELDS = {
    "client identifier": "10 * s'MQTT' {level} 02 0000 {none} {bad}",
    "will topic": "10 * s'MQTT' {level} 06 0000 {none} s'a' {none} {bad} s'm'",
    "user name": "10 * s'MQTT' {level} 82 0000 {none} s'a' {bad}",
    "PUBLISH": "32 * {bad} 0001 {none}",
    "SUBSCRIBE": "82 * 0001 {none} {bad} 00",
    "UNSUBSCRIBE": "a2 * 0001 {none} {bad}",
}


@pytest.mark.clause("MQTT-1.5.4-1", "MQTT-1.5.4-2", "MQTT311-1.5.3-1", "MQTT311-1.5.3-2")
@pytest.mark.clause("MQTT-3.1.3-4", "MQTT-3.1.3-11", "MQTT-3.1.3-12")
@pytest.mark.clause("MQTT311-3.1.3-4", "MQTT311-3.1.3-10", "MQTT311-3.1.3-11")
@pytest.mark.clause("MQTT-3.3.2-1", "MQTT-3.8.3-1", "MQTT-3.10.3-1", "MQTT-4.7.3-2")
@pytest.mark.clause("MQTT311-3.3.2-1", "MQTT311-3.8.3-1", "MQTT311-3.10.3-1", "MQTT311-4.7.3-2")
@BOTH
@pytest.mark.parametrize("text", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("bad", BAD_STRINGS.values(), ids=BAD_STRINGS)
def test_a_malformed_string_ends_the_connection(version: int, text: str, bad: str) -> None:
    connection = new() if text.startswith("10") else opened(version)
    packet = text.format(level=f"{version:02x}", none=none(version), bad=bad)
    assert failed(say(connection, packet)) == ("0x85" if version == 5 and "02 0000" in text else "0x81")
    assert connection.closing
    good = text.format(level=f"{version:02x}", none=none(version), bad="s'good'")
    connection = new() if text.startswith("10") else opened(version)
    assert type(say(connection, good)[0]) is not ConnectionFailed


@pytest.mark.clause("MQTT-3.3.2-13", "MQTT-3.3.2-19", "MQTT-1.5.7-1")
@pytest.mark.parametrize("prop", ["08 {}", "03 {}", "26 {} s'v'", "26 s'k' {}"])
@pytest.mark.parametrize("bad", BAD_STRINGS.values(), ids=BAD_STRINGS)
def test_a_malformed_string_property_ends_the_connection(prop: str, bad: str) -> None:
    connection = opened()
    assert failed(say(connection, f"30 * s't' v {prop.format(bad)} ;")) == "0x81"
    (event,) = say(opened(), "30 * s't' v " + prop.format("s'good'") + " ;")
    assert type(event) is packets.Publish


@pytest.mark.clause("MQTT-1.5.4-3", "MQTT311-1.5.3-3")
@BOTH
def test_a_byte_order_mark_is_kept(version: int) -> None:
    connection = opened(version)
    (event,) = say(connection, f"30 * 0007 efbbbf61efbbbf {none(version)}")
    assert event.topic == "\ufeffa\ufeff"
    send_publish(connection, event.topic, b"")
    assert connection.data_to_send() == wire(f"30 * 0007 efbbbf61efbbbf {none(version)}")


FIXED = {
    "CONNECT": (0, "10 * s'MQTT' {level} 02 0000 {none} s'a'"),
    "PUBACK": (0, "40 02 0001"),
    "PUBREC": (0, "50 02 0001"),
    "PUBREL": (2, "62 02 0001"),
    "PUBCOMP": (0, "70 02 0001"),
    "SUBSCRIBE": (2, "82 * 0001 {none} s'a' 00"),
    "UNSUBSCRIBE": (2, "a2 * 0001 {none} s'a'"),
    "PINGREQ": (0, "c0 00"),
    "DISCONNECT": (0, "e0 00"),
    "AUTH": (0, "f0 * 19 v 15 s'M' ;"),
}
FIXED_311 = [kind for kind in FIXED if kind != "AUTH"]


@pytest.mark.clause("MQTT-2.1.3-1", "MQTT311-2.2.2-1", "MQTT311-2.2.2-2")
@pytest.mark.clause("MQTT-3.6.1-1", "MQTT-3.8.1-1", "MQTT-3.10.1-1", "MQTT-3.14.1-1", "MQTT-3.15.1-1")
@pytest.mark.clause("MQTT311-3.6.1-1", "MQTT311-3.8.1-1", "MQTT311-3.10.1-1", "MQTT311-3.14.1-1")
@pytest.mark.parametrize(("version", "kind"), [*((5, kind) for kind in FIXED), *((4, kind) for kind in FIXED_311)])
def test_wrong_reserved_flags_end_the_connection(version: int, kind: str) -> None:
    right, text = FIXED[kind]
    data = wire(text.format(level=f"{version:02x}", none=none(version)))
    for flags in range(16):
        connection = server(kind, version)
        events = connection.receive_data(bytes((data[0] & 0xF0 | flags,)) + data[1:])
        assert any(type(one) is ConnectionFailed for one in events) is (flags != right)
        if flags == right:
            continue
        assert connection.closing
        said = connection.data_to_send()
        if kind == "DISCONNECT":
            assert said[:3:2] == (b"\xe0\x81" if version == 5 else b"")


def server(kind: str, version: int) -> Connection:
    if kind == "CONNECT":
        return new()
    method = "10 * s'MQTT' 05 02 0000 v 15 s'M' ; s'me'" if kind == "AUTH" else None
    return opened(version, Properties(authentication_method="M" if method else None), connect=method)


@pytest.mark.clause("MQTT-2.2.1-2", "MQTT311-2.3.1-5", "MQTT-4.3.1-1", "MQTT311-4.3.1-1")
@BOTH
def test_qos_0_has_no_packet_identifier(version: int) -> None:
    connection = opened(version)
    (event,) = say(connection, f"30 * s't' {none(version)} 0007")
    assert (event.payload, event.packet_id, event.dup) == (b"\0\7", 0, False)
    send_publish(connection, "t", b"x")
    assert connection.data_to_send() == wire(f"30 * s't' {none(version)} 'x'")


@pytest.mark.clause("MQTT-2.2.1-3", "MQTT311-2.3.1-1")
@BOTH
@pytest.mark.parametrize(
    "text", ["32 * s't' 0000 {}", "34 * s't' 0000 {}", "82 * 0000 {} s't' 00", "a2 * 0000 {} s't'"]
)
def test_no_packet_identifier_is_0(version: int, text: str) -> None:
    connection = opened(version)
    assert failed(say(connection, text.format(none(version)))) in ("0x81", "0x82")
    assert connection.closing


@pytest.mark.clause("MQTT-2.2.1-4", "MQTT311-2.3.1-4", "MQTT-4.3.2-1", "MQTT-4.3.3-1")
@pytest.mark.clause("MQTT-4.3.2-2", "MQTT-4.3.3-2", "MQTT311-4.3.2-1", "MQTT311-4.3.3-1")
@BOTH
def test_the_gateway_s_packet_identifiers_are_not_0_and_not_in_use(version: int) -> None:
    connection = opened(version)
    ids = [send_publish(connection, "t", b"", 1 + number % 2) for number in range(900)]
    assert len(set(ids)) == 900
    assert 0 not in ids
    data = connection.data_to_send()
    size = len(data) // 900
    for number, packet_id in enumerate(ids):
        assert packet_id is not None
        first = 0x32 if number % 2 == 0 else 0x34  # DUP 0
        assert data[number * size :][:size] == wire(f"{first:02x} * s't' {packet_id:04x} {none(version)}")


@pytest.mark.clause("MQTT-2.2.1-5", "MQTT311-2.3.1-6", "MQTT-4.3.3-4", "MQTT-4.3.3-11")
@BOTH
def test_answers_carry_the_identifier_of_the_message(version: int) -> None:
    connection = opened(version)
    say(connection, f"32 * s't' abcd {none(version)}", f"34 * s't' abce {none(version)}")
    connection.send_puback(0xABCD)
    connection.send_pubrec(0xABCE)
    say(connection, "62 02 abce")
    connection.send_pubcomp(0xABCE)
    assert connection.data_to_send() == bytes.fromhex("4002abcd 5002abce 7002abce")
    for _ in range(299):
        send_publish(connection, "t", b"", 1)
    send_publish(connection, "t", b"", 2)
    connection.data_to_send()
    say(connection, "50 02 012c")
    connection.send_pubrel(300)
    assert connection.data_to_send() == bytes.fromhex("6202012c")


@pytest.mark.clause("MQTT-2.2.2-1")
def test_absent_properties_have_the_length_0() -> None:
    connection = opened()
    send_publish(connection, "t", b"")
    connection.send_suback(1, [0])
    connection.send_unsuback(2, [0])
    assert connection.data_to_send() == bytes.fromhex("3004000174 00  9004000100 00  b004000200 00")
    for text in ("30 * s't'", "82 * 0001", "a2 * 0001"):
        assert failed(say(opened(), text)) == "0x81"  # the length is missing
    assert connection.version is Version.V5


@pytest.mark.clause("MQTT-4.7.0-1", "MQTT-3.3.2-2", "MQTT311-4.7.1-1", "MQTT311-3.3.2-2")
@BOTH
@pytest.mark.parametrize("topic", ["#", "+", "a/#", "a/+/b", "a+", "b#"])
def test_no_wildcard_in_a_topic(version: int, topic: str) -> None:
    connection = opened(version)
    assert failed(say(connection, f"30 * s'{topic}' {none(version)}")) == "0x81"
    will = f"06 0000 {none(version)} s'a' {none(version)} s'{topic}' s'm'"
    assert failed(say(new(), f"10 * s'MQTT' {version:02x} {will}")) == "0x81"


@pytest.mark.clause("MQTT-4.7.1-1", "MQTT-4.7.1-2", "MQTT-4.7.3-1")
@pytest.mark.clause("MQTT311-4.7.1-2", "MQTT311-4.7.1-3", "MQTT311-4.7.3-1")
@BOTH
@pytest.mark.parametrize("verb", ["82 * 0001 {none} s'{topic_filter}' 00", "a2 * 0001 {none} s'{topic_filter}'"])
@pytest.mark.parametrize("topic_filter", ["", "a#", "#/a", "a/#/b", "a+", "+a/b", "a/b+/c", "##", "++"])
def test_misplaced_wildcards_in_a_filter_end_the_connection(version: int, verb: str, topic_filter: str) -> None:
    connection = opened(version)
    for good in ("#", "+", "a/#", "+/a", "a/+/#", "/"):
        (event,) = say(connection, verb.format(none=none(version), topic_filter=good))
        assert type(event) is not ConnectionFailed
    assert failed(say(connection, verb.format(none=none(version), topic_filter=topic_filter))) == "0x81"


@pytest.mark.clause("MQTT-4.7.3-1", "MQTT311-4.7.3-1")
@BOTH
def test_no_topic_is_empty(version: int) -> None:
    assert failed(say(opened(version), f"30 * s'' {none(version)}")) == ("0x82" if version == 5 else "0x81")


@pytest.mark.clause("MQTT-4.7.3-3", "MQTT311-4.7.3-3")
@BOTH
def test_the_longest_topic_is_accepted(version: int) -> None:
    """The longest topic that two bytes of length allow is accepted."""
    connection = opened(version)
    topic = "t" * 65_535
    (event,) = connection.receive_data(wire(f"30 * ffff {topic.encode().hex()} {none(version)} 'x'"))
    assert (event.topic, event.payload) == (topic, b"x")
    (event,) = connection.receive_data(wire(f"82 * 0001 {none(version)} ffff {topic.encode().hex()} 00"))
    assert event.subscriptions[0].topic_filter == topic
