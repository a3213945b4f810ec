"""Messages and their acknowledgements on a single connection: sections 3.3 to 3.7, 4.3 and 4.9."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from protocols.connection import ConnectionFailed
from protocols.errors import UsageError
from protocols.mqtt import packets
from protocols.mqtt.connection import Connection
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties
from tests.protocols.mqtt.client import CONNECTS, ended_by, failed, new, opened, say, send_publish
from tests.protocols.mqtt.wire import wire
from tests.support.mqtt_packets import encode_packet

BOTH = pytest.mark.parametrize("version", [5, 4], ids=["5.0", "3.1.1"])
WINDOW_OF_2 = "10 * s'MQTT' 05 02 000a v 21 0002 ; s'me'"


def none(version: int) -> str:
    return "00" if version == 5 else ""


# the client's messages


@pytest.mark.clause("MQTT-3.3.1-2", "MQTT311-3.3.1-2", "MQTT-3.3.1-4", "MQTT311-3.3.1-4", "MQTT-4.3.1-1")
@BOTH
@pytest.mark.parametrize("flags", range(16))
def test_publish_flags_are_valid_or_refused(version: int, flags: int) -> None:
    """QoS 3, and DUP at QoS 0, are errors; all other combinations are accepted."""
    dup, qos, retain = flags >> 3, flags >> 1 & 3, flags & 1
    connection = opened(version)
    events = say(connection, f"{0x30 | flags:02x} * s't' {'0001' if qos else ''} {none(version)} 'x'")
    if qos == 3 or (dup and not qos):
        assert failed(events) == "0x81"
        assert ended_by(connection) == ((0xE0, 0x81) if version == 5 else None)
        return
    assert events == [packets.Publish("t", b"x", qos, bool(retain), bool(dup), 1 if qos else 0)]


@pytest.mark.clause("MQTT-3.3.1-2", "MQTT311-3.3.1-2")
@BOTH
def test_the_gateway_s_qos_0_messages_have_no_dup(version: int) -> None:
    connection = opened(version)
    send_publish(connection, "t", b"x", retain=True)
    assert connection.data_to_send()[0] == 0x31


@pytest.mark.clause("MQTT-3.3.4-1", "MQTT311-3.3.4-1", "MQTT-4.3.2-4", "MQTT-4.3.3-8", "MQTT-4.3.3-11")
@BOTH
def test_each_qos_has_its_answer(version: int) -> None:
    connection = opened(version)
    texts = ["30 * s't' {}", "32 * s't' 0001 {}", "34 * s't' 0002 {}"]
    assert len(say(connection, *(text.format(none(version)) for text in texts))) == 3
    assert connection.data_to_send() == b""  # nothing until the session has stored them
    connection.send_puback(1)
    assert connection.data_to_send() == bytes.fromhex("40020001")
    connection.send_pubrec(2)
    assert connection.data_to_send() == bytes.fromhex("50020002")
    assert say(connection, "62 02 0002") == [packets.Pubrel(2)]
    connection.send_pubcomp(2)
    assert connection.data_to_send() == bytes.fromhex("70020002")


@pytest.mark.clause("MQTT-4.3.2-5", "MQTT311-4.3.2-2")
@BOTH
@pytest.mark.parametrize("dup", [0, 8])
def test_after_puback_the_same_identifier_is_a_new_message(version: int, dup: int) -> None:
    connection = opened(version, Properties(receive_maximum=1))
    for payload in ("one", "two", "three"):
        (event,) = say(connection, f"{0x32 | dup:02x} * s't' 0001 {none(version)} '{payload}'")
        assert (event.payload, event.dup) == (payload.encode(), bool(dup))
        connection.send_puback(1)
    assert connection.data_to_send() == bytes.fromhex("40020001") * 3


@pytest.mark.clause("MQTT-4.3.3-9")
def test_after_a_pubrec_of_failure_the_same_identifier_is_a_new_message() -> None:
    connection = opened(announced=Properties(receive_maximum=1))
    for payload in ("one", "two"):
        (event,) = say(connection, f"34 * s't' 0001 00 '{payload}'")
        assert event.payload == payload.encode()
        connection.send_pubrec(1, 0x97)
    (event,) = say(connection, "32 * s't' 0002 00")  # the window has room again too
    assert event.packet_id == 2


@pytest.mark.clause("MQTT-4.3.3-12", "MQTT311-4.3.3-2")
@BOTH
def test_after_pubcomp_the_same_identifier_is_a_new_message(version: int) -> None:
    connection = opened(version, Properties(receive_maximum=1))
    for payload in ("one", "two"):
        (event,) = say(connection, f"34 * s't' 0001 {none(version)} '{payload}'")
        assert event.payload == payload.encode()
        connection.send_pubrec(1)
        say(connection, "62 02 0001")
        connection.send_pubcomp(1)
    assert connection.data_to_send() == bytes.fromhex("50020001 70020001") * 2
    assert connection.inbound.used == 0


@pytest.mark.clause("MQTT-3.3.4-7")
def test_more_messages_than_receive_maximum_end_the_connection() -> None:
    connection = opened(announced=Properties(receive_maximum=2))
    assert len(say(connection, "32 * s't' 0001 00", "34 * s't' 0002 00")) == 2
    connection.send_pubrec(2)  # success: the message is still in flight
    say(connection, "62 02 0002")
    connection.send_pubcomp(2)
    assert len(say(connection, "34 * s't' 0003 00")) == 1
    assert failed(say(connection, "32 * s't' 0004 00")) == "0x93"


@pytest.mark.clause("MQTT-3.3.2-12", "MQTT-3.3.2-9", "MQTT-3.2.2-17")
def test_aliases_up_to_the_maximum_are_accepted() -> None:
    connection = opened(announced=Properties(topic_alias_maximum=300))
    for alias in range(1, 301):
        (event,) = say(connection, f"30 * s't/{alias}' v 23 {alias:04x} ;")
        assert event.topic == f"t/{alias}"
    for alias in range(1, 301):
        (event,) = say(connection, f"30 * s'' v 23 {alias:04x} ;")
        assert event.topic == f"t/{alias}"
    assert failed(say(connection, "30 * s't' v 23 012d ;")) == "0x94"


@pytest.mark.clause("MQTT-3.2.2-18")
@pytest.mark.parametrize("announced", [Properties(), Properties(topic_alias_maximum=0)])
def test_an_alias_without_an_announced_maximum_is_refused(announced: Properties) -> None:
    assert failed(say(opened(announced=announced), "30 * s't' v 23 0001 ;")) == "0x94"


@pytest.mark.clause("MQTT-3.3.2-7")
def test_an_alias_ends_with_its_connection() -> None:
    announced = Properties(topic_alias_maximum=5)
    first = opened(announced=announced)
    assert [one.topic for one in say(first, "30 * s't' v 23 0001 ;", "30 * s'' v 23 0001 ;")] == ["t", "t"]
    assert failed(say(opened(announced=announced), "30 * s'' v 23 0001 ;")) == "0x82"


@pytest.mark.clause("MQTT-3.3.2-8")
def test_alias_0_is_refused() -> None:
    connection = opened(announced=Properties(topic_alias_maximum=5))
    assert failed(say(connection, "30 * s't' v 23 0000 ;")) == "0x94"


@pytest.mark.clause("MQTT-3.3.2-14")
@pytest.mark.parametrize("topic", ["#", "a/+", "a/#"])
def test_no_wildcard_in_a_response_topic(topic: str) -> None:
    assert failed(say(opened(), f"30 * s't' v 08 s'{topic}' ;")) == "0x82"
    will = f"10 * s'MQTT' 05 06 000a 00 s'a' v 08 s'{topic}' ; s'w' s'm'"
    assert failed(say(new(), will)) == "0x82"


# the gateway's messages


@pytest.mark.clause("MQTT-4.3.2-3", "MQTT311-4.3.2-1")
@BOTH
def test_a_qos_1_message_is_unacknowledged_until_puback(version: int) -> None:
    connection = opened(version)
    assert send_publish(connection, "t", b"x", 1) == 1
    assert say(connection, "c0 00", "40 02 0002") == []  # a PUBACK for another identifier
    assert connection.outbound.used == 1
    assert say(connection, "40 02 0001") == [packets.Puback(1)]
    assert connection.outbound.used == 0
    assert say(connection, "40 02 0001") == []


@pytest.mark.clause("MQTT-4.3.3-3", "MQTT-4.3.3-4", "MQTT-4.3.3-5", "MQTT-4.3.3-6", "MQTT311-4.3.3-1")
@BOTH
def test_a_qos_2_message_is_unacknowledged_until_pubrec_and_its_release_until_pubcomp(version: int) -> None:
    connection = opened(version)
    assert send_publish(connection, "t", b"x", 2) == 1
    connection.data_to_send()
    assert connection.outbound.used == 1
    assert say(connection, "50 02 0001") == [packets.Pubrec(1)]
    connection.send_pubrel(1)
    assert connection.data_to_send() == bytes.fromhex("62020001")
    assert connection.outbound.used == 1
    with pytest.raises(UsageError):  # the PUBLISH cannot be sent again
        send_publish(connection, "t", b"x", 2, dup=True, packet_id=1)
    assert say(connection, "50 02 0001") == [packets.Pubrec(1)]
    connection.send_pubrel(1)
    assert connection.data_to_send() == bytes.fromhex("62020001")
    assert say(connection, "70 02 0001") == [packets.Pubcomp(1)]
    assert connection.outbound.used == 0


@pytest.mark.clause("MQTT-4.4.0-2")
@pytest.mark.parametrize(("qos", "answer"), [(1, "40 03 0001 87"), (2, "50 03 0001 87")])
def test_a_message_that_the_client_refuses_is_acknowledged(qos: int, answer: str) -> None:
    connection = opened()
    send_publish(connection, "t", b"x", qos)
    (event,) = say(connection, answer)
    assert event.reason_code == 0x87
    assert connection.outbound.used == 0
    connection.data_to_send()
    send_publish(connection, "t", b"y", qos)
    assert b"x" not in connection.data_to_send()


@pytest.mark.clause("MQTT-3.3.1-1", "MQTT311-3.3.1-1")
@BOTH
@pytest.mark.parametrize("qos", [1, 2])
def test_a_resent_message_has_dup(version: int, qos: int) -> None:
    connection = opened(version)
    assert send_publish(connection, "t", b"x", qos, dup=True, packet_id=9) == 9
    assert connection.data_to_send() == wire(f"{0x38 | qos << 1:02x} * s't' 0009 {none(version)} 'x'")


@pytest.mark.clause("MQTT-3.3.4-9", "MQTT-4.9.0-1", "MQTT-4.9.0-2")
def test_the_client_s_receive_maximum_limits_deliveries() -> None:
    connection = opened(connect=WINDOW_OF_2)
    send_publish(connection, "t", b"", 1)
    send_publish(connection, "t", b"", 2)
    for qos in (1, 2):
        with pytest.raises(UsageError):
            send_publish(connection, "t", b"", qos)
    say(connection, "50 02 0002")  # success: it stays in the window until PUBCOMP
    with pytest.raises(UsageError):
        send_publish(connection, "t", b"", 1)
    connection.send_pubrel(2)
    say(connection, "70 02 0002")
    assert send_publish(connection, "t", b"", 1) == 3
    say(connection, "40 03 0001 80")
    assert send_publish(connection, "t", b"", 2) == 4
    say(connection, "50 03 0004 80")  # failure: it leaves the window
    assert send_publish(connection, "t", b"", 1) == 5


@pytest.mark.clause("MQTT-3.3.4-10", "MQTT-4.9.0-3")
def test_nothing_else_waits_for_the_client_s_receive_maximum() -> None:
    connection = opened(connect=WINDOW_OF_2)
    send_publish(connection, "t", b"", 1)
    send_publish(connection, "t", b"", 1)
    connection.data_to_send()
    events = say(
        connection, "c0 00", "82 * 0001 00 s't' 00", "a2 * 0002 00 s't'", "32 * s't' 0003 00", "34 * s't' 0004 00"
    )
    assert [type(one) for one in events] == [packets.Subscribe, packets.Unsubscribe, packets.Publish, packets.Publish]
    connection.send_suback(1, [0])
    connection.send_unsuback(2, [0])
    connection.send_puback(3)
    connection.send_pubrec(4)
    assert send_publish(connection, "t", b"") == 0
    assert connection.data_to_send() == bytes.fromhex(
        "d000 9004000100 00 b004000200 00 40020003 50020004 3004000174 00"
    )
    connection.send_disconnect(0x8B)
    assert ended_by(connection) == (0xE0, 0x8B)


# the size of the gateway's packets


LONG = Properties(reason_string="x" * 100)
MANY = Properties(user_properties=(("x" * 50, "y" * 50),))


def connack_of_failure(connection: Connection, extra: Properties) -> None:
    connection.send_disconnect(0x87, properties=extra)


def puback(connection: Connection, extra: Properties) -> None:
    say(connection, "32 * s't' 0001 00")
    connection.send_puback(1, 0x97, extra.reason_string)


def pubrec(connection: Connection, extra: Properties) -> None:
    say(connection, "34 * s't' 0001 00")
    connection.send_pubrec(1, 0x97, extra.reason_string)


def pubrel(connection: Connection, _extra: Properties) -> None:
    connection.send_pubrel(1, 0x92)


def pubcomp(connection: Connection, _extra: Properties) -> None:
    connection.send_pubcomp(1, 0x92)


def suback(connection: Connection, extra: Properties) -> None:
    connection.send_suback(1, [0x87], extra)


def unsuback(connection: Connection, extra: Properties) -> None:
    connection.send_unsuback(1, [0x87], extra)


def disconnect(connection: Connection, extra: Properties) -> None:
    connection.send_disconnect(0x8B, properties=extra)


@pytest.mark.parametrize("extra", [LONG, MANY], ids=["reason string", "user properties"])
@pytest.mark.parametrize(
    ("speak", "short"),
    [
        pytest.param(connack_of_failure, "20 03 00 87 00", marks=pytest.mark.clause("MQTT-3.2.2-19", "MQTT-3.2.2-20")),
        pytest.param(puback, "40 03 0001 97", marks=pytest.mark.clause("MQTT-3.4.2-2", "MQTT-3.4.2-3")),
        pytest.param(pubrec, "50 03 0001 97", marks=pytest.mark.clause("MQTT-3.5.2-2", "MQTT-3.5.2-3")),
        pytest.param(pubrel, "62 03 0001 92", marks=pytest.mark.clause("MQTT-3.6.2-2", "MQTT-3.6.2-3")),
        pytest.param(pubcomp, "70 03 0001 92", marks=pytest.mark.clause("MQTT-3.7.2-2", "MQTT-3.7.2-3")),
        pytest.param(suback, "90 04 0001 00 87", marks=pytest.mark.clause("MQTT-3.9.2-1", "MQTT-3.9.2-2")),
        pytest.param(unsuback, "b0 04 0001 00 87", marks=pytest.mark.clause("MQTT-3.11.2-1", "MQTT-3.11.2-2")),
        pytest.param(disconnect, "e0 01 8b", marks=pytest.mark.clause("MQTT-3.14.2-3", "MQTT-3.14.2-4")),
    ],
)
def test_a_reason_string_never_makes_a_packet_too_large(
    speak: Callable[[Connection, Properties], None], short: str, extra: Properties
) -> None:
    """The reason string and user properties are sent if they fit, and omitted if one byte too long."""
    sizes: list[int] = []
    for limit in (1000, 0):
        connection = new()
        say(connection, f"10 * s'MQTT' 05 02 000a v 27 {limit or max(sizes[0] - 1, 40):08x} ; s'me'")
        if speak is not connack_of_failure:
            connection.accept(properties=Properties(maximum_packet_size=65_536))
            connection.data_to_send()
        speak(connection, extra)
        said = connection.data_to_send()
        sizes.append(len(said))
    assert sizes[0] == len(wire(short)) or sizes[0] > 100
    assert said == wire(short)


@pytest.mark.clause("MQTT-3.15.2-2", "MQTT-3.15.2-3")
@pytest.mark.parametrize("extra", [LONG, MANY], ids=["reason string", "user properties"])
def test_a_reason_string_never_makes_auth_too_large(extra: Properties) -> None:
    connection = new()
    say(connection, "10 * s'MQTT' 05 02 000a v 15 s'M' 27 00000032 ; s'me'")
    connection.send_auth(0x18, msgspec.structs.replace(extra, authentication_method="M"))
    assert connection.data_to_send() == wire("f0 * 18 v 15 s'M' ;")


@pytest.mark.clause("MQTT-3.1.2-24", "MQTT-3.1.2-25")
def test_a_too_large_message_is_dropped_and_not_in_flight() -> None:
    connection = opened(connect="10 * s'MQTT' 05 02 000a v 27 00000014 ; s'me'")
    for qos, size in ((0, 14), (1, 12), (2, 12)):
        before = connection.outbound.used
        assert send_publish(connection, "t", b"x" * (size + 1), qos) is None
        assert connection.outbound.used == before
        assert connection.data_to_send() == b""
        assert send_publish(connection, "t", b"x" * size, qos) is not None
        assert len(connection.data_to_send()) == 20


@pytest.mark.clause("MQTT-3.1.2-29")
def test_no_reason_strings_without_request_problem_information() -> None:
    connect = "10 * s'MQTT' 05 02 000a v 17 00 ; s'me'"
    for speak, short in (
        (puback, "40 03 0001 97"), (pubrec, "50 03 0001 97"), (pubrel, "62 03 0001 92"), (pubcomp, "70 03 0001 92"),
        (suback, "90 04 0001 00 87"), (unsuback, "b0 04 0001 00 87"),
    ):  # fmt: skip
        connection = opened(connect=connect)
        speak(connection, msgspec.structs.replace(LONG, user_properties=MANY.user_properties))
        assert connection.data_to_send() == wire(short)


@pytest.mark.clause("MQTT-3.14.4-1", "MQTT-3.14.4-2", "MQTT-4.13.2-1")
def test_nothing_is_sent_after_the_gateway_s_disconnect() -> None:
    connection = opened()
    connection.send_disconnect(0x8B)
    assert connection.data_to_send() == b"\xe0\x01\x8b"
    assert connection.closing
    for speak in (puback, pubrec, pubrel, pubcomp, suback, unsuback, disconnect):
        speak(connection, Properties())
    with pytest.raises(UsageError):
        send_publish(connection, "t", b"")
    assert connection.data_to_send() == b""


@pytest.mark.clause("MQTT311-3.14.4-1", "MQTT311-3.14.4-2", "MQTT-3.14.4-1", "MQTT-3.14.4-2")
@BOTH
def test_nothing_is_processed_after_the_client_s_disconnect(version: int) -> None:
    connection = opened(version)
    assert len(say(connection, "e0 00", f"30 * s't' {none(version)}", "c0 00")) == 1
    connection.finish()
    assert connection.closing  # even if the client keeps it open
    assert say(connection, f"30 * s't' {none(version)}") == []
    assert connection.data_to_send() == b""


@pytest.mark.clause("MQTT-3.14.0-1")
def test_no_disconnect_before_connack() -> None:
    connection = new()
    say(connection, CONNECTS[5])
    connection.send_disconnect(0x8B)
    assert connection.data_to_send()[0] == 0x20
    connection = new()
    connection.send_disconnect(0x8B)
    assert connection.data_to_send() == b""


@pytest.mark.clause("MQTT-3.12.4-1", "MQTT311-3.12.4-1")
@BOTH
def test_a_ping_is_answered(version: int) -> None:
    connection = opened(version)
    assert say(connection, "c0 00", "c0 00") == []
    assert connection.data_to_send() == b"\xd0\x00" * 2


# reason codes

TABLES = {
    packets.Connack: "00 80 81 82 83 84 85 86 87 88 89 8a 8c 90 95 97 99 9a 9b 9c 9d 9f",
    packets.Puback: "00 10 80 83 87 90 91 97 99",
    packets.Pubrec: "00 10 80 83 87 90 91 97 99",
    packets.Pubrel: "00 92",
    packets.Pubcomp: "00 92",
    packets.Suback: "00 01 02 80 83 87 8f 91 97 9e a1 a2",
    packets.Unsuback: "00 11 80 83 87 8f 91",
    packets.Disconnect: "00 04 80 81 82 83 87 89 8b 8d 8e 8f 90 93 94 95 96 97 98 99 9a 9b 9c 9d 9e 9f a0 a1 a2",
    packets.Auth: "00 18 19",
}


def carry(kind: type, code: int) -> packets.Packet:
    if kind in (packets.Suback, packets.Unsuback):
        return kind(1, (code,))
    if kind is packets.Connack:
        return packets.Connack(False, code)
    return kind(code) if kind in (packets.Disconnect, packets.Auth) else kind(1, code)


@pytest.mark.clause("MQTT-3.2.2-8", "MQTT-3.4.2-1", "MQTT-3.5.2-1", "MQTT-3.6.2-1", "MQTT-3.7.2-1")
@pytest.mark.clause("MQTT-3.9.3-2", "MQTT-3.11.3-2", "MQTT-3.14.2-1", "MQTT-3.15.2-1")
@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_reason_codes_outside_a_packet_s_table_are_errors(kind: type) -> None:
    """The gateway cannot send a code outside the table; a client's is a protocol error."""
    allowed = bytes.fromhex(TABLES[kind])
    for code in range(256):
        packet = carry(kind, code)
        if code in allowed:
            assert code in encode_packet(packet, Version.V5) or code == 0
            continue
        with pytest.raises(UsageError):
            encode_packet(packet, Version.V5)


@pytest.mark.clause("MQTT-3.4.2-1", "MQTT-3.5.2-1", "MQTT-3.6.2-1", "MQTT-3.7.2-1", "MQTT-3.14.2-1", "MQTT-3.15.2-1")
@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("40 03 0001 {}", "00 10 80 83 87 90 91 97 99"),
        ("50 03 0001 {}", "00 10 80 83 87 90 91 97 99"),
        ("62 03 0001 {}", "00 92"),
        ("70 03 0001 {}", "00 92"),
        ("e0 01 {}", "00 04 80 81 82 83 90 93 94 95 96 97 98 99"),
        ("f0 * {} v 15 s'M' ;", "19"),  # 0x18 answers the gateway's AUTH
    ],
)
def test_a_client_may_not_send_server_reason_codes(text: str, allowed: str) -> None:
    """Some codes of DISCONNECT and AUTH are for servers only."""
    connect = "10 * s'MQTT' 05 02 000a v 15 s'M' ; s'me'"
    for code in range(256):
        connection = opened(connect=connect, announced=Properties(authentication_method="M"))
        refused = any(type(one) is ConnectionFailed for one in say(connection, text.format(f"{code:02x}")))
        assert refused is (code not in bytes.fromhex(allowed))


@pytest.mark.clause("MQTT311-3.9.3-2")
@pytest.mark.parametrize("code", [0, 1, 2, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2])
def test_suback_of_311_has_one_failure_code(code: int) -> None:
    connection = opened(4)
    connection.send_suback(7, [code])
    assert connection.data_to_send() == bytes.fromhex("90030007") + bytes((min(code, 0x80),))
