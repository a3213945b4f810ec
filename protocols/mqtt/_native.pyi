from typing import Any

from protocols.mqtt.states import Awaits, PublishFlags

def take_usual(
    buffer: bytes,
    position: int,  # of the next packet
    found: list[Any],  # receives the events
    v5: bool,
    limit: int,  # maximum packet size in bytes
    window: int,  # number of QoS 1 and 2 messages that the client may still send
    flags: PublishFlags,
    alias_maximum: int,  # announced in CONNACK
    aliases: dict[int, str],  # this and the next two belong to the connection
    qos2: dict[int, bool],
    awaited: dict[int, Awaits],
    /,
) -> tuple[int, int, int]:
    """Parse PUBLISH packets and acknowledgements without reason code, as long as they are valid.

    Returns:
        The position of the first packet left to the caller, the number of QoS 1 and 2 messages received, and the
        number of deliveries that have ended; the caller updates the connection's windows by these.
    """
