"""Frames that proton writes and that must not be sent as they are."""

from __future__ import annotations

import struct
from typing import Final

from protocols.amqp import primitives

FLOW: Final = b"\x00\x53\x13"  # the performative's descriptor (part 2.7.4), as proton encodes it
SESSION_FIELDS: Final = 4  # the fields of a flow that are the session's; the next one is the link's handle
_UNATTACHED: Final = primitives.uint(0xFFFFFFFE)
"""The handle that proton has for a link which it has detached."""


def mend_flows(output: bytes) -> bytes:
    """Return proton's output with each flow for a detached link as one for its session alone.

    proton opens the session's window again with a flow for the link whose transfer used it up, also when that link is
    detached. The peer would have to end the session (part 2.7.4).
    """
    if _UNATTACHED not in output:
        return output
    parts, at = [], 0
    while at < len(output):
        size = int.from_bytes(output[at : at + 4], "big")
        parts.append(_mended(output[at : at + size]))
        at += size
    return b"".join(parts)


def _mended(frame: bytes) -> bytes:
    body = frame[4] * 4
    if not frame.startswith(FLOW, body):
        return frame
    _, start, end = primitives.compound(frame, body + len(FLOW), len(frame))
    at = start
    for _ in range(SESSION_FIELDS):
        at = primitives.skip(frame, at, end)
    if not frame.startswith(_UNATTACHED, at):
        return frame
    session = FLOW + struct.pack("!BBB", 0xC0, at - start + 1, SESSION_FIELDS) + frame[start:at]
    return struct.pack("!I", body + len(session)) + frame[4:body] + session
