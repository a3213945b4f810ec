"""Messages that are held back: other packets are sent, and the messages follow in order."""

from __future__ import annotations

import pytest

from protocols.mqtt.encoding import encode_prepared, prepare_publish
from protocols.mqtt.packets import Version
from tests.protocols.mqtt.client import opened, say, send_publish
from tests.protocols.mqtt.wire import wire


def test_acknowledgements_leave_and_messages_follow() -> None:
    connection = opened(4)
    say(connection, "34 * s't' 0001")
    send_publish(connection, "t", b"before")
    connection.hold_messages()
    send_publish(connection, "t", b"a", 1)
    packet = encode_prepared(prepare_publish("t", b"b", None, Version.V311), retain=False)
    assert connection.send_encoded(packet, len(packet))
    connection.send_pubrec(1)
    assert connection.data_to_send() == wire("30 * s't' 'before'") + wire("50 02 0001")
    connection.hold_messages()  # they are held back already
    assert connection.unsent == len(wire("32 * s't' 0001 'a'") + wire("30 * s't' 'b'"))
    assert connection.data_to_send() == b""
    connection.send_pubrel(7)
    connection.release_messages()
    send_publish(connection, "t", b"c")
    assert connection.data_to_send() == (
        wire("62 02 0007") + wire("32 * s't' 0001 'a'") + wire("30 * s't' 'b'") + wire("30 * s't' 'c'")
    )
    connection.release_messages()
    assert connection.data_to_send() == b""


@pytest.mark.parametrize("version", [4, 5])
def test_a_close_comes_behind_them(version: int) -> None:
    connection = opened(version)
    connection.hold_messages()
    send_publish(connection, "t", b"a")
    connection.send_disconnect(0x8B)
    data = connection.data_to_send()
    assert data.startswith(wire("30 * s't' 'a'") if version == 4 else wire("30 * s't' 00 'a'"))
    assert data.endswith(b"" if version == 4 else wire("e0 01 8b"))
