"""The Python stand-in for `_native.c`'s `take_usual`, which parses runs of the usual packets (ADR 0088).

It takes none: `protocols.mqtt.receiving` then parses them all, with the same results as C.
"""

from __future__ import annotations

from typing import Any

from protocols.mqtt.states import Awaits, PublishFlags


def take_usual(
    _buffer: bytes,
    position: int,  # of the next packet
    _found: list[Any],  # receives the events
    _v5: bool,
    _limit: int,  # maximum packet size in bytes
    _window: int,  # number of QoS 1 and 2 messages that the client may still send
    _flags: PublishFlags,
    _alias_maximum: int,  # announced in CONNACK
    _aliases: dict[int, str],  # this and the next two belong to the connection
    _qos2: dict[int, bool],
    _awaited: dict[int, Awaits],
    /,
) -> tuple[int, int, int]:
    """Parse PUBLISH packets and acknowledgements without reason code, as long as they are valid.

    Returns:
        The position of the first packet left to the caller, the number of QoS 1 and 2 messages received, and the
        number of deliveries that have ended; the caller updates the connection's windows by these.
    """
    return position, 0, 0
