"""The state table, tested whole: every state, every packet, and what a client may send in it."""

from __future__ import annotations

import pytest

from protocols.connection import ConnectionFailed
from protocols.mqtt.connection import Connection, State
from protocols.mqtt.reasons import PacketType
from protocols.mqtt.states import LEGAL
from tests.protocols.mqtt.client import CONNECT_5, new, say
from tests.protocols.mqtt.wire import wire

METHOD = "10 * s'MQTT' 05 02 000a v 15 s'M' ; s'me'"
PACKETS = {
    PacketType.RESERVED: "00 00",
    PacketType.CONNECT: CONNECT_5,
    PacketType.CONNACK: "20 03 00 00 00",
    PacketType.PUBLISH: "30 * s't' 00",
    PacketType.PUBACK: "40 02 0001",
    PacketType.PUBREC: "50 02 0001",
    PacketType.PUBREL: "62 02 0001",
    PacketType.PUBCOMP: "70 02 0001",
    PacketType.SUBSCRIBE: "82 * 0001 00 s't' 00",
    PacketType.SUBACK: "90 * 0001 00 00",
    PacketType.UNSUBSCRIBE: "a2 * 0001 00 s't'",
    PacketType.UNSUBACK: "b0 * 0001 00 00",
    PacketType.PINGREQ: "c0 00",
    PacketType.PINGRESP: "d0 00",
    PacketType.DISCONNECT: "e0 00",
    PacketType.AUTH: "f0 * 18 v 15 s'M' ;",
}
CLIENT = {"PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "SUBSCRIBE", "UNSUBSCRIBE", "PINGREQ", "DISCONNECT"}
MAY = {
    "new": {"CONNECT"},
    "authenticating": {"AUTH", "DISCONNECT"},
    "open": CLIENT,
    "open with a method": CLIENT,
    "open, authenticating again": CLIENT | {"AUTH"},
}


def at(place: str) -> Connection:
    connection = new()
    if place == "new":
        return connection
    say(connection, CONNECT_5 if place in ("open", "connecting") else METHOD)
    if place.startswith("open"):
        connection.accept()
        if place == "open, authenticating again":
            say(connection, "f0 * 19 v 15 s'M' ;")
    if "authenticating" in place:
        connection.send_auth(0x18)
    connection.data_to_send()
    return connection


def test_every_state_is_in_the_table() -> None:
    assert set(LEGAL) == set(State)
    assert len(PACKETS) == 16


@pytest.mark.clause("MQTT-3.1.0-1")
@pytest.mark.clause("MQTT-3.1.0-2")
@pytest.mark.clause("MQTT-4.13.1-1")
@pytest.mark.parametrize("place", MAY)
@pytest.mark.parametrize("kind", PACKETS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("step", [1, 1000], ids=["in bytes", "whole"])
def test_every_packet_in_every_state(place: str, kind: PacketType, step: int) -> None:
    connection = at(place)
    data = wire(PACKETS[kind])
    events = []
    for start in range(0, len(data), step):
        events += connection.receive_data(data[start : start + step])
    if kind.name in MAY[place]:
        assert not any(type(one) is ConnectionFailed for one in events)
        if kind is PacketType.DISCONNECT:
            assert connection.closing is (place == "authenticating")  # there nothing is left to be answered
            connection.finish()
        assert connection.closing is (kind is PacketType.DISCONNECT)
        return
    assert [type(one) for one in events] == [ConnectionFailed]
    assert events[0].code == "0x82"
    assert connection.closing
    answer = connection.data_to_send()
    if place == "new":
        assert answer == b""  # nobody knows which version to say it in
    elif place == "authenticating":
        assert answer[0] == 0x20
        assert answer[3] == 0x82
    else:
        assert answer[0] == 0xE0
        assert answer[2] == 0x82


@pytest.mark.parametrize("kind", PACKETS, ids=lambda kind: kind.name)
def test_nothing_is_judged_while_connect_is(kind: PacketType) -> None:
    connection = at("connecting")
    assert say(connection, PACKETS[kind]) == []
    assert not connection.closing


@pytest.mark.parametrize("kind", PACKETS, ids=lambda kind: kind.name)
def test_nothing_is_heard_after_the_end(kind: PacketType) -> None:
    connection = at("open")
    connection.send_disconnect(0)
    connection.data_to_send()
    assert say(connection, PACKETS[kind]) == []
    assert connection.data_to_send() == b""
