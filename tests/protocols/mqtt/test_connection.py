"""One connection from CONNECT to its end, as the server sees it."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.connection import ConnectionFailed
from protocols.errors import UsageError
from protocols.mqtt import packets
from protocols.mqtt.connection import Connection, PacketLimits, State
from protocols.mqtt.encoding import prepare_publish
from protocols.mqtt.packets import Subscription, Version
from protocols.mqtt.properties import Properties
from tests.protocols.mqtt.client import CONNECT_5, CONNECTS, ended_by, failed, new, opened, say, send_publish
from tests.protocols.mqtt.wire import wire

# opening


@pytest.mark.clause("MQTT-3.1.4-5")
@pytest.mark.clause("MQTT-3.2.0-1")
@pytest.mark.parametrize("version", [5, 4, 3])
def test_connect_and_accept(version: int) -> None:
    connection = new()
    assert say(connection, CONNECTS[version]) == [packets.Connect(Version(version), "me", keep_alive=10)]
    assert connection.state is State.CONNECTING
    assert connection.data_to_send() == b""
    assert connection.accept(session_present=True) == []
    data = connection.data_to_send()
    # In 3.1 the byte of the session is reserved.
    assert data == wire({5: "20 * 01 00 v 27 00200000 ;", 4: "20 02 01 00", 3: "20 02 00 00"}[version])
    assert connection.is_open
    assert not connection.closing


@pytest.mark.clause("MQTT-3.2.0-2")
def test_there_is_one_connack() -> None:
    connection = opened()
    with pytest.raises(UsageError):
        connection.accept()
    connection.data_to_send()
    connection.send_disconnect(0x87)
    assert connection.data_to_send()[:1] == b"\xe0"
    with pytest.raises(UsageError):
        new().accept()


@pytest.mark.clause("MQTT-3.2.2-7")
@pytest.mark.clause("MQTT-3.2.2-6")
@pytest.mark.parametrize(
    ("version", "code", "answer"),
    [
        (5, 0x87, "20 * 00 87 v 1f s'no' ;"),
        (5, 0x9C, "20 * 00 9c v 1f s'no' ;"),
        (4, 0x87, "20 02 00 05"),
        (4, 0x86, "20 02 00 04"),
        (4, 0x85, "20 02 00 02"),
        (4, 0x89, "20 02 00 03"),
        (4, 0x8C, ""),  # no return code fits: close only
    ],
)
def test_refuse(version: int, code: int, answer: str) -> None:
    connection = new()
    say(connection, CONNECTS[version])
    connection.send_disconnect(code, "no")
    assert connection.closing
    assert connection.data_to_send() == wire(answer)
    assert say(connection, "c0 00") == []


@pytest.mark.clause("MQTT-3.1.0-1")
@pytest.mark.parametrize("first", ["30 * s't' 00", "c0 00", "e0 00", "00 00", "f0 00", "20 03 000000"])
def test_connect_comes_first(first: str) -> None:
    connection = new()
    assert failed(say(connection, first)) == "0x82"
    assert ended_by(connection) is None


@pytest.mark.clause("MQTT-3.1.0-2")
@pytest.mark.parametrize("version", [5, 4])
def test_connect_comes_once(version: int) -> None:
    connection = opened(version)
    assert failed(say(connection, CONNECTS[version])) == "0x82"
    assert ended_by(connection) == ((0xE0, 0x82) if version == 5 else None)


@pytest.mark.clause("MQTT-3.1.2-2")
@pytest.mark.clause("MQTT-3.1.4-1")
@pytest.mark.clause("MQTT-4.13.1-1")
@pytest.mark.parametrize(
    ("connect", "code", "answer"),
    [
        ("10 * s'MQTT' 06 02 000a 00 s'p'", "0x84", (0x20, 0x84)),
        ("10 * s'MQTT' 03 02 000a s'p'", "0x84", (0x20, 0x01)),
        ("10 * s'MQTT' 83 02 000a s'p'", "0x84", (0x20, 0x01)),
        ("10 * s'MQTT' 85 02 000a 00 s'p'", "0x84", (0x20, 0x01)),
        ("10 * s'MQIsdp' 84 02 000a s'p'", "0x84", (0x20, 0x01)),
        ("10 * s'MQTT' 80 02 000a s'p'", "0x84", (0x20, 0x01)),
        ("10 * s'MQTT' 05 03 000a 00 s'p'", "0x81", (0x20, 0x81)),
        ("10 * s'MQTT' 05 02 000a v 21 0000 ; s'p'", "0x82", (0x20, 0x82)),
        ("10 * s'MQTT' 05 02 000a 00 0001 ff", "0x85", (0x20, 0x85)),
        ("10 * s'MQTT' 04 00 000a s''", "0x85", (0x20, 0x02)),
        ("10 * s'MQTT' 04 03 000a s'p'", "0x81", None),
        ("10 * s'HTTP' 04 02 000a s'p'", "0x81", None),
        ("10 * 'GET_/_HTTP/1.1'", "0x81", None),
    ],
)
def test_a_faulty_connect_is_answered_in_its_version(connect: str, code: str, answer: tuple[int, int] | None) -> None:
    connection = new()
    assert failed(say(connection, connect)) == code
    data = connection.data_to_send()
    assert ((data[0], data[3]) if data else None) == answer
    assert connection.closing


def test_a_connect_says_everything() -> None:
    connection = new()
    (event,) = say(connection, "10 * s'MQTT' 05 c6 ffff v 11 00000005 ; s'id' v 18 00000007 ; s'w' s'gone' s'u' s'p'")
    assert event.username == "u"
    assert event.password == b"p"
    assert event.will.topic == "w"
    assert event.will.properties.will_delay_interval == 7
    assert event.properties.session_expiry_interval == 5
    assert event.keep_alive == 65_535
    assert connection.connect is not None
    assert connection.connect.will == event.will


@pytest.mark.parametrize(("name", "level"), [("MQTT", 4), ("MQIsdp", 3)])
def test_a_bridge_marks_itself_and_gets_the_options_that_it_cannot_ask_for(name: str, level: int) -> None:
    connection = new()
    (event,) = say(connection, f"10 * s'{name}' {level | 0x80:02x} 02 000a s'p'")
    assert (event.version, event.bridge) == (Version(level), True)
    connection.accept()
    assert connection.data_to_send() == wire("20 02 00 00")
    (subscribe,) = say(connection, "82 * 0001 s'a' 01 s'$share/g/b' 02")
    assert subscribe.subscriptions == (
        Subscription("a", 1, no_local=True, retain_as_published=True),
        Subscription("$share/g/b", 2, no_local=False, retain_as_published=True),
    )


def test_a_connection_without_room_for_connack_is_not_opened() -> None:
    connection = new()
    say(connection, "10 * s'MQTT' 05 02 000a v 27 00000002 ; s'p'")
    assert failed(connection.accept()) == "0x95"
    assert connection.data_to_send() == b""  # [MQTT-3.1.2-24]


def test_connack_leaves_out_what_the_client_can_do_without() -> None:
    connection = new()
    say(connection, "10 * s'MQTT' 05 02 000a v 27 00000012 ; s'p'")
    announced = Properties(
        receive_maximum=9, topic_alias_maximum=9, reason_string="well", user_properties=(("k", "v"),)
    )
    assert connection.accept(properties=announced) == []
    assert connection.data_to_send() == wire("20 * 00 00 v 21 0009 27 00200000 ;")
    assert failed(say(connection, "30 * s't' v 23 0001 ;")) == "0x94"  # what was not said is not so


# sent ahead of CONNACK


def test_what_is_sent_ahead_waits_for_accept() -> None:
    connection = new()
    events = say(connection, CONNECT_5, "32 * s't' 0001 00 'x'", "c0 00")
    assert [type(one) for one in events] == [packets.Connect]
    assert say(connection, "30 * s't' 00 'y'") == []
    later = connection.accept(properties=Properties(receive_maximum=1))
    assert [one.payload for one in later] == [b"x", b"y"]
    assert connection.data_to_send().endswith(b"\xd0\x00")


@pytest.mark.clause("MQTT-3.1.4-6")
def test_what_is_sent_ahead_of_a_refusal_is_not_processed() -> None:
    connection = new()
    say(connection, CONNECT_5, "30 * s't' 00 'x'", "10 00")
    connection.send_disconnect(0x87)
    assert ended_by(connection) == (0x20, 0x87)
    assert connection.receive_data(b"\xc0\x00") == []


def test_what_is_sent_ahead_is_held_to_what_connack_announces() -> None:
    connection = new()
    say(connection, CONNECT_5, "34 * s't' 0001 00")
    assert failed(connection.accept(properties=Properties(maximum_qos=1))) == "0x9B"


def test_what_is_sent_ahead_is_bounded() -> None:
    connection = new(PacketLimits(max_held_bytes=10))
    say(connection, CONNECT_5)
    assert connection.receive_data(b"x" * 10) == []
    assert failed(connection.receive_data(b"x")) == "0x97"
    assert ended_by(connection) == (0x20, 0x97)


def test_a_close_sent_ahead_is_heard_and_so_is_the_end() -> None:
    connection = new()
    say(connection, CONNECT_5, "30 * s't' 00", "e0 00")
    assert connection.receive_eof() == []
    assert [type(one) for one in connection.accept()] == [packets.Publish, packets.Disconnect]
    connection = new()
    say(connection, CONNECT_5, "30 * s't' 00")
    assert connection.receive_eof() == []
    assert [type(one) for one in connection.accept()] == [packets.Publish, ConnectionFailed]


# time


@pytest.mark.clause("MQTT-3.1.2-22")
@pytest.mark.parametrize("version", [5, 4])
def test_keep_alive_is_one_and_a_half_times(version: int) -> None:
    connection = opened(version)
    assert connection.next_deadline() == 115.0
    assert connection.tick(114.9) == []
    say(connection, "c0 00")
    assert connection.next_deadline() == 129.9
    assert connection.tick(129.8) == []
    connection.data_to_send()
    assert failed(connection.tick(129.9)) == "0x8D"
    assert ended_by(connection) == ((0xE0, 0x8D) if version == 5 else None)


def test_half_a_packet_is_no_sign_of_life() -> None:
    connection = opened()
    connection.tick(110.0)
    connection.receive_data(b"\xc0")
    assert connection.next_deadline() == 115.0
    connection.receive_data(b"\x00")
    assert connection.next_deadline() == 125.0


@pytest.mark.clause("MQTT-3.2.2-21")
def test_the_server_s_keep_alive_counts() -> None:
    connection = opened(announced=Properties(server_keep_alive=60))
    assert connection.next_deadline() == 190.0
    connection = opened(4, announced=Properties(server_keep_alive=60))
    assert connection.next_deadline() == 115.0  # 3.1.1 was not told


def test_no_keep_alive_no_deadline() -> None:
    connection = opened(connect="10 * s'MQTT' 05 02 0000 00 s'me'")
    assert connection.next_deadline() is None
    assert connection.tick(1e9) == []


def test_silence_is_not_judged_while_nobody_reads() -> None:
    connection = opened()
    connection.suspend_keepalive()
    assert connection.next_deadline() is None
    assert connection.tick(500.0) == []
    connection.resume_keepalive(500.0)
    assert connection.next_deadline() == 515.0


def test_connect_has_its_time() -> None:
    connection = new(PacketLimits(connect_timeout_s=5.0))
    assert connection.next_deadline() == 105.0
    connection.receive_data(wire(CONNECT_5)[:-1])
    assert connection.next_deadline() == 105.0
    assert failed(connection.tick(105.0)) == ""
    assert ended_by(connection) is None


def test_our_own_thinking_is_not_the_client_s_silence() -> None:
    connection = new()
    say(connection, CONNECT_5)
    assert connection.next_deadline() is None
    connection.tick(200.0)
    connection.accept()
    assert connection.next_deadline() == 215.0


# messages in


def test_publish_at_each_qos() -> None:
    connection = opened()
    events = say(connection, "30 * s'a' 00 'x'", "33 * s'b' 0001 00 'y'", "3c * s'c' 0002 00", "30 * s'a' 00")
    assert events == [
        packets.Publish("a", b"x"),
        packets.Publish("b", b"y", 1, retain=True, packet_id=1),
        packets.Publish("c", b"", 2, dup=True, packet_id=2),
        packets.Publish("a", b""),
    ]
    assert connection.inbound.used == 2
    connection.send_puback(1)
    connection.send_pubrec(2)
    assert connection.inbound.used == 1
    assert say(connection, "62 02 0002") == [packets.Pubrel(2)]
    connection.send_pubcomp(2)
    assert connection.inbound.used == 0
    assert connection.data_to_send() == bytes.fromhex("40020001 50020002 70020002")


@pytest.mark.clause("MQTT-3.3.4-7")
def test_receive_maximum_is_enforced() -> None:
    connection = opened(announced=Properties(receive_maximum=2))
    assert len(say(connection, "32 * s't' 0001 00", "34 * s't' 0002 00", "30 * s't' 00")) == 3
    events = say(connection, "32 * s't' 0003 00")
    assert failed(events) == "0x93"
    assert len(events) == 1
    assert ended_by(connection) == (0xE0, 0x93)


def test_an_acknowledgement_makes_room() -> None:
    connection = opened(announced=Properties(receive_maximum=1))
    for number in range(1, 5):
        assert len(say(connection, f"32 * s't' {number:04x} 00")) == 1
        connection.send_puback(number, 0x10 if number % 2 else 0x97, "why")
    say(connection, "34 * s't' 0001 00")
    connection.send_pubrec(1, 0x97)  # a refused QoS 2 message is over [MQTT-4.3.3-9]
    say(connection, "34 * s't' 0001 00")
    connection.send_pubrec(1)
    assert len(say(connection, "34 * s't' 0001 00")) == 1  # the same one again is not a second one
    assert failed(say(connection, "34 * s't' 0002 00")) == "0x93"


@pytest.mark.parametrize(("version", "limits"), [(5, PacketLimits(enforce_receive_maximum=False)), (4, PacketLimits())])
def test_receive_maximum_is_tolerated(version: int, limits: PacketLimits) -> None:
    connection = opened(version, Properties(receive_maximum=1), limits)
    none = "00" if version == 5 else ""
    assert len(say(connection, *(f"32 * s't' {number:04x} {none}" for number in range(1, 50)))) == 49
    connection.send_pubacks(range(1, 50))
    assert connection.inbound.used == 0


def test_pubacks_in_one_go_are_those_one_by_one() -> None:
    one, many = opened(), opened()
    ids = [1, 255, 256, 0xFFFF]
    for connection in (one, many):
        say(connection, *(f"32 * s't' {number:04x} 00" for number in ids))
    for number in ids:
        one.send_puback(number)
    many.send_pubacks(ids)
    assert one.data_to_send() == many.data_to_send() == bytes.fromhex("40020001 400200ff 40020100 4002ffff")


def test_topic_aliases() -> None:
    connection = opened(announced=Properties(topic_alias_maximum=2))
    events = say(
        connection,
        "30 * s'a' v 23 0001 ;",
        "30 * s'' v 23 0001 ;",
        "30 * s'b' v 23 0001 ;",
        "30 * s'' v 23 0001 ;",
        "30 * s'c' v 23 0002 ;",
    )
    assert [one.topic for one in events] == ["a", "a", "b", "b", "c"]


@pytest.mark.clause("MQTT-3.3.2-9")
@pytest.mark.clause("MQTT-3.3.2-8")
@pytest.mark.parametrize(
    ("publish", "code"),
    [
        ("30 * s't' v 23 0003 ;", "0x94"),
        ("30 * s't' v 23 0000 ;", "0x94"),
        ("30 * s'' v 23 0001 ;", "0x82"),
        ("30 * s'' 00", "0x82"),
        ("30 * s'' v 01 01 ;", "0x82"),
    ],
)
def test_topic_aliases_that_stand_for_nothing(publish: str, code: str) -> None:
    connection = opened(announced=Properties(topic_alias_maximum=2))
    assert failed(say(connection, publish)) == code
    assert ended_by(connection) == (0xE0, int(code, 16))


def test_no_alias_without_leave() -> None:
    assert failed(say(opened(), "30 * s't' v 23 0001 ;")) == "0x94"


@pytest.mark.clause("MQTT-3.3.4-6")
def test_no_subscription_identifier_from_a_client() -> None:
    assert failed(say(opened(), "30 * s't' v 0b 01 ;")) == "0x82"


@pytest.mark.parametrize("version", [5, 4])
@pytest.mark.parametrize(
    ("announced", "packet", "code"),
    [
        pytest.param(Properties(maximum_qos=1), "34 * s't' 0001 {}", 0x9B, marks=pytest.mark.clause("MQTT-3.2.2-11")),
        pytest.param(Properties(maximum_qos=0), "32 * s't' 0001 {}", 0x9B, marks=pytest.mark.clause("MQTT-3.2.2-11")),
        pytest.param(Properties(retain_available=0), "31 * s't' {}", 0x9A, marks=pytest.mark.clause("MQTT-3.2.2-14")),
        pytest.param(
            Properties(maximum_packet_size=20), "30 * s't' {} 'twenty_bytes_and_one'", 0x95,
            marks=pytest.mark.clause("MQTT-3.2.2-15"),
        ),
    ],
)  # fmt: skip
def test_what_connack_announced_is_enforced(version: int, announced: Properties, packet: str, code: int) -> None:
    connection = opened(version, announced)
    none = "00" if version == 5 else ""
    assert len(say(connection, f"30 * s't' {none}")) == 1
    assert failed(say(connection, packet.format(none))) == f"0x{code:02X}"
    assert ended_by(connection) == ((0xE0, code) if version == 5 else None)


@pytest.mark.parametrize(
    ("announced", "subscribe", "code"),
    [
        (Properties(shared_subscription_available=0), "82 * 0001 00 s'$share/g/t' 00", 0x9E),
        (Properties(wildcard_subscription_available=0), "82 * 0001 00 s't/#' 00", 0xA2),
        (Properties(subscription_identifier_available=0), "82 * 0001 v 0b 01 ; s't' 00", 0xA1),
    ],
)
def test_subscriptions_that_are_not_available(announced: Properties, subscribe: str, code: int) -> None:
    connection = opened(announced=announced)
    assert len(say(connection, "82 * 0001 00 s't' 02")) == 1
    assert failed(say(connection, subscribe)) == f"0x{code:02X}"
    assert ended_by(connection) == (0xE0, code)
    assert len(say(opened(), subscribe)) == 1


def test_size_is_judged_before_the_body() -> None:
    connection = new(PacketLimits(max_connect_bytes=100))
    assert failed(connection.receive_data(bytes.fromhex("10ff01"))) == "0x95"
    connection = opened(limits=PacketLimits(max_packet_bytes=1000))
    assert failed(connection.receive_data(bytes.fromhex("30e907"))) == "0x95"
    connection = opened(limits=PacketLimits(max_packet_bytes=1000))
    assert connection.receive_data(bytes.fromhex("30e507")) == []


@pytest.mark.parametrize("header", ["30ffffffff", "3080808080", "c0ffffffff7f"])
def test_a_remaining_length_of_five_bytes(header: str) -> None:
    connection = opened()
    assert failed(connection.receive_data(bytes.fromhex(header))) == "0x81"


@pytest.mark.clause("MQTT-1.5.5-1")
def test_an_overlong_remaining_length_is_malformed_in_5_and_nothing_in_3() -> None:
    assert failed(opened().receive_data(b"\xc0\x80\x00")) == "0x81"
    connection = opened(4)
    assert connection.receive_data(b"\xc0\x80\x00") == []
    assert connection.data_to_send() == b"\xd0\x00"


def test_nothing_after_a_fault_is_parsed() -> None:
    connection = opened()
    events = say(connection, "30 * s't' 00", "36 * s't' 00", "30 * s't' 00", "c0 00")
    assert [type(one) for one in events] == [packets.Publish, ConnectionFailed]
    assert ended_by(connection) == (0xE0, 0x81)
    assert say(connection, "30 * s't' 00") == []
    assert connection.receive_eof() == []
    assert connection.tick(1e9) == []
    assert connection.data_to_send() == b""


def test_more_topics_than_the_cache_holds() -> None:
    connection = opened()
    for number in range(3000):
        (event,) = say(connection, f"30 * s't/{number}' 00")
        assert event.topic == f"t/{number}"


# other packets in


@pytest.mark.clause("MQTT-3.12.4-1")
@pytest.mark.parametrize("version", [5, 4, 3])
def test_ping(version: int) -> None:
    connection = opened(version)
    assert say(connection, "c0 00") == []
    assert connection.data_to_send() == b"\xd0\x00"


@pytest.mark.clause("MQTT-3.8.4-2")
@pytest.mark.clause("MQTT-3.10.4-4")
def test_subscribe_and_unsubscribe() -> None:
    connection = opened()
    assert say(connection, "82 * 0007 00 s'a/#' 01 s'b' 2c") == [
        packets.Subscribe(7, (Subscription("a/#", 1), Subscription("b", 0, True, True, 2)))
    ]
    connection.send_suback(7, [1, 0x87], Properties(reason_string="no"))
    assert connection.data_to_send() == wire("90 * 0007 v 1f s'no' ; 01 87")
    assert say(connection, "a2 * 0008 00 s'a/#' s'c'") == [packets.Unsubscribe(8, ("a/#", "c"))]
    connection.send_unsuback(8, [0, 0x11])
    assert connection.data_to_send() == wire("b0 * 0008 00 00 11")


def test_subscribe_in_311() -> None:
    connection = opened(4)
    assert say(connection, "82 * 0007 s'a/#' 01") == [packets.Subscribe(7, (Subscription("a/#", 1),))]
    connection.send_suback(7, [0x87])
    connection.send_unsuback(8, [0])
    assert connection.data_to_send() == bytes.fromhex("9003000780 b0020008")


@pytest.mark.parametrize("version", [5, 4])
def test_disconnect(version: int) -> None:
    connection = opened(version)
    events = say(connection, "30 * s't' 00", "e0 00", "30 * s't' 00")
    assert [type(one) for one in events] == [packets.Publish, packets.Disconnect]
    assert say(connection, "c0 00") == connection.receive_eof() == []
    assert connection.next_deadline() is None
    assert connection.data_to_send() == b""
    assert not connection.closing
    connection.finish()
    assert connection.closing
    assert connection.data_to_send() == b""
    assert connection.receive_eof() == []


@pytest.mark.parametrize("version", [5, 4])
def test_what_was_asked_before_disconnect_is_answered(version: int) -> None:
    connection = opened(version)
    properties = "00" if version == 5 else ""
    events = say(connection, f"82 * 0007 {properties} s'a' 00", f"a2 * 0008 {properties} s'a'", "e0 00")
    assert [type(one) for one in events] == [packets.Subscribe, packets.Unsubscribe, packets.Disconnect]
    connection.send_suback(7, [0])
    connection.send_unsuback(8, [0])
    connection.finish()
    connection.send_suback(9, [0])
    answers = ("90 * 0007 00 00", "b0 * 0008 00 00") if version == 5 else ("90 * 0007 00", "b0 * 0008")
    assert connection.data_to_send() == b"".join(map(wire, answers))


def test_disconnect_with_will_and_expiry() -> None:
    connection = opened(connect="10 * s'MQTT' 05 02 000a v 11 00000001 ; s'me'")
    (event,) = say(connection, "e0 * 04 v 11 00000009 ;")
    assert event.reason_code == 4
    assert event.properties.session_expiry_interval == 9


@pytest.mark.parametrize("packet", ["e0 * 00 v 11 00000001 ;", "e0 * 8b 00", "e0 * 00 v 1c s'o' ;"])
def test_a_disconnect_that_is_not_the_client_s(packet: str) -> None:
    connection = opened()
    assert failed(say(connection, packet)) == "0x82"
    assert ended_by(connection) == (0xE0, 0x82)


def test_an_end_without_a_close() -> None:
    for connection in (new(), opened(), opened(4)):
        assert failed(connection.receive_eof()) == ""
        assert connection.closing
        assert connection.data_to_send() == b""


# messages out


@pytest.mark.clause("MQTT-2.2.1-4")
@pytest.mark.clause("MQTT-3.3.4-9")
@pytest.mark.clause("MQTT-4.9.0-1")
def test_the_window_is_the_client_s_receive_maximum() -> None:
    connection = opened(connect="10 * s'MQTT' 05 02 000a v 21 0002 ; s'me'")
    assert send_publish(connection, "t", b"x", 1) == 1
    assert send_publish(connection, "t", b"y", 2) == 2
    assert connection.outbound.free == 0
    with pytest.raises(UsageError):
        send_publish(connection, "t", b"z", 1)
    assert send_publish(connection, "t", b"0") == 0  # QoS 0 needs no window [MQTT-4.9.0-3]
    assert connection.data_to_send() == wire("32 * s't' 0001 00 'x'") + wire("34 * s't' 0002 00 'y'") + wire(
        "30 * s't' 00 '0'"
    )
    assert say(connection, "40 02 0001") == [packets.Puback(1)]
    assert connection.outbound.free == 1
    assert send_publish(connection, "t", b"z", 1) == 3


def test_ours_is_the_smaller_one() -> None:
    assert opened(limits=PacketLimits(outgoing_inflight=5)).outbound.limit == 5
    assert opened(4).outbound.limit == 1000


@pytest.mark.clause("MQTT-4.3.3-4")
def test_qos_2_out() -> None:
    connection = opened()
    send_publish(connection, "t", b"x", 2)
    connection.data_to_send()
    assert say(connection, "50 02 0001") == [packets.Pubrec(1)]
    connection.send_pubrel(1)
    assert connection.data_to_send() == b"\x62\x02\x00\x01"
    assert connection.outbound.used == 1
    assert say(connection, "50 02 0001") == [packets.Pubrec(1)]
    assert say(connection, "70 02 0001") == [packets.Pubcomp(1)]
    assert connection.outbound.used == 0


def test_a_refused_qos_2_message_is_over() -> None:
    connection = opened()
    send_publish(connection, "t", b"x", 2)
    assert say(connection, "50 03 0001 87") == [packets.Pubrec(1, 0x87)]
    assert connection.outbound.used == 0
    send_publish(connection, "t", b"x", 2)
    assert say(connection, "50 02 0002", "50 03 0002 80") == [packets.Pubrec(2), packets.Pubrec(2, 0x80)]
    assert connection.outbound.used == 0


@pytest.mark.parametrize("version", [5, 4, 3])
def test_acknowledgements_of_every_kind_in_one_read(version: int) -> None:
    connection = opened(version)
    for _ in range(2):
        for qos in (1, 1, 2, 1):
            send_publish(connection, "t", b"", qos)
    connection.data_to_send()
    events = say(
        connection, "40 02 0001", "40 02 0002", "50 02 0003", "c0 00", "40 02 0004", "62 02 0009", "50 02 0007"
    )
    assert events == [
        packets.Puback(1), packets.Puback(2), packets.Pubrec(3), packets.Puback(4), packets.Pubrel(9),
        packets.Pubrec(7),
    ]  # fmt: skip
    assert connection.outbound.used == 5
    connection.send_pubrel(3)
    connection.send_pubrel(7)
    connection.send_pubcomp(9)
    assert connection.data_to_send() == bytes.fromhex("d000 62020003 62020007 70020009")
    events = say(connection, "70 02 0007", "40 02 0005", "40 02 0005", "70 02 0003", "40 02 0006", "62 02 0000")
    assert [type(one) for one in events[:-1]] == [packets.Pubcomp, packets.Puback, packets.Pubcomp, packets.Puback]
    assert failed(events) == "0x82"
    assert connection.outbound.used == 1


def test_topics_in_every_pattern() -> None:
    connection = opened(announced=Properties(receive_maximum=100))
    topics = "aaabbbabababababababababcaaaaaabbc"
    events = say(connection, *(f"32 * s'{topic}' {at + 1:04x} 00" for at, topic in enumerate(topics)))
    assert [(one.topic, one.packet_id) for one in events] == [(topic, at + 1) for at, topic in enumerate(topics)]
    assert connection.inbound.used == len(topics)


@pytest.mark.parametrize(
    ("qos", "answer"), [(1, "50 02 0001"), (1, "70 02 0001"), (2, "40 02 0001"), (2, "70 02 0001")]
)
def test_the_wrong_acknowledgement(qos: int, answer: str) -> None:
    connection = opened()
    send_publish(connection, "t", b"x", qos)
    connection.data_to_send()
    assert failed(say(connection, answer)) == "0x82"
    assert ended_by(connection) == (0xE0, 0x82)


@pytest.mark.parametrize("answer", ["40 02 0009", "40 03 0009 87", "70 02 0009", "50 03 0009 91"])
def test_an_acknowledgement_of_nothing_says_nothing(answer: str) -> None:
    connection = opened()
    assert say(connection, answer) == []
    assert not connection.closing


def test_a_message_is_sent_again_under_its_old_identifier() -> None:
    connection = opened()
    assert send_publish(connection, "t", b"x", 1, dup=True, packet_id=7) == 7
    assert connection.data_to_send() == wire("3a * s't' 0007 00 'x'")
    with pytest.raises(UsageError):
        send_publish(connection, "t", b"x", 1, packet_id=7)
    assert connection.outbound.used == 1
    assert say(connection, "40 02 0007") == [packets.Puback(7)]


def test_identifiers_go_round_and_miss_those_in_use() -> None:
    connection = opened(limits=PacketLimits(outgoing_inflight=65_535))
    send_publish(connection, "t", b"", 1, packet_id=3)
    taken = []
    for _ in range(65_540):
        packet_id = send_publish(connection, "t", b"", 1)
        assert packet_id
        taken.append(packet_id)
        connection.receive_data(b"\x40\x02" + packet_id.to_bytes(2))
        connection.data_to_send()
    assert taken[:4] == [1, 2, 4, 5]
    assert taken[65_533:65_536] == [65_535, 1, 2]
    assert 3 not in taken


@pytest.mark.clause("MQTT-3.1.2-24")
@pytest.mark.clause("MQTT-3.1.2-25")
def test_a_message_too_large_for_the_client_is_not_sent() -> None:
    connection = opened(connect="10 * s'MQTT' 05 02 000a v 27 00000014 ; s'me'")
    assert send_publish(connection, "t", b"x" * 12, 1) == 1  # 20 bytes
    assert send_publish(connection, "t", b"x" * 13, 1) is None
    assert send_publish(connection, "t", b"x" * 14) == 0
    assert send_publish(connection, "t", b"x" * 15) is None
    assert connection.outbound.used == 1
    assert len(connection.data_to_send()) == 40
    connection.send_suback(1, [0], Properties(reason_string="a long story"))
    assert connection.data_to_send() == bytes.fromhex("90 04 0001 00 00")  # [MQTT-3.9.2-1]
    assert failed(say(connection, "36 * s't' 00")) == "0x81"
    assert connection.data_to_send() == b"\xe0\x01\x81"  # [MQTT-3.14.2-3]: the reason string has no room


@pytest.mark.parametrize("size", [0, 100, 122, 123, 124, 125, 126, 16_380, 16_381, 2_097_160])
@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("version", [5, 4])
def test_every_size_of_header(size: int, qos: int, version: int) -> None:
    connection = opened(version)
    send_publish(connection, "t", b"x" * size, qos, retain=True)
    expected = wire(
        f"{0x31 | qos << 1:02x} * s't' {'0001' if qos else ''} {'00' if version == 5 else ''} {'78' * size}"
    )
    assert connection.data_to_send() == expected


def test_properties_out() -> None:
    connection = opened()
    send_publish(
        connection, "t", b"x", properties=Properties(subscription_identifiers=(1, 200), user_properties=(("k", "v"),))
    )
    assert connection.data_to_send() == wire("30 * s't' v 0b 01 0b c801 26 s'k' s'v' ; 'x'")
    connection = opened(4)
    send_publish(connection, "t", b"x", properties=Properties(content_type="lost"))
    assert connection.data_to_send() == wire("30 * s't' 'x'")


@pytest.mark.clause("MQTT-3.1.2-29")
def test_no_explanations_for_whom_wants_none() -> None:
    connection = opened(connect="10 * s'MQTT' 05 02 000a v 17 00 ; s'me'")
    say(connection, "32 * s't' 0001 00", "34 * s't' 0002 00")
    connection.send_puback(1, 0x97, "full")
    connection.send_pubrec(2, 0x97, "full")
    connection.send_suback(3, [0x80], Properties(reason_string="no", user_properties=(("k", "v"),)))
    assert connection.data_to_send() == bytes.fromhex("4003000197 5003000297 900400030080")
    connection.send_disconnect(0x98, "allowed here")
    assert connection.data_to_send() == wire("e0 * 98 v 1f s'allowed_here' ;")


def test_explanations() -> None:
    connection = opened()
    say(connection, "32 * s't' 0001 00")
    connection.send_puback(1, 0x97, "full")
    assert connection.data_to_send() == wire("40 * 0001 97 v 1f s'full' ;")


def test_a_refusal_that_311_cannot_say() -> None:
    connection = opened(4)
    say(connection, "32 * s't' 0001", "34 * s't' 0002", "32 * s't' 0003")
    with pytest.raises(UsageError):
        connection.send_puback(1, 0x97)
    with pytest.raises(UsageError):
        connection.send_pubrec(2, 0x97)
    connection.send_puback(3, 0x10)  # nobody listens: a success all the same
    connection.send_pubcomp(2, 0x92)
    assert connection.data_to_send() == bytes.fromhex("40020003 70020002")


# closes of ours


@pytest.mark.clause("MQTT-3.14.0-1")
def test_a_close_of_ours() -> None:
    connection = opened()
    connection.send_disconnect(0x8B, "restart", Properties(server_reference="other"))
    assert connection.data_to_send() == wire("e0 * 8b v 1c s'other' 1f s'restart' ;")
    assert connection.closing
    connection = new()
    say(connection, CONNECT_5)
    connection.send_disconnect(0x8B)
    assert ended_by(connection) == (0x20, 0x80)  # DISCONNECT only after a CONNACK of success; 0x8B is not CONNACK's
    connection = opened(4)
    connection.send_disconnect(0x8B)
    assert ended_by(connection) is None
    connection = new()
    connection.send_disconnect(0x8B)
    assert ended_by(connection) is None


def test_a_late_acknowledgement_is_not_said() -> None:
    connection = opened()
    say(connection, "32 * s't' 0001 00", "34 * s't' 0002 00", "e0 00")
    connection.finish()
    connection.send_puback(1)
    connection.send_pubacks([1])
    connection.send_pubrec(2)
    connection.send_pubcomp(2)
    connection.send_pubrel(5)
    connection.send_suback(3, [0])
    connection.send_unsuback(3, [0])
    connection.send_auth(0x18, Properties())
    connection.send_disconnect(0x80)
    connection.send_disconnect(0x80)
    assert connection.data_to_send() == b""
    with pytest.raises(UsageError):
        send_publish(connection, "t", b"")


def test_nothing_is_published_before_connect() -> None:
    with pytest.raises(UsageError):
        new().send_prepared(prepare_publish("t", b"", None, Version.V5))


# enhanced authentication

METHOD = "10 * s'MQTT' 05 02 000a v 15 s'M' 16 s'1' ; s'me'"


@pytest.mark.clause("MQTT-4.12.0-2")
@pytest.mark.clause("MQTT-4.12.0-5")
def test_enhanced_authentication() -> None:
    connection = new()
    (event,) = say(connection, METHOD)
    assert event.properties.authentication_method == "M"
    assert connection.state is State.AUTHENTICATING
    assert connection.next_deadline() == 110.0
    connection.send_auth(0x18, Properties(authentication_method="M", authentication_data=b"2"))
    assert connection.data_to_send() == wire("f0 * 18 v 15 s'M' 16 s'2' ;")
    assert say(connection, "f0 * 18 v 15 s'M' 16 s'3' ;") == [
        packets.Auth(0x18, Properties(authentication_method="M", authentication_data=b"3"))
    ]
    assert connection.accept(properties=Properties(authentication_method="M")) == []
    assert connection.is_open
    assert connection.data_to_send() == wire("20 * 00 00 v 15 s'M' 27 00200000 ;")


def authenticated() -> Connection:
    connection = new()
    say(connection, METHOD)
    connection.accept()
    connection.data_to_send()
    return connection


@pytest.mark.clause("MQTT-4.12.1-1")
def test_authentication_again() -> None:
    connection = authenticated()
    for _ in range(2):
        assert [type(one) for one in say(connection, "f0 * 19 v 15 s'M' ;")] == [packets.Auth]
        connection.send_auth(0x18, Properties(authentication_data=b"2"))
        assert connection.data_to_send() == wire("f0 * 18 v 15 s'M' 16 s'2' ;")
        assert [type(one) for one in say(connection, "30 * s't' 00", "f0 * 18 v 15 s'M' ;")] == [
            packets.Publish, packets.Auth,
        ]  # fmt: skip
        connection.send_auth(0x00)
        assert connection.data_to_send() == wire("f0 * 00 v 15 s'M' ;")


@pytest.mark.clause("MQTT-4.12.1-1")
@pytest.mark.parametrize(
    "packets",
    [
        ("f0 * 19 v 15 s'N' ;",),
        ("f0 00",),
        ("f0 * 18 v 15 s'M' ;",),  # nobody asked
        ("f0 * 19 v 15 s'M' ;", "f0 * 19 v 15 s'M' ;"),  # not answered yet
        ("f0 * 19 v 15 s'M' ;", "f0 * 18 v 15 s'M' ;"),
    ],
)
def test_auth_out_of_turn(packets: tuple[str, ...]) -> None:
    connection = authenticated()
    assert failed(say(connection, *packets)) == "0x82"
    assert ended_by(connection) == (0xE0, 0x82)


def test_our_auth_out_of_turn() -> None:
    connection = authenticated()
    with pytest.raises(UsageError):
        connection.send_auth(0x18)
    connection = new()
    say(connection, METHOD)
    with pytest.raises(UsageError):
        connection.send_auth(0x00)  # CONNACK says that
    connection.send_auth(0x18)
    with pytest.raises(UsageError):
        connection.send_auth(0x18)
    with pytest.raises(UsageError):
        connection.accept(properties=Properties(authentication_method="N"))


@pytest.mark.clause("MQTT-4.12.0-6")
def test_no_method_for_whom_named_none() -> None:
    connection = new()
    say(connection, CONNECT_5)
    with pytest.raises(UsageError):
        connection.accept(properties=Properties(authentication_method="M"))


@pytest.mark.clause("MQTT-3.1.2-22")
def test_keep_alive_counts_while_the_client_is_to_answer() -> None:
    connection = new(PacketLimits(connect_timeout_s=20.0))
    say(connection, "10 * s'MQTT' 05 02 0002 v 15 s'M' ; s'me'")
    assert connection.next_deadline() == 120.0  # ours to answer
    connection.tick(110.0)
    connection.send_auth(0x18)
    assert connection.next_deadline() == 113.0
    connection.tick(112.0)
    say(connection, "f0 * 18 v 15 s'M' ;")
    assert connection.next_deadline() == 120.0
    connection.tick(114.0)
    connection.send_auth(0x18)
    assert failed(connection.tick(117.0)) == "0x87"


@pytest.mark.clause("MQTT-3.1.2-30")
@pytest.mark.clause("MQTT-4.12.0-3")
@pytest.mark.parametrize(
    "packet",
    ["30 * s't' 00", "c0 00", "f0 * 18 v 15 s'N' ;", "f0 * 19 v 15 s'M' ;", "f0 00", "f0 * 00 v 15 s'M' ;", METHOD],
)
@pytest.mark.parametrize("asked", [True, False])
def test_only_auth_may_follow(packet: str, asked: bool) -> None:
    connection = new()
    say(connection, METHOD)
    if asked:
        connection.send_auth(0x18)
        connection.data_to_send()
    assert failed(say(connection, packet)) == "0x82"
    assert ended_by(connection) == (0x20, 0x82)


def test_authentication_has_its_time() -> None:
    connection = new()
    say(connection, METHOD)
    assert failed(connection.tick(110.0)) == "0x87"
    assert ended_by(connection) == (0x20, 0x87)


@pytest.mark.clause("MQTT-4.12.0-6")
@pytest.mark.clause("MQTT-4.12.0-7")
def test_no_auth_without_a_method() -> None:
    connection = opened()
    with pytest.raises(UsageError):
        connection.send_auth(0x18, Properties())
    assert failed(say(connection, "f0 00")) == "0x82"


def test_311_knows_no_auth() -> None:
    connection = opened(4)
    events: list[Any] = say(connection, "f0 00")
    assert failed(events) == "0x82"
    assert ended_by(connection) is None
