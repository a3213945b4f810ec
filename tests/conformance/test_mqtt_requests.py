"""SUBSCRIBE, UNSUBSCRIBE, DISCONNECT and AUTH on a single connection: sections 3.8-3.11, 3.14, 3.15, 4.8 and 4.12."""

from __future__ import annotations

import pytest

from protocols.connection import ConnectionFailed
from protocols.errors import UsageError
from protocols.mqtt import packets
from protocols.mqtt.connection import Connection, State
from protocols.mqtt.packets import Subscription
from protocols.mqtt.properties import Properties
from tests.protocols.mqtt.client import ended_by, failed, new, opened, say
from tests.protocols.mqtt.wire import wire

BOTH = pytest.mark.parametrize("version", [5, 4], ids=["5.0", "3.1.1"])
METHOD = "10 * s'MQTT' 05 02 000a v 15 s'M' ; s'me'"


def none(version: int) -> str:
    return "00" if version == 5 else ""


@pytest.mark.clause("MQTT-3.8.3-2", "MQTT-3.10.3-2", "MQTT311-3.8.3-3", "MQTT311-3.10.3-2")
@BOTH
@pytest.mark.parametrize("text", ["82 * 0001 {}", "a2 * 0001 {}"])
def test_a_request_without_filters_is_refused(version: int, text: str) -> None:
    connection = opened(version)
    assert failed(say(connection, text.format(none(version)))) == "0x82"
    assert connection.closing


@pytest.mark.clause("MQTT311-3.10.3-1", "MQTT-3.10.3-1", "MQTT-2.2.1-6", "MQTT311-2.3.1-7")
@BOTH
def test_filters_keep_their_order(version: int) -> None:
    connection = opened(version)
    (event,) = say(connection, f"a2 * 0007 {none(version)} s'a' s'b/#' s'c'")
    assert event == packets.Unsubscribe(7, ("a", "b/#", "c"))
    connection.send_unsuback(7, [0, 0, 0x11])
    assert connection.data_to_send() == (wire("b0 * 0007 00 00 00 11") if version == 5 else bytes.fromhex("b0020007"))
    (event,) = say(connection, f"82 * 0008 {none(version)} s'a' 00 s'b/#' 02")
    assert event == packets.Subscribe(8, (Subscription("a", 0), Subscription("b/#", 2)))
    connection.send_suback(8, [0, 2])
    assert connection.data_to_send() == wire(f"90 * 0008 {none(version)} 00 02")


@pytest.mark.clause("MQTT-3.8.3-5", "MQTT311-3.8.3-4")
@BOTH
def test_subscription_options_are_valid_or_refused(version: int) -> None:
    """3.1.1 uses two bits, with one invalid combination; 5.0 uses six, with two invalid combinations."""
    for options in range(256):
        legal = options & 3 != 3 and (options < 4 if version == 4 else options < 0x40 and options & 0x30 != 0x30)
        events = say(opened(version), f"82 * 0001 {none(version)} s'a' {options:02x}")
        assert (type(events[-1]) is not ConnectionFailed) is legal, options
        if not legal:
            reserved = options >= (4 if version == 4 else 0x40)
            assert failed(events) == ("0x81" if reserved else "0x82"), options


@pytest.mark.clause("MQTT-3.8.3-4")
def test_no_local_on_a_shared_subscription_is_refused() -> None:
    assert failed(say(opened(), "82 * 0001 00 s'$share/g/a' 04")) == "0x82"
    assert failed(say(opened(), "82 * 0001 00 s'a' 04 s'$share/g/a' 05")) == "0x82"
    assert len(say(opened(), "82 * 0001 00 s'$share/g/a' 01")) == 1


@pytest.mark.clause("MQTT-4.8.2-1", "MQTT-4.8.2-2")
@pytest.mark.parametrize(
    "topic_filter",
    ["$share", "$share/", "$share//a", "$share/g", "$share/g/", "$share/g+/a", "$share/#/a", "$share/g/a#"],
)
def test_a_shared_filter_has_a_name_and_a_filter(topic_filter: str) -> None:
    events = say(opened(), f"82 * 0001 00 s'{topic_filter}' 00")
    if topic_filter == "$share":  # an ordinary filter
        assert type(events[0]) is packets.Subscribe
        return
    assert failed(events) == "0x81"


@pytest.mark.clause("MQTT-3.14.2-1", "MQTT-3.14.1-1")
@pytest.mark.parametrize("code", [0x00, 0x04, 0x80, 0x99])
def test_a_client_s_disconnect_closes_the_connection(code: int) -> None:
    connection = opened()
    (event,) = say(connection, f"e0 01 {code:02x}")
    assert type(event) is packets.Disconnect
    assert event.reason_code == code
    connection.finish()
    assert ended_by(connection) is None


@pytest.mark.clause("MQTT-4.12.0-2", "MQTT-4.12.0-3", "MQTT-4.12.0-5", "MQTT-3.15.2-1")
def test_authentication_completes_by_auth_packets() -> None:
    connection = authenticating()
    connection.send_auth(0x18, Properties(authentication_method="M", authentication_data=b"?"))
    assert connection.data_to_send() == wire("f0 * 18 v 15 s'M' 16 s'?' ;")
    (event,) = say(connection, "f0 * 18 v 15 s'M' 16 s'!' ;")
    assert type(event) is packets.Auth
    connection.accept(properties=Properties(authentication_method="M"))
    assert wire("15 s'M'") in connection.data_to_send()


@pytest.mark.clause("MQTT-4.12.0-3", "MQTT-4.12.0-5")
@pytest.mark.parametrize(
    "text", ["f0 * 18 v 15 s'N' ;", "f0 * 18 00", "f0 00", "f0 * 19 v 15 s'M' ;", "f0 * 00 v 15 s'M' ;"]
)
def test_a_wrong_authentication_step_is_refused(text: str) -> None:
    connection = authenticating()
    assert failed(say(connection, text)) == "0x82"
    assert ended_by(connection) == (0x20, 0x82)


@pytest.mark.clause("MQTT-4.12.0-1", "MQTT-4.12.0-4")
@pytest.mark.parametrize("code", [0x8C, 0x87, 0x86])
def test_authentication_can_be_refused_at_every_step(code: int) -> None:
    for steps in range(3):
        connection = authenticating()
        for _ in range(steps):
            connection.send_auth(0x18, Properties(authentication_method="M"))
            say(connection, "f0 * 18 v 15 s'M' ;")
        connection.data_to_send()
        connection.send_disconnect(code)
        assert ended_by(connection) == (0x20, code)


@pytest.mark.clause("MQTT-4.12.0-6", "MQTT-4.12.0-7")
def test_auth_without_a_method_is_refused() -> None:
    connection = opened()
    with pytest.raises(UsageError):
        connection.send_auth(0x18, Properties(authentication_method="M"))
    assert failed(say(connection, "f0 * 19 v 15 s'M' ;")) == "0x82"
    assert ended_by(connection) == (0xE0, 0x82)


@pytest.mark.clause("MQTT-4.12.1-1", "MQTT-4.12.1-2")
def test_a_client_re_authenticates() -> None:
    announced = Properties(authentication_method="M")
    connection = opened(announced=announced, connect=METHOD)
    (event,) = say(connection, "f0 * 19 v 15 s'M' ;")
    assert (event.reason_code, event.properties.authentication_method) == (0x19, "M")
    assert connection.is_open  # messages continue meanwhile
    connection.send_disconnect(0x87)
    assert ended_by(connection) == (0xE0, 0x87)
    connection = opened(announced=announced, connect=METHOD)
    assert failed(say(connection, "f0 * 19 v 15 s'N' ;")) == "0x82"


def authenticating() -> Connection:
    connection = new()
    say(connection, METHOD)
    assert connection.state is State.AUTHENTICATING
    return connection
