"""CPU time per packet of the MQTT decoder and encoder.

    python -m loadtest.bench.mqtt_codec [--seconds 1.0]

Each row is the median of several runs, in microseconds per packet. A PUBLISH has a 38-byte topic and a 100-byte
payload.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

from loadtest.clients.mqtt_wire import packet, text
from protocols.mqtt.connection import Connection, PacketLimits
from protocols.mqtt.encoding import prepare_publish
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties

TOPIC: Final = "plant/north/line-07/pump-0042/pressure"
PAYLOAD: Final = b"x" * 100
COUNT: Final = 400  # packets per call, about one read of 64 KiB
READ: Final = 65_536
FOUR: Final = Properties(
    message_expiry_interval=60, content_type="text/plain", user_properties=(("site", "north"), ("unit", "bar"))
)


def opened(version: Version, announced: Properties | None = None) -> Connection:
    """Create a connection that has received and accepted CONNECT."""
    connection = Connection(PacketLimits(outgoing_inflight=65_535))
    connection.tick(0.0)
    properties = b"\0" if version is Version.V5 else b""
    connection.receive_data(packet(0x10, text("MQTT") + bytes((version, 2, 0, 0)) + properties + text("bench")))
    connection.accept(properties=announced or Properties())
    connection.data_to_send()
    return connection


def publishes(version: Version, qos: int, properties: Properties | None = None) -> bytes:
    """Encode the packets of one call."""
    message = prepare_publish(TOPIC, PAYLOAD, properties, version)
    identifiers = [number.to_bytes(2) if qos else b"" for number in range(1, COUNT + 1)]
    return b"".join(packet(0x30 | qos << 1, message.topic + one + message.rest) for one in identifiers)


def measure(run: Callable[[], Any], seconds: float) -> float:
    """Call `run` repeatedly and return the median time per packet in microseconds."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) / COUNT * 1e6)
    return statistics.median(times)


def rows() -> list[tuple[str, Callable[[], Any]]]:
    """List the names and functions to measure."""
    ids = list(range(1, COUNT + 1))

    def decode(version: Version, qos: int, properties: Properties | None = None) -> Callable[[], Any]:
        connection = opened(version)
        data = publishes(version, qos, properties)

        def run() -> None:
            found = connection.receive_data(data)
            assert len(found) == COUNT
            connection.inbound.used = 0

        return run

    def split() -> Callable[[], Any]:
        connection = opened(Version.V5)
        data = publishes(Version.V5, 1)
        pieces = [data[at : at + 1448] for at in range(0, len(data), 1448)]

        def run() -> None:
            found = sum(len(connection.receive_data(piece)) for piece in pieces)
            assert found == COUNT
            connection.inbound.used = 0

        return run

    def acknowledge(batch: bool) -> Callable[[], Any]:
        connection = opened(Version.V5)

        def run() -> None:
            connection.inbound.take(COUNT)
            if batch:
                connection.send_pubacks(ids)
            else:
                for packet_id in ids:
                    connection.send_puback(packet_id)
            assert len(connection.data_to_send()) == 4 * COUNT

        return run

    def send(qos: int, prepared: bool, properties: Properties | None = None) -> Callable[[], Any]:
        connection = opened(Version.V5)
        message = prepare_publish(TOPIC, PAYLOAD, properties, Version.V5)

        def run() -> None:
            for _ in range(COUNT):
                if prepared:
                    connection.send_prepared(message, qos)
                else:
                    connection.send_prepared(prepare_publish(TOPIC, PAYLOAD, properties, Version.V5), qos)
            connection.data_to_send()
            connection._awaited.clear()
            connection.outbound.used = 0

        return run

    def acknowledged() -> Callable[[], Any]:
        connection = opened(Version.V5)
        message = prepare_publish("t", b"", None, Version.V5)

        def run() -> None:
            sent = [connection.send_prepared(message, 1) or 0 for _ in range(COUNT)]
            connection.data_to_send()
            found = connection.receive_data(b"".join(b"\x40\x02" + one.to_bytes(2) for one in sent))
            assert len(found) == COUNT

        return run

    return [
        ("decode PUBLISH QoS 0, 5.0", decode(Version.V5, 0)),
        ("decode PUBLISH QoS 1, 5.0", decode(Version.V5, 1)),
        ("decode PUBLISH QoS 1, 5.0, in 1,448-byte pieces", split()),
        ("decode PUBLISH QoS 1, 3.1.1", decode(Version.V311, 1)),
        ("decode PUBLISH QoS 1, 5.0, 4 properties", decode(Version.V5, 1, FOUR)),
        ("prepare and send QoS 0", send(0, prepared=False)),
        ("prepare and send QoS 1", send(1, prepared=False)),
        ("prepare and send QoS 1, 4 properties", send(1, prepared=False, properties=FOUR)),
        ("send_prepared QoS 0", send(0, prepared=True)),
        ("send_prepared QoS 1", send(1, prepared=True)),
        ("send_prepared QoS 1 and its PUBACK", acknowledged()),
        ("send_puback, one by one", acknowledge(batch=False)),
        ("send_pubacks, 400 at once", acknowledge(batch=True)),
    ]


def main() -> None:
    """Run all measurements and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of each row's measurement")
    seconds = parser.parse_args().seconds
    for name, run in rows():
        print(f"{name:50} {measure(run, seconds):7.3f} us")


if __name__ == "__main__":
    main()
