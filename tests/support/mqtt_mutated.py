"""Compares the C and Python MQTT decoders on randomly mutated PUBLISH packets of the load tests.

    python -m tests.support.mqtt_mutated [--count 1000000] [--seed 1]

Stops at the first difference. Otherwise prints how many packets were compared and how many were valid PUBLISHes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

from loadtest.clients.mqtt_wire import connect_packet
from loadtest.clients.pace import Pace
from loadtest.numbering import Numbering
from loadtest.run.shapes import MESSAGES, Packets, Shape
from protocols.mqtt import _native, receiving
from protocols.mqtt.connection import Connection
from protocols.mqtt.packets import Publish
from protocols.mqtt.properties import Properties
from tests.support.amqp_mutated import damaged

RUN: Final = 6  # maximum number of packets in a stream
ANNOUNCED: Final = (
    Properties(topic_alias_maximum=3),
    Properties(receive_maximum=3, retain_available=0),
    Properties(maximum_packet_size=300, maximum_qos=1, topic_alias_maximum=1),
)
SIGNIFICANT: Final = bytes.fromhex(
    "00 01 02 03 08 09 0b 11 23 26 2b 2f 30 32 34 3c 40 50 62 70 7f 80 a9 bf c0 c3 e2 ed f0 ff"
)
"""Packet types and flags, properties, wildcards, and boundary values of UTF-8 bytes and lengths."""

Take = Callable[..., tuple[int, int, int]]


def streams(rng: random.Random) -> Iterator[tuple[bytes, int]]:
    """Yield streams of packets with their number of packets, endlessly."""
    whole: list[bytes] = []
    for qos in (0, 1, 2):
        for kind in MESSAGES:
            shape = Shape("mqtt", kind, "t", 64, 5, Numbering(), 1, qos=qos or 1)
            found = Packets(shape, Pace(1, None))[0:20]
            # QoS 0 has no packet identifier, so its bytes become data.
            whole += found if qos else [bytes((0x30,)) + packet[1:] for packet in found]
    whole += [bytes((kind, 2, 0, number)) for kind in (0x40, 0x50, 0x62, 0x70) for number in range(4)]
    while True:
        packets = rng.choices(whole, k=rng.randint(1, RUN))
        place = rng.randrange(len(packets))
        if rng.random() < 0.6:
            packets[place] = damaged(rng, packets[place], SIGNIFICANT)
        yield b"".join(packets), len(packets)


def take_none(_buffer: bytes, position: int, *_others: Any) -> tuple[int, int, int]:
    """Leave every packet to Python."""
    return position, 0, 0


def played(take: Take, announced: Properties, pieces: list[bytes]) -> Any:
    """Feed data to a new connection and return everything observable: events, output and state."""
    with mock.patch.object(receiving, "take_usual", take):
        connection = Connection(None)
        connection.tick(100.0)
        connection.receive_data(connect_packet("mutated"))
        connection.accept(properties=announced)
        connection.data_to_send()
        events = [event for piece in pieces for event in connection.receive_data(piece)]
    state = connection.state, connection.inbound.used, connection.outbound.used
    return events, [type(one) for one in events], connection.data_to_send(), state


def compare(count: int, seed: int) -> tuple[int, int]:
    """Compare at least `count` packets; return how many were compared and how many were PUBLISHes taken as valid.

    Raises:
        AssertionError: C and Python differ for a stream.
    """
    rng = random.Random(seed)
    made = streams(rng)
    done = publishes = 0
    while done < count:
        stream, packets = next(made)
        cut, announced = rng.randint(0, len(stream)), rng.choice(ANNOUNCED)
        pieces = [stream[:cut], stream[cut:]]
        found = played(_native.take_usual, announced, pieces)
        assert found == played(take_none, announced, pieces), f"{stream.hex()} cut at {cut}, {announced}"
        done += packets
        publishes += sum(type(event) is Publish for event in found[0])
    return done, publishes


def main() -> None:
    """Run the comparison and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    done, publishes = compare(arguments.count, arguments.seed)
    print(f"{done} packets, all equal; {publishes} valid PUBLISHes")


if __name__ == "__main__":
    main()
