"""A client written in bytes, for the tests of the server's connection."""

from __future__ import annotations

from typing import Any

from protocols.connection import ConnectionFailed
from protocols.mqtt.connection import Connection, PacketLimits, State
from protocols.mqtt.encoding import prepare_publish
from protocols.mqtt.properties import NONE, Properties
from tests.protocols.mqtt.wire import wire

CONNECT_5 = "10 * s'MQTT' 05 02 000a 00 s'me'"
CONNECT_311 = "10 * s'MQTT' 04 02 000a s'me'"
CONNECT_31 = "10 * s'MQIsdp' 03 02 000a s'me'"
CONNECTS = {5: CONNECT_5, 4: CONNECT_311, 3: CONNECT_31}


def new(limits: PacketLimits | None = None) -> Connection:
    connection = Connection(limits)
    assert connection.tick(100.0) == []
    return connection


def opened(
    version: int = 5, announced: Properties = NONE, limits: PacketLimits | None = None, connect: str | None = None
) -> Connection:
    connection = new(limits)
    say(connection, connect or CONNECTS[version])
    assert connection.accept(properties=announced) == []
    connection.data_to_send()
    assert connection.state is State.OPEN
    return connection


def say(connection: Connection, *texts: str) -> list[Any]:
    return connection.receive_data(b"".join(wire(text) for text in texts))


def failed(events: list[Any]) -> str:
    """Return the code of the single failure that ends `events`."""
    assert [type(one) for one in events].count(ConnectionFailed) == 1
    assert type(events[-1]) is ConnectionFailed
    return str(events[-1].code)


def ended_by(connection: Connection) -> tuple[int, int] | None:
    """Return the first byte and the reason code of the last packet, once the connection is closing."""
    assert connection.closing
    data = connection.data_to_send()
    if not data:
        return None
    return data[0], data[3] if data[0] == 0x20 else data[2]


def send_publish(
    connection: Connection,
    topic: str,
    payload: bytes,
    qos: int = 0,
    *,
    retain: bool = False,
    dup: bool = False,
    properties: Properties | None = None,
    packet_id: int | None = None,
) -> int | None:
    """Encode and send one message; see `Sender.send_prepared`."""
    assert connection.version is not None
    message = prepare_publish(topic, payload, properties, connection.version)
    return connection.send_prepared(message, qos, retain=retain, dup=dup, packet_id=packet_id)
