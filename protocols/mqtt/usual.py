"""What most packets are, taken many at a time: nothing here, `_native.c` does it (ADR 0070).

`protocols.mqtt.receiving` says of every packet what it means, and in C nothing else comes of those that are taken.
"""

from __future__ import annotations

from typing import Any

from protocols.mqtt.states import Awaits, PublishFlags


def take_usual(
    _buffer: bytes,
    position: int,  # of the next packet in it
    _found: list[Any],  # events are appended to it
    _v5: bool,
    _limit: int,  # bytes of a packet
    _window: int,  # messages of QoS 1 and 2 that may still come
    _flags: PublishFlags,
    _alias_maximum: int,  # the one we announced
    _aliases: dict[int, str],  # this and the next two are the connection's
    _qos2: dict[int, bool],
    _awaited: dict[int, Awaits],
    /,
) -> tuple[int, int, int]:
    """Take PUBLISH packets, and acknowledgements that say nothing but their identifiers, as long as they are good.

    Returns:
        Where the first packet begins that is left for a closer look, how many messages of the client's have begun, and
        how many of ours have ended: the connection's windows are not told here.
    """
    return position, 0, 0
