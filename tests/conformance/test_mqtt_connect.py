"""CONNECT, its errors, and CONNACK on a single connection: sections 3.1 and 3.2 of both standards."""

from __future__ import annotations

import pytest

from protocols.connection import ConnectionFailed
from protocols.errors import UsageError
from protocols.mqtt import packets
from protocols.mqtt.connection import PacketLimits
from protocols.mqtt.properties import Properties
from protocols.mqtt.reasons import ReasonCode
from tests.protocols.mqtt.client import CONNECTS, ended_by, failed, new, opened, say, send_publish
from tests.protocols.mqtt.wire import wire

BOTH = pytest.mark.parametrize("version", [5, 4], ids=["5.0", "3.1.1"])


def connect(version: int, flags: str, payload: str, properties: str = "00") -> str:
    """Build a CONNECT; `payload` has {} where 5.0 has the will's properties."""
    five = version == 5
    payload = payload.format("00" if five else "")
    return f"10 * s'MQTT' {version:02x} {flags} 000a {properties if five else ''} {payload}"


@pytest.mark.clause("MQTT-3.1.0-1", "MQTT311-3.1.0-1")
@pytest.mark.parametrize("first", ["30 * s't'", "82 * 0001 s't' 00", "c0 00", "e0 00", "40 02 0001"])
def test_the_first_packet_must_be_connect(first: str) -> None:
    connection = new()
    assert failed(say(connection, first)) == "0x82"
    assert ended_by(connection) is None


@pytest.mark.clause("MQTT-3.1.0-2", "MQTT311-3.1.0-2", "MQTT311-4.8.0-1", "MQTT-4.13.1-1")
@BOTH
def test_a_second_connect_is_an_error(version: int) -> None:
    connection = opened(version)
    assert failed(say(connection, CONNECTS[version])) == "0x82"
    assert ended_by(connection) == ((0xE0, 0x82) if version == 5 else None)


@pytest.mark.clause("MQTT-3.1.2-1", "MQTT311-3.1.2-1")
@BOTH
@pytest.mark.parametrize("name", ["MQTU", "mqtt", "MQT", "MQTTT", "HTTP"])
def test_another_protocol_name_is_refused(version: int, name: str) -> None:
    connection = new()
    assert failed(say(connection, f"10 * s'{name}' {version:02x} 02 000a s'a'")) == "0x81"
    assert ended_by(connection) is None


@pytest.mark.clause("MQTT-3.1.2-2", "MQTT311-3.1.2-2")
@pytest.mark.parametrize(
    ("level", "answer"), [(6, (0x20, 0x84)), (2, (0x20, 0x84)), (0, (0x20, 0x84)), (255, (0x20, 1)), (3, (0x20, 1))]
)
def test_another_protocol_level_is_refused_in_connack(level: int, answer: tuple[int, int]) -> None:
    """Level 3 and a level with a bridge's mark use 3.1.1's format, and get their CONNACK in that format."""
    connection = new()
    assert failed(say(connection, f"10 * s'MQTT' {level:02x} 02 000a 00 s'a'")) == "0x84"
    assert ended_by(connection) == answer


@pytest.mark.clause("MQTT-3.1.2-3", "MQTT311-3.1.2-3")
@BOTH
@pytest.mark.parametrize("flags", [0x01, 0x03])
def test_the_reserved_connect_flag_must_be_0(version: int, flags: int) -> None:
    connection = new()
    assert failed(say(connection, connect(version, f"{flags:02x}", "s'a'"))) == "0x81"
    assert ended_by(connection) == ((0x20, 0x81) if version == 5 else None)


@pytest.mark.clause("MQTT-3.1.2-11", "MQTT-3.1.2-12", "MQTT-3.1.2-13")
@pytest.mark.clause("MQTT311-3.1.2-11", "MQTT311-3.1.2-13", "MQTT311-3.1.2-14", "MQTT311-3.1.2-15")
@BOTH
@pytest.mark.parametrize("bits", range(32))
def test_will_flags_must_be_consistent(version: int, bits: int) -> None:
    """Every combination of will flag, QoS and retain, with Clean Start."""
    will, qos, retain = bits & 1, bits >> 1 & 3, bits >> 3 & 1
    flags = f"{will << 2 | qos << 3 | retain << 5 | 2:02x}"
    connection = new()
    (event,) = say(connection, connect(version, flags, "s'a' {} s'w' s'm'" if will else "s'a'"))
    if qos == 3 or (not will and (qos or retain)):
        assert failed([event]) == "0x81"
        return
    assert type(event) is packets.Connect
    assert (event.will is not None) is bool(will)
    if event.will is not None:
        assert (event.will.topic, event.will.payload) == ("w", b"m")
        assert (event.will.qos, event.will.retain) == (qos, bool(retain))


@pytest.mark.clause("MQTT-3.1.2-9", "MQTT-3.1.2-16", "MQTT-3.1.2-17", "MQTT-3.1.2-18", "MQTT-3.1.2-19")
@pytest.mark.clause("MQTT311-3.1.2-9", "MQTT311-3.1.2-11", "MQTT311-3.1.2-18", "MQTT311-3.1.2-19")
@pytest.mark.clause("MQTT311-3.1.2-20", "MQTT311-3.1.2-21", "MQTT-3.1.3-3", "MQTT311-3.1.3-3")
@BOTH
@pytest.mark.parametrize(
    ("flags", "payload"),
    [
        pytest.param("02", "", id="no client identifier"),
        pytest.param("06", "s'a'", id="no will"),
        pytest.param("06", "s'a' {} s'w'", id="no will message"),
        pytest.param("02", "s'a' {} s'w' s'm'", id="a will without its flag"),
        pytest.param("82", "s'a'", id="no user name"),
        pytest.param("02", "s'a' s'user'", id="a user name without its flag"),
        pytest.param("c2", "s'a' s'user'", id="no password"),
        pytest.param("82", "s'a' s'user' s'password'", id="a password without its flag"),
    ],
)
def test_the_payload_must_match_the_connect_flags(version: int, flags: str, payload: str) -> None:
    connection = new()
    assert failed(say(connection, connect(version, flags, payload))) == "0x81"
    assert ended_by(connection) == ((0x20, 0x81) if version == 5 else None)


@pytest.mark.clause("MQTT-3.1.3-1", "MQTT-3.1.2-17", "MQTT-3.1.2-19")
@pytest.mark.clause("MQTT311-3.1.3-1", "MQTT311-3.1.2-19", "MQTT311-3.1.2-21")
@BOTH
def test_the_payload_fields_are_in_order(version: int) -> None:
    (event,) = say(new(), connect(version, "c6", "s'one' {} s'two' s'three' s'four' s'five'"))
    assert (event.client_id, event.will.topic, event.will.payload) == ("one", "two", b"three")
    assert (event.username, event.password) == ("four", b"five")


@pytest.mark.clause("MQTT311-3.1.2-22")
def test_no_password_without_a_user_name_in_311() -> None:
    assert failed(say(new(), connect(4, "42", "s'a' s'password'"))) == "0x81"
    (event,) = say(new(), connect(5, "42", "s'a' s'password'"))
    assert (event.username, event.password) == (None, b"password")


@pytest.mark.clause("MQTT311-3.1.3-7", "MQTT311-3.1.3-8")
def test_no_client_identifier_needs_a_clean_session() -> None:
    connection = new()
    assert failed(say(connection, connect(4, "00", "s''"))) == "0x85"
    assert ended_by(connection) == (0x20, 2)
    assert type(say(new(), connect(4, "02", "s''"))[0]) is packets.Connect
    assert type(say(new(), connect(5, "00", "s''"))[0]) is packets.Connect


@pytest.mark.clause("MQTT-3.1.3-8", "MQTT311-3.1.3-9")
@BOTH
def test_a_client_identifier_can_be_refused(version: int) -> None:
    connection = new()
    say(connection, CONNECTS[version])
    connection.send_disconnect(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)
    assert ended_by(connection) == (0x20, 0x85 if version == 5 else 2)


@pytest.mark.clause("MQTT-3.1.4-1", "MQTT311-3.1.4-1")
@pytest.mark.parametrize(
    "text",
    [
        "10 00",
        "10 * s'MQTT'",
        "10 * s'MQTT' {level}",
        "10 * s'MQTT' {level} 02 00",
        "10 * s'MQTT' {level} 02 000a {none}",
        "10 * s'MQTT' {level} 02 000a {none} 0005 6161",
        "10 * s'MQTT' {level} 02 000a {none} s'a' 00",
    ],
)
@BOTH
def test_a_malformed_connect_is_refused(version: int, text: str) -> None:
    """3.1.1 closes without CONNACK; 5.0 sends 0x81 once the protocol level is known."""
    connection = new()
    events = say(connection, text.format(level=f"{version:02x}", none="00" if version == 5 else ""))
    assert failed(events) == "0x81"
    assert ended_by(connection) == ((0x20, 0x81) if version == 5 and "level" in text else None)


@pytest.mark.clause("MQTT-3.1.4-6", "MQTT311-3.1.4-5", "MQTT-3.2.2-7", "MQTT311-3.2.2-5")
@BOTH
def test_nothing_is_processed_after_a_refusal(version: int) -> None:
    connection = new()
    none = "00" if version == 5 else ""
    events = say(connection, CONNECTS[version], f"32 * s't' 0001 {none}", f"82 * 0001 {none} s't' 00", "36 00")
    assert [type(one) for one in events] == [packets.Connect]
    connection.send_disconnect(ReasonCode.NOT_AUTHORIZED)
    assert ended_by(connection) == (0x20, 0x87 if version == 5 else 5)
    assert say(connection, "c0 00") == []
    assert connection.data_to_send() == b""


@pytest.mark.clause("MQTT311-4.8.0-2")
@BOTH
def test_a_full_buffer_ends_the_connection(version: int) -> None:
    """The standard's example of a transient error."""
    connection = new(PacketLimits(max_held_bytes=10))
    say(connection, CONNECTS[version])
    assert connection.receive_data(b"\x30" * 10) == []
    assert failed(connection.receive_data(b"\x30")) == "0x97"
    assert ended_by(connection) == (0x20, 0x97 if version == 5 else 3)


@pytest.mark.clause("MQTT-3.1.4-5", "MQTT-3.2.0-1", "MQTT-3.2.2-1", "MQTT311-3.1.4-4", "MQTT311-3.2.0-1")
@BOTH
@pytest.mark.parametrize("present", [False, True])
def test_connack_is_the_first_packet(version: int, present: bool) -> None:
    connection = new()
    say(connection, CONNECTS[version], "c0 00")
    with pytest.raises(UsageError):
        send_publish(connection, "t", b"")
    for answer in (connection.send_puback, connection.send_pubrec, connection.send_pubrel, connection.send_pubcomp):
        answer(1)
    connection.send_suback(1, [0])
    connection.send_unsuback(1, [0])
    assert connection.data_to_send() == b""
    connection.accept(present)
    data = connection.data_to_send()
    connack = wire("20 * 00 00 v 27 00200000 ;") if version == 5 else wire("20 * 00 00")
    assert data == connack[:2] + bytes((present,)) + connack[3:] + b"\xd0\x00"


@pytest.mark.clause("MQTT-3.2.0-2")
@BOTH
def test_a_second_connack_cannot_be_sent(version: int) -> None:
    connection = opened(version)
    with pytest.raises(UsageError):
        connection.accept()
    assert connection.data_to_send() == b""
    connection.send_disconnect(0x80)
    assert connection.data_to_send()[:1] == (b"\xe0" if version == 5 else b"")


@pytest.mark.clause("MQTT-3.2.2-6", "MQTT-3.2.2-7", "MQTT-3.2.2-8", "MQTT-4.13.2-1")
@pytest.mark.clause("MQTT311-3.2.2-4", "MQTT311-3.2.2-5", "MQTT311-3.2.2-6")
@BOTH
@pytest.mark.parametrize("code", [code for code in ReasonCode if code >= 0x80], ids=lambda code: code.name)
def test_every_refusal_closes_the_connection(version: int, code: ReasonCode) -> None:
    """Each refusal has a code of CONNACK's table and Session Present 0, and closes the connection."""
    connection = new()
    say(connection, CONNECTS[version])
    connection.send_disconnect(code)
    assert connection.closing
    data = connection.data_to_send()
    if version == 5:
        allowed = bytes.fromhex("80 81 82 83 84 85 86 87 88 89 8a 8c 90 95 97 99 9a 9b 9c 9d 9f")
        assert data[:1] + data[2:3] == b"\x20\x00"
        assert data[3] == (code if code in allowed else 0x80)
    else:
        assert data == b"" or (data[:3] == b"\x20\x02\x00" and 1 <= data[3] <= 5 and len(data) == 4)


@pytest.mark.clause("MQTT311-3.2.2-6")
@pytest.mark.parametrize("code", [0x80, 0x81, 0x82, 0x8C, 0x90, 0x95, 0x99, 0x9A, 0x9B])
def test_a_reason_without_a_return_code_sends_no_connack(code: int) -> None:
    connection = new()
    say(connection, CONNECTS[4])
    connection.send_disconnect(code)
    assert ended_by(connection) is None


@pytest.mark.clause("MQTT-3.1.2-22", "MQTT-3.2.2-22", "MQTT311-3.1.2-24")
@BOTH
def test_silence_beyond_the_keep_alive_ends_the_connection(version: int) -> None:
    connection = opened(version)
    assert connection.next_deadline() == 115.0
    connection.tick(110.0)
    assert say(connection, "c0 00") == []
    assert connection.tick(124.9) == []
    (event,) = connection.tick(125.0)
    assert type(event) is ConnectionFailed  # like a network failure, so a will is published
    assert connection.closing


@pytest.mark.clause("MQTT-3.1.2-21", "MQTT-3.2.2-21")
def test_the_server_keep_alive_overrides_the_client_s() -> None:
    connection = opened(announced=Properties(server_keep_alive=2))
    assert connection.next_deadline() == 103.0


@pytest.mark.clause("MQTT-3.1.2-30")
@pytest.mark.parametrize("text", ["30 * s't' 00", "c0 00", "82 * 0001 00 s't' 00"])
def test_only_auth_and_disconnect_come_before_connack_of_a_method(text: str) -> None:
    connection = new()
    say(connection, "10 * s'MQTT' 05 02 000a v 15 s'M' ; s'me'")
    assert failed(say(connection, text)) == "0x82"
    assert ended_by(connection) == (0x20, 0x82)
